// Pairs of 8-bit floats in the place of a 16-bit number, as code_pairs.cuh has pairs of integers: tensor cores multiply
// them from compute capability 8.9 on, and from 7.5 on as float16.

// Two 8-bit floats as two float16, but for a factor of 256: exactly, as these have more bits of both parts.
__device__ __forceinline__ uint as_halves(uint pair)
{
    uint spread = (pair & 0xffu) | (pair & 0xff00u) << 8;
    uint moved = (spread & 0x00800080u) << 8 | (spread & 0x007f007fu) << 7;
    uint scaled = 0;
#if __CUDA_ARCH__ >= 530
    asm("mul.f16x2 %0, %1, %2;" : "=r"(scaled) : "r"(moved), "r"(0x5c005c00u)); // 256, the difference of their biases
#endif
    return scaled;
}

struct float8_pair {
    uint8 first, second;
};

template <>
struct TensorCores<float8_pair> {
    static constexpr bool available = __CUDA_ARCH__ >= 750, counts = false;

    // sum[16 x 8] += a[16 x 32] * b[32 x 8], in the register layout of mma.m16n8k32; without that the first and the
    // other pairs of all registers apart, as float16.
    __device__ static void multiply(float (&sum)[4], const uint (&a)[4], const uint b0, const uint b1)
    {
#if __CUDA_ARCH__ >= 890
        asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
        #pragma unroll
        for (int shift = 0; shift < 32; shift += 16) {
            const uint part[4] = {
                as_halves(a[0] >> shift), as_halves(a[1] >> shift), as_halves(a[2] >> shift), as_halves(a[3] >> shift)};
            TensorCores<half>::multiply(sum, part, as_halves(b0 >> shift), as_halves(b1 >> shift));
        }
#endif
    }
};

__device__ __forceinline__ float float8_number(uint8 code)
{
    half number;
    number.bits = (unsigned short)((code & 0x80) << 8 | (code & 0x7f) << 7);
    return float(number) * 256.0f;
}

template <>
__device__ __forceinline__ void add_product(float& sum, float8_pair left, float8_pair right)
{
    sum += float8_number(left.first) * float8_number(right.first);
    sum += float8_number(left.second) * float8_number(right.second);
}
