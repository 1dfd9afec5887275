// How the positions of a head of keys are shared out among the blocks of threads of one cluster or several.

// A block's share of the pieces of what is open: its warps take them in turns. As few clusters work as have enough to
// do.
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
// Where in memory the new keys and values of a head of keys go; negative where there is no such place. A thread finds
// one, and all may read them behind a barrier.
__device__ __forceinline__ void find_places(
    int (&key_places)[FRESH], int (&value_places)[FRESH], int batch, int head, OPERAND_PARAMETERS const Params& p)
{
    static_assert(2 * FRESH <= THREADS, "a thread for each place");
    int row = int(threadIdx.x) % FRESH;
    if (threadIdx.x < FRESH) {
        key_places[row] = key_place(batch, head, row, 0, OPERAND_ARGUMENTS p);
    } else if (threadIdx.x < 2 * FRESH) {
        value_places[row] = value_place(batch, head, row, 0, OPERAND_ARGUMENTS p);
    }
}

// Records indices beyond their tensors, at the end, where nothing waits for it.
__device__ __forceinline__ void report_places(int batch, int head, OPERAND_PARAMETERS const Params& p)
{
    for (int row = 0; row < FRESH; ++row) {
        report_key_place(batch, head, row, 0, OPERAND_ARGUMENTS p);
        report_value_place(batch, head, row, 0, OPERAND_ARGUMENTS p);
    }
}
#endif
