// Pairs of codes of a byte in the place of a 16-bit number: they are copied, and lie in registers, in the same way.
// Sums are integers: on tensor cores from compute capability 7.5 on, of left codes of a type by int8.
template <typename Left>
struct PairOfCodes {
    signed char first, second;
};
typedef PairOfCodes<int8> CodePair;
typedef PairOfCodes<uint8> UnsignedPair;

template <typename Left>
struct TensorCores<PairOfCodes<Left>> {
    static constexpr bool available = __CUDA_ARCH__ >= 750, counts = true, is_unsigned = Left(-1) > 0;

    // sum[16 x 8] += a[16 x 32] * b[32 x 8], in the register layout of mma.m16n8k32.
    __device__ static void multiply(float (&sum)[4], const uint (&a)[4], const uint b0, const uint b1)
    {
#if __CUDA_ARCH__ >= 750
        int at[4] = {__float_as_int(sum[0]), __float_as_int(sum[1]), __float_as_int(sum[2]), __float_as_int(sum[3])};
#if __CUDA_ARCH__ >= 800
#define MULTIPLY_CODES(left)                                                                                           \
    asm("mma.sync.aligned.m16n8k32.row.col.s32." left ".s8.s32 "                                                       \
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                                              \
        : "+r"(at[0]), "+r"(at[1]), "+r"(at[2]), "+r"(at[3])                                                           \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
        if constexpr (is_unsigned) {
            MULTIPLY_CODES("u8");
        } else {
            MULTIPLY_CODES("s8");
        }
#undef MULTIPLY_CODES
#else
        multiply_eight(at[0], at[1], a[0], b0);
        multiply_eight(at[0], at[1], a[2], b1);
        multiply_eight(at[2], at[3], a[1], b0);
        multiply_eight(at[2], at[3], a[3], b1);
#endif
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
            sum[i] = __int_as_float(at[i]);
        }
#endif
    }

private:
    // Of eight rows, over 16 of the common dimension.
    __device__ static void multiply_eight(int& first, int& second, uint a, uint b)
    {
#if __CUDA_ARCH__ >= 750
#define MULTIPLY_EIGHT(left)                                                                                           \
    asm("mma.sync.aligned.m8n8k16.row.col.s32." left ".s8.s32 {%0, %1}, {%2}, {%3}, {%0, %1};"                         \
        : "+r"(first), "+r"(second)                                                                                    \
        : "r"(a), "r"(b))
        if constexpr (is_unsigned) {
            MULTIPLY_EIGHT("u8");
        } else {
            MULTIPLY_EIGHT("s8");
        }
#undef MULTIPLY_EIGHT
#endif
    }
};

template <typename Left>
__device__ __forceinline__ void add_product(float& sum, PairOfCodes<Left> left, PairOfCodes<Left> right)
{
    int added = int(Left(left.first)) * right.first + int(Left(left.second)) * right.second;
    sum = __int_as_float(__float_as_int(sum) + added);
}
