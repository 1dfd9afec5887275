// How the positions of a head of keys are shared out among the blocks of threads of one cluster or several.
constexpr int TILE_PIECES = BLOCK / PIECE;

// The blocks of positions that are open, each times two, plus one where the mask changes nothing.
__device__ __forceinline__ unsigned short* open_blocks()
{
    __shared__ unsigned short list[TILES];
    return list;
}

// Lists the open blocks; gives how many there are. A thread looks at neighbouring ones.
__device__ __forceinline__ int list_open(const unsigned char* states, int batch, int group, const Params& p)
{
    constexpr int EACH = (TILES + THREADS - 1) / THREADS;
    __shared__ int counts[WARPS];
    int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32, first = int(threadIdx.x) * EACH;
    int state[EACH], before = 0, all = 0;
    #pragma unroll
    for (int index = 0; index < EACH; ++index) {
        state[index] = state_of<TILES>(first + index, states, batch, group, p);
    }
    #pragma unroll
    for (int index = 0; index < EACH; ++index) {
        uint open = __ballot_sync(0xffffffffu, state[index] != 0);
        before += __popc(open & ((1u << lane) - 1));
        all += __popc(open);
    }
    if (lane == 0) {
        counts[warp] = all;
    }
    __syncthreads();
    int total = 0;
    #pragma unroll
    for (int other = 0; other < WARPS; ++other) {
        before += other < warp ? counts[other] : 0;
        total += counts[other];
    }
    #pragma unroll
    for (int index = 0; index < EACH; ++index) {
        if (state[index]) {
            open_blocks()[before++] = (unsigned short)((first + index) * 2 + (state[index] == 2));
        }
    }
    __syncthreads();
    return total;
}

// A block's share of the pieces of what is open: its warps take them in turns. As few clusters work as have enough to do.
struct Share {
    int clusters, split, splits, count, warp;

    __device__ __forceinline__ explicit Share(int open)
    {
        int pieces = open * TILE_PIECES;
        clusters = pieces <= ALONE ? 1 : min(CLUSTERS, (pieces + ENOUGH - 1) / ENOUGH);
        split = int(blockIdx.x);
        splits = clusters * CLUSTER;
        count = max(0, (pieces - split + splits - 1) / splits);
        warp = int(threadIdx.x) / 32;
    }
    __device__ __forceinline__ bool is_nobodys() const { return split >= splits; }
    __device__ __forceinline__ bool is_first() const { return split == 0; }
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

// Puts together what the warps of all blocks have left, and stores it.
__device__ __forceinline__ void finish_shares(
    Parts& parts, unsigned char* ring, const Share& share, int batch, int group, SINK_PARAMETER float* partial, OUT_T* out,
    EPILOGUE_PARAMETERS const Params& p)
{
    int rank = int(blockIdx.x) % CLUSTER;
    __syncthreads();
    wait_for_cluster();
    hand_over(parts, ring, rank, share.busy_warps());
    arrive_at_cluster();
    wait_for_cluster();
    finish_slice(parts, rank, share.clusters, batch, group, SINK_ARGUMENT partial, out, EPILOGUE_ARGUMENTS p);
}

#if FRESH
// Where in memory the new keys and values of a head of keys go; negative where there is no such place.
__device__ __forceinline__ void find_places(
    int (&key_places)[FRESH], int (&value_places)[FRESH], int batch, int head, OPERAND_PARAMETERS const Params& p)
{
    #pragma unroll
    for (int row = 0; row < FRESH; ++row) {
        key_places[row] = key_place(batch, head, row, 0, OPERAND_ARGUMENTS p);
        value_places[row] = value_place(batch, head, row, 0, OPERAND_ARGUMENTS p);
    }
}

// Records indices that are none, where nobody waits for it.
__device__ __forceinline__ void report_places(int batch, int head, OPERAND_PARAMETERS const Params& p)
{
    for (int row = 0; row < FRESH; ++row) {
        report_key_place(batch, head, row, 0, OPERAND_ARGUMENTS p);
        report_value_place(batch, head, row, 0, OPERAND_ARGUMENTS p);
    }
}
#endif
