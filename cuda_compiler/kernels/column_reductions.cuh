// Reductions among the SLICES threads of a block that share a pack of rows; each ends up with all results.
#define NPU_COLUMN_REDUCTION(kind)                                                                                     \
    template <typename T, int SIZE>                                                                                    \
    __device__ __forceinline__ void columns_##kind(T (&part)[SIZE])                                                    \
    {                                                                                                                  \
        if (SLICES > 1) {                                                                                              \
            __shared__ T parts[SLICES][SIZE][LANES];                                                                   \
            int lane = int(threadIdx.x) % LANES, slice = int(threadIdx.x) / LANES;                                     \
            __syncthreads();                                                                                           \
            for (int u = 0; u < SIZE; ++u) {                                                                           \
                parts[slice][u][lane] = part[u];                                                                       \
            }                                                                                                          \
            for (int half = SLICES / 2; half > 0; half /= 2) {                                                         \
                __syncthreads();                                                                                       \
                for (int u = 0; slice < half && u < SIZE; ++u) {                                                       \
                    T& own = parts[slice][u][lane];                                                                    \
                    own = combine_##kind(own, parts[slice + half][u][lane]);                                           \
                }                                                                                                      \
            }                                                                                                          \
            __syncthreads();                                                                                           \
            for (int u = 0; u < SIZE; ++u) {                                                                           \
                part[u] = parts[0][u][lane];                                                                           \
            }                                                                                                          \
        }                                                                                                              \
    }
NPU_COLUMN_REDUCTION(sum)
NPU_COLUMN_REDUCTION(max)
NPU_COLUMN_REDUCTION(min)
