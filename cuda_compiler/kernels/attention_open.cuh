// How blocks of threads begin, which blocks of positions are open, and how the parts of a result are put together.
constexpr int TILE_PIECES = BLOCK / PIECE;

// What a block of threads does before it looks at the mask; whether the next grid may begin then. Where it is EARLY, it
// waits for the grid ahead only when it needs what that computes.
__device__ __forceinline__ void begin_block(tile_t* queries, Parts& parts, bool hurries)
{
    if (hurries) {
        hurry_next_grid();
    }
    expect_parts(parts);
    if (CLUSTER > 1) {
        announce_to_cluster();
    }
    if (!EARLY) {
        wait_for_previous_grid();
    }
    clear_queries(queries);
}

// Waits for the cluster to begin, behind the first copies: others of it may write here from then on, and end.
__device__ __forceinline__ void meet_cluster()
{
    if (CLUSTER > 1) {
        wait_for_cluster();
    }
}

// The blocks of positions that are open, each times two, plus one where the mask changes nothing.
__device__ __forceinline__ unsigned short* open_blocks()
{
    __shared__ unsigned short list[TILES];
    return list;
}

// How many pieces at the end of the last open block the mask closes for all rows; set where any block is open.
__device__ __forceinline__ int& last_closed()
{
    __shared__ int pieces;
    return pieces;
}

// What `list_open` looks up of each block of positions beside its state, and keeps of the open ones: here nothing.
struct Nothing {
    __device__ __forceinline__ int find(int tile) const { return 0; }
    __device__ __forceinline__ void keep(int place, int found) const {}
};

// Lists the open blocks and returns how many there are. Each thread looks at neighbouring blocks.
template <typename Beside = Nothing>
__device__ __forceinline__ int list_open(
    const unsigned char* states, int batch, int group, const Params& p, const Beside& beside = Beside())
{
    constexpr int EACH = (TILES + THREADS - 1) / THREADS;
    __shared__ int counts[WARPS];
    int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32, first = int(threadIdx.x) * EACH;
    int state[EACH], known[EACH], before = 0, all = 0;
    #pragma unroll
    for (int index = 0; index < EACH; ++index) {
        state[index] = state_of<TILES>(first + index, states, batch, group, p);
        known[index] = beside.find(min(first + index, TILES - 1));
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
            open_blocks()[before] = (unsigned short)((first + index) * 2 + (state[index] == 2));
            beside.keep(before, known[index]);
            if (++before == total) {
                last_closed() = state[index] >> 2;
            }
        }
    }
    __syncthreads();
    return total;
}

// Puts together what the warps of all blocks have left, and stores it.
template <typename Share>
__device__ __forceinline__ void finish_shares(
    Parts& parts, unsigned char* ring, const Share& share, int batch, int group, SINK_PARAMETER float* partial,
    OUT_T* out, EPILOGUE_PARAMETERS const Params& p)
{
    constexpr int FEW = WARPS < 2 ? WARPS : 2; // so many parts take a fourth of the instructions
    int rank = int(blockIdx.x) % CLUSTER, busy = share.busy_warps();
    __syncthreads();
    if (busy <= FEW) {
        hand_over<FEW>(parts, ring, rank, busy);
    } else {
        hand_over<WARPS>(parts, ring, rank, busy);
    }
#if CLUSTER > 1
    wait_for_phase(shared_address(&parts.arrived), 0);
#else
    __syncthreads();
#endif
    finish_slice(parts, rank, share.clusters, batch, group, SINK_ARGUMENT partial, out, EPILOGUE_ARGUMENTS p);
}
