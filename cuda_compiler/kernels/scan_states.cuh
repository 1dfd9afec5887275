// States of a scan among threads. LANES neighbouring threads have neighbouring columns, and SLICES threads share each
// column; where LANES is 1, a warp of them does so by shuffles. What a state is, is generated: `State`, `combine`.

// The state that another lane of the warp has.
__device__ __forceinline__ State state_of(State state, int lane)
{
    State result;
    #pragma unroll
    for (int word = 0; word < int(sizeof(State) / 4); ++word) {
        reinterpret_cast<int*>(&result)[word] =
            __shfl_sync(0xffffffffu, reinterpret_cast<const int*>(&state)[word], lane);
    }
    return result;
}

// The states of the slices ahead of this thread's, combined; `all` becomes that of all slices.
__device__ __forceinline__ State ahead_of(State own, State& all)
{
    State ahead = nothing();
    all = nothing();
#if LANES == 1
    constexpr int WARPS = SLICES / 32;
    int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
    #pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        State below = state_of(own, max(lane - distance, 0));
        if (lane >= distance) {
            own = combine(below, own);
        }
    }
    State before = state_of(own, max(lane - 1, 0));
    if (WARPS == 1) {
        all = state_of(own, 31);
    } else {
        __shared__ State warps[ROWS * WARPS];
        __syncthreads();
        if (lane == 31) {
            warps[warp] = own;
        }
        __syncthreads();
        for (int other = 0; other < WARPS; ++other) {
            if (other == warp % WARPS) {
                ahead = all;
            }
            all = combine(all, warps[warp / WARPS * WARPS + other]);
        }
    }
    if (lane > 0) {
        ahead = combine(ahead, before);
    }
#else
    __shared__ State slices[SLICES][LANES];
    int lane = int(threadIdx.x) % LANES, slice = int(threadIdx.x) / LANES;
    __syncthreads();
    slices[slice][lane] = own;
    __syncthreads();
    for (int other = 0; other < SLICES; ++other) {
        if (other == slice) {
            ahead = all;
        }
        all = combine(all, slices[other][lane]);
    }
#endif
    return ahead;
}
