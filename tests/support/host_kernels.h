// What kernels of CUDA expect of their language, for a processor: every thread of a cluster is a fiber, and what threads of a
// warp do together happens when all of them have come to it.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <ucontext.h>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __shared__ static
#define __forceinline__ inline
#define __align__(n) alignas(n)
#define __launch_bounds__(...)
#define __grid_constant__
#define __CUDA_ARCH__ 900

struct float2 { float x, y; };
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
static unsigned atomicInc(unsigned* counter, unsigned most) { return *counter >= most ? (*counter = 0, most) : (*counter)++; }
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
struct PhaseBarrier { int count, waiting, phase; long bytes; }; // arrivals of a phase, and what is still to come of this one
struct Block {
    std::vector<unsigned char> shared;
    Barrier all;
    std::map<unsigned, PhaseBarrier> phases; // by their shared addresses
    std::map<int, Barrier> named;

    unsigned char* aligned() { return shared.data() + (-(size_t)shared.data() & 1023); }
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
static size_t __cvta_generic_to_shared(const void* at) { return (const unsigned char*)at - current->own->aligned(); }
static void __syncthreads() { meet(current->own->all, block_threads); }
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
    size_t at = __cvta_generic_to_shared(target);
    memcpy(cluster_blocks[rank]->aligned() + at, &value, 4);
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

// Barriers that count arrivals and bytes.
static void end_phase(PhaseBarrier& barrier)
{
    if (barrier.waiting == 0 && barrier.bytes == 0) {
        barrier.waiting = barrier.count;
        ++barrier.phase;
    }
}
static void host_arrive(unsigned at, int bytes)
{
    PhaseBarrier& barrier = current->own->phases.at(at);
    --barrier.waiting;
    barrier.bytes += bytes;
    end_phase(barrier);
}

// What the copy engine is told of a tensor here: elements of 16 bits, lines of a box permuted by exclusive or.
struct HostMap {
    const unsigned char* address;
    long sizes[2], stride;
    int box[2];
};
static void host_copy_lines(unsigned target, const void* map, unsigned at, int k, int line)
{
    const HostMap& tensor = *(const HostMap*)map;
    int width = tensor.box[0] * 2;
    for (int row = 0; row < tensor.box[1]; ++row) {
        for (int column = 0; column < tensor.box[0]; ++column) {
            unsigned short element = 0;
            if (line + row < tensor.sizes[1] && k + column < tensor.sizes[0]) {
                memcpy(&element, tensor.address + (line + row) * tensor.stride + (k + column) * 2, 2);
            }
            unsigned place = target + row * width + column * 2;
            memcpy(current->own->aligned() + (place ^ (place >> 7) % (width / 16) * 16), &element, 2);
        }
    }
    PhaseBarrier& barrier = current->own->phases.at(at);
    barrier.bytes -= tensor.box[1] * width;
    end_phase(barrier);
}

// wgmma.m64nNk16 of a first operand in registers: a warp's rows are those of an mma.m16n8k16, lines of the second one have
// 128 bytes.
template <int BLOCKS>
static void host_multiply_64(float (&sum)[BLOCKS][4], const unsigned (&a)[4], unsigned long long b, int adds, bool is_half)
{
    int lane = current->thread.x % 32;
    for (int block = 0; block < BLOCKS; ++block) {
        unsigned pair[2];
        for (int part = 0; part < 2; ++part) {
            unsigned place = unsigned(b & 0x3fff) * 16 + (block * 8 + lane / 4) * 128 + part * 16 + lane % 4 * 4;
            memcpy(&pair[part], current->own->aligned() + (place ^ (place >> 7) % 8 * 16), 4);
        }
        for (int index = 0; index < (adds ? 0 : 4); ++index) {
            sum[block][index] = 0.0f;
        }
        host_multiply(sum[block], a, pair[0], pair[1], is_half);
    }
}
