// Operands of a byte along the common dimension, seen as pairs: tiles of 16-bit elements have half as many of them, and lie,
// are copied and loaded just as those. Integers add up as integers, whose bits a sum has. From compute capability 7.5 on.

// Two 8-bit floats as two float16, but for a factor of 256: exactly, as these have more bits of both parts.
__device__ __forceinline__ uint as_halves(uint pair)
{
    uint spread = (pair & 0xffu) | (pair & 0xff00u) << 8, moved = (spread & 0x00800080u) << 8 | (spread & 0x007f007fu) << 7;
    uint scaled = 0;
#if __CUDA_ARCH__ >= 530
    asm("mul.f16x2 %0, %1, %2;" : "=r"(scaled) : "r"(moved), "r"(0x5c005c00u)); // 256, the difference of their biases
#endif
    return scaled;
}

// As numbers, to kernels for GPUs without tensor cores, they are nothing.
struct float8_pair {
    uint8 at[2];
    __device__ operator float() const { return 0.0f; }
};
struct int8_pair {
    int8 at[2];
    __device__ operator float() const { return 0.0f; }
};

template <>
struct TensorCores<float8_pair> {
    static constexpr bool available = true;

    // sum[16 x 8] += a[16 x 32] * b[32 x 8], in the register layout of mma.m16n8k32; without that the first and the other
    // pairs of all registers apart, as float16.
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

template <>
struct TensorCores<int8_pair> {
    static constexpr bool available = true;

    __device__ static void multiply(float (&sum)[4], const uint (&a)[4], const uint b0, const uint b1)
    {
        int total[4] = {__float_as_int(sum[0]), __float_as_int(sum[1]), __float_as_int(sum[2]), __float_as_int(sum[3])};
#if __CUDA_ARCH__ >= 800
        asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+r"(total[0]), "+r"(total[1]), "+r"(total[2]), "+r"(total[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#elif __CUDA_ARCH__ >= 750
        multiply_eight(total[0], total[1], a[0], b0);
        multiply_eight(total[0], total[1], a[2], b1);
        multiply_eight(total[2], total[3], a[1], b0);
        multiply_eight(total[2], total[3], a[3], b1);
#endif
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
            sum[i] = __int_as_float(total[i]);
        }
    }

private:
    // Of eight rows, over 16 of the common dimension.
    __device__ static void multiply_eight(int& first, int& second, uint a, uint b)
    {
#if __CUDA_ARCH__ >= 750
        asm("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0, %1}, {%2}, {%3}, {%0, %1};"
            : "+r"(first), "+r"(second)
            : "r"(a), "r"(b));
#endif
    }
};
