// Codes of a byte by twos, each two in the place of a 16-bit number: what is copied, and which registers of a warp hold what,
// is the same. Sums are integers: on tensor cores from compute capability 7.5 on, of int8 by int8, or where LEFT_UNSIGNED is
// defined of uint8 by int8.
#ifdef LEFT_UNSIGNED
#define LEFT_KIND "u8"
typedef uint8 left_code;
#else
#define LEFT_KIND "s8"
typedef int8 left_code;
#endif

struct CodePair {
    signed char first, second;
};

template <>
struct TensorCores<CodePair> {
    static constexpr bool available = __CUDA_ARCH__ >= 750, counts = true;

    // sum[16 x 8] += a[16 x 32] * b[32 x 8], in the register layout of mma.m16n8k32.
    __device__ static void multiply(float (&sum)[4], const uint (&a)[4], const uint b0, const uint b1)
    {
#if __CUDA_ARCH__ >= 750
        int at[4] = {__float_as_int(sum[0]), __float_as_int(sum[1]), __float_as_int(sum[2]), __float_as_int(sum[3])};
#if __CUDA_ARCH__ >= 800
        asm("mma.sync.aligned.m16n8k32.row.col.s32." LEFT_KIND ".s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+r"(at[0]), "+r"(at[1]), "+r"(at[2]), "+r"(at[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
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
        asm("mma.sync.aligned.m8n8k16.row.col.s32." LEFT_KIND ".s8.s32 {%0, %1}, {%2}, {%3}, {%0, %1};"
            : "+r"(first), "+r"(second)
            : "r"(a), "r"(b));
#endif
    }
};

template <>
__device__ __forceinline__ void add_product(float& sum, CodePair left, CodePair right)
{
    int added = int(left_code(left.first)) * right.first + int(left_code(left.second)) * right.second;
    sum = __int_as_float(__float_as_int(sum) + added);
}
