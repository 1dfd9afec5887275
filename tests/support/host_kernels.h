// What kernels of CUDA expect of their language, for a processor: every thread of a cluster is a fiber, and what threads of a
// warp do together happens when all of them have come to it.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ucontext.h>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __shared__ static
#define __forceinline__ inline
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)
#define __CUDA_ARCH__ 900

struct float2 { float x, y; };
struct uint2 { unsigned x, y; };
struct float4 { float x, y, z, w; };
struct uint4 { unsigned x, y, z, w; };
static float2 make_float2(float x, float y) { return {x, y}; }
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
template <typename To, typename From>
static To bits_as(From from)
{
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}
static float __uint_as_float(unsigned bits) { return bits_as<float>(bits); }
static unsigned __float_as_uint(float value) { return bits_as<unsigned>(value); }
static float __int_as_float(int bits) { return bits_as<float>(bits); }
static int __float_as_int(float value) { return bits_as<int>(value); }
static float rsqrt(float value) { return 1.0f / sqrtf(value); }
static void __threadfence() {}
static void __threadfence_system() {}
template <typename T> static T atomicCAS(T* place, T expected, T value)
{
    T found = *place;
    *place = found == expected ? value : found;
    return found;
}
static unsigned atomicInc(unsigned* counter, unsigned most) { return *counter >= most ? (*counter = 0, most) : (*counter)++; }
static size_t __cvta_generic_to_shared(const void*) { abort(); }
template <typename T> static T min(T a, T b) { return a < b ? a : b; }
template <typename T> static T max(T a, T b) { return a > b ? a : b; }
static unsigned __byte_perm(unsigned a, unsigned b, unsigned select)
{
    unsigned long long both = (unsigned long long)b << 32 | a;
    unsigned result = 0;
    for (int byte = 0; byte < 4; ++byte) {
        result |= unsigned(both >> (select >> byte * 4 & 7) * 8 & 255) << byte * 8;
    }
    return result;
}

struct Dim { int x, y, z; };
struct Barrier { int arrived = 0, passed = 0; };
struct Block {
    std::vector<unsigned char> shared;
    Barrier all;
    int votes = 0;
};
struct Warp {
    Barrier all;
    unsigned word[32][6];
};
struct Fiber {
    ucontext_t context;
    std::vector<char> stack;
    Dim thread, block;
    Block* own;
    Warp* warp;
    bool finished = false;
    int cluster_turns = 0;
};
static Fiber* current;
static ucontext_t scheduler;
static Dim grid_size;
static std::vector<Block*> cluster_blocks;
static Barrier cluster_barrier;
static int cluster_threads, block_threads;
#define threadIdx (current->thread)
#define blockIdx (current->block)
#define gridDim grid_size

static void yield() { swapcontext(&current->context, &scheduler); }
static void meet(Barrier& barrier, int count)
{
    int turn = barrier.passed;
    if (++barrier.arrived == count) {
        barrier.arrived = 0;
        ++barrier.passed;
    }
    while (barrier.passed == turn) {
        yield();
    }
}
static void __syncthreads() { meet(current->own->all, block_threads); }
static int voted(int vote, bool of_all)
{
    int& votes = current->own->votes;
    __syncthreads();
    votes = 0;
    __syncthreads();
    votes += vote != 0;
    __syncthreads();
    return of_all ? votes == block_threads : votes != 0;
}
static int __syncthreads_and(int vote) { return voted(vote, true); }
static int __syncthreads_or(int vote) { return voted(vote, false); }
static void __syncwarp() { meet(current->warp->all, 32); }
template <typename T>
static T __shfl_sync(unsigned, T value, int source, int = 32)
{
    static_assert(sizeof(T) == 4, "words");
    current->warp->word[current->thread.x % 32][0] = bits_as<unsigned>(value);
    __syncwarp();
    T result = bits_as<T>(current->warp->word[source][0]);
    __syncwarp();
    return result;
}
template <typename T>
static T __shfl_xor_sync(unsigned mask, T value, int distance, int = 32)
{
    return __shfl_sync(mask, value, current->thread.x % 32 ^ distance);
}

static unsigned __ballot_sync(unsigned mask, int value)
{
    unsigned result = 0;
    for (int lane = 0; lane < 32; ++lane) {
        result |= unsigned(__shfl_sync(mask, int(value != 0), lane)) << lane;
    }
    return result;
}
static int __popc(unsigned bits) { return __builtin_popcount(bits); }
static int atomicAdd(int* sum, int value) { return (*sum += value) - value; }
template <typename T> static T __ldcg(const T* source) { return *source; }
template <typename T> static void __stcg(T* target, T value) { *target = value; }
// movmatrix: a lane has two neighbours of a row of eight, then of a column.
static unsigned host_transposed(unsigned pair)
{
    unsigned result = 0;
    int lane = current->thread.x % 32;
    for (int half = 0; half < 2; ++half) {
        int row = lane % 4 * 2 + half, column = lane / 4;
        for (int turn = 0; turn < 32; ++turn) {
            unsigned found = __shfl_sync(0xffffffffu, pair, turn);
            result |= turn == row * 4 + column / 2 ? (found >> column % 2 * 16 & 0xffff) << half * 16 : 0;
        }
    }
    return result;
}

// 16-bit numbers, to nearest, ties to even.
static float host_float(unsigned short bits)
{
    unsigned sign = bits >> 15, exponent = bits >> 10 & 31, mantissa = bits & 1023;
    float size = exponent == 31 ? (mantissa ? NAN : INFINITY)
                 : exponent     ? ldexpf(1024 + mantissa, int(exponent) - 25)
                                : ldexpf(mantissa, -24);
    return sign ? -size : size;
}
static unsigned short host_half(float value)
{
    _Float16 rounded = _Float16(value);
    return bits_as<unsigned short>(rounded);
}
static unsigned short host_bfloat(float value)
{
    unsigned word = bits_as<unsigned>(value);
    return value != value ? 0x7fff : (word + 0x7fff + (word >> 16 & 1)) >> 16;
}
// The nearest 8-bit float of four bits of exponent, ties to even; what is too large becomes the largest.
static int host_float8_e4m3(float number)
{
    int sign = std::signbit(number) ? 0x80 : 0, exponent;
    float size = fabsf(number);
    if (size != size) {
        return 0x7f;
    }
    frexpf(size, &exponent);
    float step = ldexpf(1.0f, (exponent < -5 ? -5 : exponent) - 4);
    float rounded = fminf(rintf(size / step) * step, 448.0f);
    if (rounded < ldexpf(1.0f, -6)) {
        return sign | int(rounded * 512);
    }
    frexpf(rounded, &exponent);
    return sign | (exponent + 6) << 3 | (int(ldexpf(rounded, 4 - exponent)) & 7);
}
static float number_of_bits(unsigned short bits, bool is_half) { return is_half ? host_float(bits) : __uint_as_float(unsigned(bits) << 16); }
static unsigned pairwise(unsigned a, unsigned b, unsigned c, bool is_half) // a * b + c
{
    unsigned result = 0;
    for (int shift = 0; shift < 32; shift += 16) {
        double exact = double(number_of_bits(a >> shift, is_half)) * number_of_bits(b >> shift, is_half) + number_of_bits(c >> shift, is_half);
        result |= unsigned(is_half ? host_half(float(exact)) : host_bfloat(float(exact))) << shift;
    }
    return result;
}

// mma.m16n8k16: rows and columns of the operands' registers as the PTX manual has them.
static void host_multiply(float (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, bool is_half)
{
    int lane = current->thread.x % 32;
    unsigned(&mine)[6] = current->warp->word[lane];
    for (int index = 0; index < 4; ++index) {
        mine[index] = a[index];
    }
    mine[4] = b0;
    mine[5] = b1;
    __syncwarp();
    for (int index = 0; index < 4; ++index) {
        int row = lane / 4 + index / 2 * 8, column = lane % 4 * 2 + index % 2;
        float total = sum[index];
        for (int k = 0; k < 16; ++k) {
            int register_a = (row >= 8) + 2 * (k >= 8), register_b = 4 + (k >= 8), shift = k % 2 * 16;
            unsigned left = current->warp->word[row % 8 * 4 + k % 8 / 2][register_a] >> shift;
            unsigned right = current->warp->word[column * 4 + k % 8 / 2][register_b] >> shift;
            total += number_of_bits((unsigned short)left, is_half) * number_of_bits((unsigned short)right, is_half);
        }
        sum[index] = total;
    }
    __syncwarp();
}

template <int BYTES>
static void host_load(unsigned* word, const void* source, bool valid)
{
    if (valid) {
        if ((unsigned long long)source % BYTES) {
            fprintf(stderr, "a load of %d bytes at an odd place\n", BYTES);
            abort();
        }
        memcpy(word, source, BYTES);
    }
}
static void store_word_in_cluster(const void* target, int rank, float value)
{
    size_t at = (const unsigned char*)target - current->own->shared.data();
    memcpy(cluster_blocks[rank]->shared.data() + at, &value, 4);
}
static void store_words_in_cluster(const void* target, int rank, float4 value)
{
    const float* word = &value.x;
    for (int index = 0; index < 4; ++index) {
        store_word_in_cluster((const float*)target + index, rank, word[index]);
    }
}
static void arrive_in_cluster()
{
    if (++cluster_barrier.arrived == cluster_threads) {
        cluster_barrier.arrived = 0;
        ++cluster_barrier.passed;
    }
}
