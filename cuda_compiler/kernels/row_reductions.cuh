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

// The greater of the numbers without their signs, two and two side by side, that were found so far and that a pack of
// 16-bit numbers has: without a sign their bits are in the order of the numbers.
template <typename T, int COUNT>
__device__ __forceinline__ uint greater_sizes(uint sizes, const Pack<T, COUNT>& pack)
{
    #pragma unroll
    for (int u = 0; u < COUNT; u += 2) {
        uint pair = as_pair(pack[u], pack[u + 1]) & 0x7fff7fffu;
#if __CUDA_ARCH__ >= 900
        asm("max.u16x2 %0, %1, %2;" : "=r"(sizes) : "r"(sizes), "r"(pair));
#else
        sizes = max(sizes & 0xffffu, pair & 0xffffu) | max(sizes & 0xffff0000u, pair & 0xffff0000u);
#endif
    }
    return sizes;
}

// The bits, as a float32, of the greater of two such numbers.
template <typename T>
__device__ __forceinline__ int size_of_pair(uint sizes)
{
    T number;
    number.bits = (unsigned short)max(sizes & 0xffffu, sizes >> 16);
    return __float_as_int(float(number));
}
