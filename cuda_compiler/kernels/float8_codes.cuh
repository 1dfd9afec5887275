// The code of the 8-bit float of four bits of exponent and three of mantissa that is nearest to a number, ties to even;
// what is too large becomes the largest. From compute capability 8.9 on that is an instruction. NaN has no sign.
__device__ __forceinline__ int float8_e4m3_code(float number)
{
#if __CUDA_ARCH__ >= 890
    unsigned short codes;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(0.0f), "f"(number));
    return int(codes);
#else
    constexpr int BIAS = 120 << 23, FIRST = 121 << 23, ALIGNED = FIRST + (20 << 23); // as the bits of a float
    int bits = __float_as_int(number), size = bits & 0x7fffffff;
    int subnormal = __float_as_int(__int_as_float(size) + __int_as_float(ALIGNED)) - ALIGNED;
    int normal = (size - BIAS + 0x7ffff + (size >> 20 & 1)) >> 20;
    int code = min(size < FIRST ? subnormal : normal, 0x7e);
    return size > 0x7f800000 ? 0x7f : code | (bits >> 24 & 0x80);
#endif
}

// Two such codes, the first in the lower byte.
__device__ __forceinline__ uint float8_e4m3_pair(float first, float second)
{
#if __CUDA_ARCH__ >= 890
    unsigned short codes;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(second), "f"(first));
    return uint(codes);
#else
    return uint(float8_e4m3_code(first)) | uint(float8_e4m3_code(second)) << 8;
#endif
}

// A pack of such codes.
template <int COUNT>
__device__ __forceinline__ Pack<uint8, COUNT> pack_of_float8_e4m3(const float (&numbers)[COUNT])
{
    Pack<uint8, COUNT> pack;
    #pragma unroll
    for (int u = 0; u < COUNT; u += 4) {
        uint low = float8_e4m3_pair(numbers[u], numbers[u + 1]), high = float8_e4m3_pair(numbers[u + 2], numbers[u + 3]);
        pack.words[u / 4] = low | high << 16;
    }
    return pack;
}
