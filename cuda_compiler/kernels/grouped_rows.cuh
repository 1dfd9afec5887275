// Rows in groups: which rows of which group a block has. Rows behind the last group count as one more group, whose
// results are zeros.
struct Rows {
    int group, first, end; // no rows where `first` is not below `end`
};

__device__ __forceinline__ int clamped(end_t end, int most) { return end < 0 ? 0 : end > most ? most : int(end); }

// The tile of a number, of `height` rows of a group at the most. Ends that do not ascend are brought between the
// bounds, so that no row lies outside. For all threads of a block; what it gives is the same for all.
__device__ __forceinline__ Rows rows_of(int tile, int height, const end_t* ends, const Params& p)
{
    __shared__ Rows found;
    if (threadIdx.x < 32) {
        int lane = int(threadIdx.x), before = 0;
        bool is_found = false;
        if (lane == 0) {
            found = {p.groups, 0, 0};
        }
        __syncwarp();
        for (int base = 0; base <= p.groups && !is_found; base += 32) {
            int group = base + lane;
            int first = group == 0 || group > p.groups ? 0 : clamped(ends[(long long)(group - 1) * p.end_step], p.m);
            int end = group > p.groups    ? 0
                      : group == p.groups ? p.m
                                          : clamped(ends[(long long)group * p.end_step], p.m);
            int tiles = end > first ? (end - first + height - 1) / height : 0, through = tiles;
            #pragma unroll
            for (int distance = 1; distance < 32; distance *= 2) {
                int other = __shfl_up_sync(0xffffffffu, through, distance);
                through += lane >= distance ? other : 0;
            }
            int inside = tile - before - (through - tiles);
            if (inside >= 0 && inside < tiles) {
                found = {group, first + inside * height, min(end, first + (inside + 1) * height)};
            }
            is_found = __any_sync(0xffffffffu, inside >= 0 && inside < tiles);
            before += __shfl_sync(0xffffffffu, through, 31);
        }
    }
    __syncthreads();
    return found;
}
