// How the positions of a head of keys are shared out among the blocks of threads of one cluster or several.

// A block's share of the pieces of what is open: its warps take them in turns. As few clusters work as have enough to
// do.
struct Share {
    int clusters, split, splits, count, warp;

    __device__ __forceinline__ explicit Share(int open)
    {
        int pieces = open == 0 ? 0 : open * TILE_PIECES - last_closed();
        clusters = pieces <= ALONE ? 1 : min(CLUSTERS, (pieces + ENOUGH - 1) / ENOUGH);
        split = int(blockIdx.x);
        splits = clusters * CLUSTER;
        count = max(0, (pieces - split + splits - 1) / splits);
        warp = int(threadIdx.x) / 32;
    }
    __device__ __forceinline__ bool is_nobodys() const { return split >= splits; }
    // The block that has the fewest pieces.
    __device__ __forceinline__ bool is_last() const { return split == splits - 1; }
    __device__ __forceinline__ int busy_warps() const { return min(count, WARPS); }
    __device__ __forceinline__ bool has(int turn) const { return warp + turn * WARPS < count; }
    __device__ __forceinline__ int position(int turn) const
    {
        return (tile(turn) >> 1) * BLOCK + piece(turn) % TILE_PIECES * PIECE;
    }
    __device__ __forceinline__ bool is_masked(int turn) const { return !(tile(turn) & 1); }

private:
    __device__ __forceinline__ int piece(int turn) const { return split + (warp + turn * WARPS) * splits; }
    __device__ __forceinline__ int tile(int turn) const { return open_blocks()[piece(turn) / TILE_PIECES]; }
};

#if FRESH
// Where in memory new keys and values of a head of keys go, one of each for each thread; negative where there is no such
// place. No branch stands between these loads and those that follow.
struct OwnPlaces {
    int key, value;

    __device__ __forceinline__ OwnPlaces(int batch, int head, OPERAND_PARAMETERS const Params& p)
    {
        int row = int(threadIdx.x) % FRESH;
        key = int(key_place(batch, head, row, 0, OPERAND_ARGUMENTS p));
        value = int(value_place(batch, head, row, 0, OPERAND_ARGUMENTS p));
    }

    // Writes them down for all threads, which may read them behind a barrier.
    __device__ __forceinline__ void leave(int (&key_places)[FRESH], int (&value_places)[FRESH]) const
    {
        if (threadIdx.x < FRESH) {
            key_places[threadIdx.x] = key;
            value_places[threadIdx.x] = value;
        }
    }
};

// Records indices beyond their tensors, at the end, where nothing waits for it.
__device__ __forceinline__ void report_places(
    const int (&key_places)[FRESH], const int (&value_places)[FRESH], int batch, int head,
    OPERAND_PARAMETERS const Params& p)
{
    #pragma unroll 1
    for (int row = 0; row < FRESH; ++row) {
        if (key_places[row] < 0) {
            report_key_place(batch, head, row, 0, OPERAND_ARGUMENTS p);
        }
        if (value_places[row] < 0) {
            report_value_place(batch, head, row, 0, OPERAND_ARGUMENTS p);
        }
    }
}
#endif
