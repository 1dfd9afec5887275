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
            __syncthreads();                                                                                           \
            for (int u = 0; u < SIZE; ++u) {                                                                           \
                part[u] = parts[0][u][lane];                                                                           \
                for (int other = 1; other < SLICES; ++other) {                                                         \
                    part[u] = combine_##kind(part[u], parts[other][u][lane]);                                          \
                }                                                                                                      \
            }                                                                                                          \
        }                                                                                                              \
    }
NPU_COLUMN_REDUCTION(sum)
NPU_COLUMN_REDUCTION(max)
NPU_COLUMN_REDUCTION(min)
