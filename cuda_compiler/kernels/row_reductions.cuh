// Reductions among the ROW_THREADS neighbouring threads that share a row: part of a block of several rows if they are a
// warp, else all of a block.
#define NPU_ROW_REDUCTION(kind)                                                                                        \
    template <typename T>                                                                                              \
    __device__ __forceinline__ T row_##kind(T part)                                                                    \
    {                                                                                                                  \
        constexpr int WARPS = ROW_THREADS / 32;                                                                        \
        T total = warp_##kind<32>(part);                                                                               \
        if (WARPS > 1) {                                                                                               \
            __shared__ T parts[WARPS];                                                                                 \
            __syncthreads();                                                                                           \
            if (threadIdx.x % 32 == 0) {                                                                               \
                parts[threadIdx.x / 32] = total;                                                                       \
            }                                                                                                          \
            __syncthreads();                                                                                           \
            total = parts[0];                                                                                          \
            for (int other = 1; other < WARPS; ++other) {                                                              \
                total = combine_##kind(total, parts[other]);                                                           \
            }                                                                                                          \
        }                                                                                                              \
        return total;                                                                                                  \
    }
NPU_ROW_REDUCTION(sum)
NPU_ROW_REDUCTION(max)
NPU_ROW_REDUCTION(min)
