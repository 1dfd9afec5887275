// Reductions among the threads that share a row: ROW_THREADS neighbours, or with COLUMNS the threads of equal lane, where
// each lane has a row of its own and the warps share its columns.
#define NPU_ROW_REDUCTION(kind)                                                                                        \
    template <typename T>                                                                                              \
    __device__ __forceinline__ T row_##kind(T part)                                                                    \
    {                                                                                                                  \
        constexpr int WARPS = ROW_THREADS / 32, WIDTH = COLUMNS ? 32 : 1;                                              \
        T total = COLUMNS ? part : warp_##kind<32>(part);                                                              \
        if (WARPS > 1) {                                                                                               \
            __shared__ T parts[WARPS * WIDTH];                                                                         \
            int warp = int(threadIdx.x) / 32, lane = COLUMNS ? int(threadIdx.x) % 32 : 0;                              \
            __syncthreads();                                                                                           \
            if (COLUMNS || threadIdx.x % 32 == 0) {                                                                    \
                parts[warp * WIDTH + lane] = total;                                                                    \
            }                                                                                                          \
            __syncthreads();                                                                                           \
            total = parts[lane];                                                                                       \
            for (int other = 1; other < WARPS; ++other) {                                                              \
                total = combine_##kind(total, parts[other * WIDTH + lane]);                                            \
            }                                                                                                          \
        }                                                                                                              \
        return total;                                                                                                  \
    }
NPU_ROW_REDUCTION(sum)
NPU_ROW_REDUCTION(max)
NPU_ROW_REDUCTION(min)
#undef NPU_ROW_REDUCTION
