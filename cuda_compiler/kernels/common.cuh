// What every kernel begins with: storage types, packs of elements, warp reductions, ordering between kernels and
// between blocks. NVRTC compiles it with no header of the toolkit at hand.
typedef signed char int8;
typedef unsigned char uint8;
typedef short int16;
typedef long long int64;
typedef unsigned long long uint64;
typedef unsigned int uint;

// float16 and bfloat16 are storage only: arithmetic happens in float.
struct half {
    unsigned short bits;
    half() = default;
    __device__ explicit half(float value) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value)); }
    __device__ operator float() const
    {
        float value;
        asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
        return value;
    }
};

struct bfloat {
    unsigned short bits;
    bfloat() = default;
    __device__ explicit bfloat(float value)
    {
#if __CUDA_ARCH__ >= 800
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
#else
        uint word = __float_as_uint(value);
        uint rounded = (word + 0x7fffu + ((word >> 16) & 1u)) >> 16; // to nearest, ties to even
        bits = (unsigned short)(value != value ? 0x7fffu : rounded);
#endif
    }
    __device__ operator float() const
    {
        float value;
        asm("mov.b32 %0, {0, %1};" : "=f"(value) : "h"(bits)); // of the upper half of a word too at once
        return value;
    }
};

// Tells the compiler what it does not find by itself: numbers of threads and blocks are not negative as signed ones
// either. Quotients and remainders of these are then shifts and masks alone. Each kernel begins with it, and need not
// say so (skeleton.py). X, Y and Z are the threads of a block.
template <int X, int Y, int Z>
__device__ __forceinline__ void know_places()
{
    __builtin_assume(int(threadIdx.x) >= 0 && int(threadIdx.x) < X);
    __builtin_assume(int(threadIdx.y) >= 0 && int(threadIdx.y) < Y);
    __builtin_assume(int(threadIdx.z) >= 0 && int(threadIdx.z) < Z);
    __builtin_assume(int(blockIdx.x) >= 0 && int(gridDim.x) > 0);
    __builtin_assume(int(blockIdx.y) >= 0 && int(gridDim.y) > 0);
    __builtin_assume(int(blockIdx.z) >= 0 && int(gridDim.z) > 0);
}

// The lower or the upper number of 16 bits in a word.
template <typename T>
__device__ __forceinline__ float number_in_pair(uint pair, int which)
{
    T number;
    number.bits = (unsigned short)(which ? pair >> 16 : pair);
    return float(number);
}

// Two numbers of 16 bits as such a word.
template <typename T>
__device__ __forceinline__ uint as_pair(T lower, T upper) { return uint(lower.bits) | uint(upper.bits) << 16; }

// COUNT neighbouring elements, moved by accesses of up to 16 bytes.
template <typename T, int COUNT>
struct alignas(sizeof(T) * COUNT < 16 ? sizeof(T) * COUNT : 16) Pack {
    T at[COUNT];
    __device__ T& operator[](int index) { return at[index]; }
    __device__ const T& operator[](int index) const { return at[index]; }
};

// Packs of bytes hold words: copied byte by byte, the compiler would take registers apart and put them together again.
template <typename T, int COUNT>
struct alignas(COUNT) ByteWords {
    uint words[COUNT / 4];
    __device__ T& operator[](int index) { return reinterpret_cast<T*>(words)[index]; }
    __device__ const T& operator[](int index) const { return reinterpret_cast<const T*>(words)[index]; }
};
#define NPU_PACKS_OF_BYTES(type)                                                                                       \
    template <>                                                                                                        \
    struct Pack<type, 4> : ByteWords<type, 4> {};                                                                      \
    template <>                                                                                                        \
    struct Pack<type, 8> : ByteWords<type, 8> {};                                                                      \
    template <>                                                                                                        \
    struct Pack<type, 16> : ByteWords<type, 16> {};
NPU_PACKS_OF_BYTES(int8)
NPU_PACKS_OF_BYTES(uint8)

template <int COUNT, typename T>
__device__ __forceinline__ Pack<T, COUNT> load_pack(const T* source)
{
    return *reinterpret_cast<const Pack<T, COUNT>*>(source);
}

template <typename T, int COUNT>
__device__ __forceinline__ void store_pack(T* target, const Pack<T, COUNT>& pack)
{
    *reinterpret_cast<Pack<T, COUNT>*>(target) = pack;
}

// Starts loading a line of memory into the level-2 cache.
__device__ __forceinline__ void ask_for(const void* source) { asm volatile("prefetch.global.L2 [%0];" ::"l"(source)); }

// Kernels may be launched while the grid before them still runs. Each calls this before it touches memory: it returns
// when all earlier grids have finished and their writes can be seen, and lets the next grid be scheduled.
__device__ __forceinline__ void wait_for_previous_grid()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Lets the next grid be scheduled where there is room, before this one has waited. What that grid reads before it waits
// must have been written before the latest grid that did not call this (`Lowering.is_settled`).
__device__ __forceinline__ void hurry_next_grid()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Has the compiler compute a number here and not where it is used, which may be behind a wait.
__device__ __forceinline__ void settle(int& number) { asm volatile("" : "+r"(number)); }
__device__ __forceinline__ void settle(uint& number) { asm volatile("" : "+r"(number)); }
__device__ __forceinline__ void settle(int64& number) { asm volatile("" : "+l"(number)); }

// Adds one to a counter, which begins anew behind `last`, and returns what it was. What has been written before is seen
// by those that count later.
__device__ __forceinline__ uint count_arrival(uint& counter, uint last)
{
    uint before;
    asm volatile("atom.acq_rel.gpu.inc.u32 %0, [%1], %2;" : "=r"(before) : "l"(&counter), "r"(last) : "memory");
    return before;
}

// Whether a block is the last of so many to get here; it then sees what the others have written before. The counter is
// zero before the first, and again after the last.
__device__ __forceinline__ bool is_last_of(int blocks, uint& arrivals)
{
    __shared__ bool is_last;
    __syncthreads();
    if (threadIdx.x == 0) { // for what all threads have written ahead of the barrier, and read behind the next
        is_last = count_arrival(arrivals, blocks - 1) == uint(blocks - 1);
    }
    __syncthreads();
    return is_last;
}

// A quotient by a number of at least one, with an error of at most two units in the last place: an exact one takes a
// dozen instructions and a branch. Beyond 2^126 the reciprocal is zero; NaN stays.
__device__ __forceinline__ float quotient(float dividend, float divisor)
{
    float reciprocal;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(divisor));
    return dividend * reciprocal;
}

// 2 to the power of a number, to about 22 bits.
__device__ __forceinline__ float power_of_two(float exponent)
{
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(exponent));
    return power;
}

// A power of e in two instructions where there are eight, with an error of at most 2^-17 of it: its exponent as one of
// two is rounded. Below 2^-126 it is zero.
__device__ __forceinline__ float short_exp(float exponent) { return power_of_two(exponent * 1.44269504088896341f); }

// The greater and the lesser of two; NaN stays.
template <typename T>
__device__ __forceinline__ T greater(T a, T b) { return a > b || a != a ? a : b; }
template <typename T>
__device__ __forceinline__ T lesser(T a, T b) { return a < b || a != a ? a : b; }
#if __CUDA_ARCH__ >= 800
__device__ __forceinline__ float greater(float a, float b)
{
    float result;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
}
__device__ __forceinline__ float lesser(float a, float b)
{
    float result;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
}
#endif

// Numbers of at most 2^22 are rounded by an addition, since floats from 2^23 on have no fraction: instructions that
// convert or round have an eighth of its throughput. The lower bits of the sum are the integer.
constexpr float WHOLE_FLOATS = 12582912.0f; // 1.5 * 2^23
__device__ __forceinline__ float nearest(float number) { return (number + WHOLE_FLOATS) - WHOLE_FLOATS; }

// The nearest integer, halves to even ones, and a constant; of the result the lower half is right.
__device__ __forceinline__ int rounded_code(float number, int zero)
{
    float sum = zero % 2 == 0 ? number + (WHOLE_FLOATS + float(zero)) : (number + WHOLE_FLOATS) + float(zero);
    return __float_as_int(sum);
}

__device__ __forceinline__ float combine_sum(float a, float b) { return a + b; }
__device__ __forceinline__ int combine_sum(int a, int b) { return a + b; }
__device__ __forceinline__ int64 combine_sum(int64 a, int64 b) { return a + b; }
template <typename T>
__device__ __forceinline__ T combine_max(T a, T b) { return a > b || a != a ? a : b; } // NaN stays
template <typename T>
__device__ __forceinline__ T combine_min(T a, T b) { return a < b || a != a ? a : b; }

// A value of the lane at a distance; a generated state of several numbers has an overload.
template <typename T>
__device__ __forceinline__ T exchange(T value, int distance, int lanes)
{
    return __shfl_xor_sync(0xffffffffu, value, distance, lanes);
}

#define NPU_WARP_REDUCTION(kind)                                                                                       \
    template <int SHARERS, typename T>                                                                                 \
    __device__ __forceinline__ T warp_##kind(T value)                                                                  \
    {                                                                                                                  \
        for (int distance = SHARERS / 2; distance > 0; distance /= 2) {                                                \
            value = combine_##kind(value, exchange(value, distance, SHARERS));                                         \
        }                                                                                                              \
        return value;                                                                                                  \
    }
NPU_WARP_REDUCTION(sum)
NPU_WARP_REDUCTION(max)
NPU_WARP_REDUCTION(min)
