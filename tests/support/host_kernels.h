// What kernels of CUDA expect of their language, for a processor: every thread of a cluster is a fiber, and what threads of a
// warp do together happens when all of them have come to it. Each block of a cluster has a thread of the system, of which one
// works at a time, so that shared memory is that thread's own. What is declared here only is in host_threads.cpp.
#include <cmath>
#include <csetjmp>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <ucontext.h>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __shared__ static thread_local
#define __forceinline__ inline
#define __noinline__
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)
#define __grid_constant__
#define __cluster_dims__(...)
#define __CUDA_ARCH__ 900
#define __builtin_assume(known) (known) ? (void)0 : host_is_not_so(#known)

static void host_is_not_so(const char* known)
{
    fprintf(stderr, "a kernel tells its compiler what does not hold: %s\n", known);
    abort();
}

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
static float __saturatef(float value) { return value > 0 ? value < 1 ? value : 1 : 0; }
static float __fadd_rd(float a, float b)
{
    float sum = a + b;
    return double(sum) > double(a) + double(b) ? nextafterf(sum, -INFINITY) : sum;
}
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
struct PhaseBarrier { int count, waiting, phase; long bytes; }; // arrivals of a phase, and what is still to come of this one
struct Block {
    std::vector<unsigned char> shared;
    Barrier all, named[16];
    int votes = 0;
    std::map<unsigned, PhaseBarrier> phases; // by their shared addresses
    unsigned char* variables; // a place among its shared variables
};
struct Warp {
    std::map<unsigned, Barrier> some; // by the lanes that meet
    unsigned word[32][6];
};
struct Fiber {
    ucontext_t start;
    jmp_buf place; // where it goes on
    bool started = false;
    Dim thread, block;
    Block* own;
    Warp* warp;
    bool finished = false;
    int cluster_turns = 0;
};
extern Fiber* current;
extern Dim grid_size;
extern std::vector<Block*> cluster_blocks;
#define threadIdx (current->thread)
#define blockIdx (current->block)
#define gridDim grid_size

// The dynamic shared memory of a block, from where addresses there count.
static unsigned char* host_shared(Block* block = current->own)
{
    unsigned char* first = block->shared.data();
    return first + (-(size_t)first & 1023);
}
// The address of a place in shared memory, which is the same in all blocks: those of variables count from the middle.
constexpr unsigned VARIABLES = 1u << 31;
static unsigned host_shared_address(const void* pointer)
{
    const Block* own = current->own;
    const unsigned char *place = (const unsigned char*)pointer, *first = own->shared.data();
    bool dynamic = place >= first && place < first + own->shared.size();
    return dynamic ? unsigned(place - host_shared()) : unsigned(VARIABLES + (place - own->variables));
}
// What lies at such an address of a block.
static unsigned char* host_at(unsigned address, Block* block = current->own)
{
    bool dynamic = address < VARIABLES / 2;
    return dynamic ? host_shared(block) + address : block->variables + int(address - VARIABLES);
}

void yield();
void count_in(Barrier& barrier, int count);
void meet(Barrier& barrier, int count);
void __syncthreads();
int voted(int vote, bool of_all);
void __syncwarp(unsigned lanes = ~0u);
static int __syncthreads_and(int vote) { return voted(vote, true); }
static int __syncthreads_or(int vote) { return voted(vote, false); }
template <typename T>
static T __shfl_sync(unsigned lanes, T value, int source, int = 32)
{
    static_assert(sizeof(T) <= sizeof(Warp::word[0]), "few words");
    memcpy(current->warp->word[current->thread.x % 32], &value, sizeof value);
    __syncwarp(lanes);
    memcpy(&value, current->warp->word[source], sizeof value);
    __syncwarp(lanes);
    return value;
}
template <typename T>
static T __shfl_xor_sync(unsigned mask, T value, int distance, int = 32)
{
    return __shfl_sync(mask, value, current->thread.x % 32 ^ distance);
}
template <typename T>
static T __shfl_up_sync(unsigned mask, T value, int distance, int = 32)
{
    int lane = current->thread.x % 32;
    return __shfl_sync(mask, value, lane < distance ? lane : lane - distance);
}

static unsigned __ballot_sync(unsigned mask, int value)
{
    unsigned result = 0;
    for (int lane = 0; lane < 32; ++lane) {
        result |= unsigned(__shfl_sync(mask, int(value != 0), lane)) << lane;
    }
    return result;
}
static int __any_sync(unsigned mask, int value) { return __ballot_sync(mask, value) != 0; }
static int __popc(unsigned bits) { return __builtin_popcount(bits); }
static int __ffs(int bits) { return __builtin_ffs(bits); }
static int __clz(unsigned bits) { return bits ? __builtin_clz(bits) : 32; }
template <typename T> static T atomicAdd(T* sum, T value) { return (*sum += value) - value; }
template <typename T> static T __ldcg(const T* source) { return *source; }
template <typename T> static void __stcg(T* target, T value) { *target = value; }
unsigned host_transposed(unsigned pair);

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

void host_multiply(float (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, bool is_half);
void host_multiply_codes(int (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, const char* left);

static void host_copy_part(void* target, const void* source, int bytes, int whole)
{
    if ((unsigned long long)source % whole || (unsigned long long)target % whole || bytes < 0 || bytes > whole) {
        fprintf(stderr, "a copy of %d bytes at an odd place\n", whole);
        abort();
    }
    memset(target, 0, whole);
    memcpy(target, source, bytes);
}

// An element of an operand of wgmma in shared memory, by its line and its place along k: blocks of 8 by 8, whose distances the
// descriptor holds as the PTX manual has it, or lines whose chunks are permuted by address.
static unsigned short host_from_shared(unsigned long long descriptor, int number, int k)
{
    unsigned first = unsigned(descriptor & 0x3fff) * 16, permuted = unsigned(descriptor >> 62);
    unsigned line = permuted ? 256 >> permuted : 16, chunks = line / 16 - 1;
    unsigned along_k = permuted ? 16 : unsigned(descriptor >> 16 & 0x3fff) * 16, further = unsigned(descriptor >> 32 & 0x3fff) * 16;
    unsigned at = first + k / 8 * along_k + number / 8 * further + number % 8 * line + k % 8 * 2;
    unsigned short element;
    memcpy(&element, host_shared() + (at ^ (at >> 7 & chunks) << 4), 2);
    return element;
}

// One of a second operand whose permuted lines run along its columns, 64 of them; where the next 64 lie the descriptor says.
static unsigned short host_along_columns(unsigned long long descriptor, int column, int k)
{
    unsigned panel = unsigned(descriptor >> 16 & 0x3fff) * 16;
    return host_from_shared(descriptor + column / 64 * (panel >> 4), k, column % 64);
}

// One of the first operand in the registers of each warp, 16 rows a warp.
static unsigned short host_from_registers(const unsigned (&a)[4], int row, int k)
{
    return (unsigned short)(current->warp->word[row % 8 * 4 + k % 8 / 2][row % 16 / 8 + 2 * (k >= 8)] >> k % 2 * 16);
}
static void host_show(const unsigned (&a)[4])
{
    for (int index = 0; index < 4; ++index) {
        current->warp->word[current->thread.x % 32][index] = a[index];
    }
}

// wgmma: a warp has 16 of the 64 rows.
template <int EIGHTS, typename First, typename Second>
static void host_multiply_columns(float (&sum)[EIGHTS][4], First first, Second second, int adds, bool is_half)
{
    int lane = current->thread.x % 32, warp = current->thread.x / 32 % 4;
    __syncwarp();
    for (int block = 0; block < EIGHTS; ++block) {
        for (int index = 0; index < 4; ++index) {
            int row = warp * 16 + lane / 4 + index / 2 * 8, column = block * 8 + lane % 4 * 2 + index % 2;
            float total = adds ? sum[block][index] : 0;
            for (int k = 0; k < 16; ++k) {
                total += number_of_bits(first(row, k), is_half) * number_of_bits(second(column, k), is_half);
            }
            sum[block][index] = total;
        }
    }
    __syncwarp();
}
template <int EIGHTS>
static void host_wgmma(
    float (&sum)[EIGHTS][4], const unsigned (&a)[4], unsigned long long b, int adds, bool is_half, bool along_columns = false)
{
    host_show(a);
    auto second = along_columns ? host_along_columns : host_from_shared;
    auto held = [&](int column, int k) { return second(b, column, k); };
    host_multiply_columns(sum, [&](int row, int k) { return host_from_registers(a, row, k); }, held, adds, is_half);
}
template <int EIGHTS>
static void host_wgmma(float (&sum)[EIGHTS][4], unsigned long long a, unsigned long long b, int adds, bool is_half)
{
    auto second = [&](int column, int k) { return host_from_shared(b, column, k); };
    host_multiply_columns(sum, [&](int row, int k) { return host_from_shared(a, row, k); }, second, adds, is_half);
}

void host_load_matrices(unsigned (&matrix)[4], unsigned row);
void host_store_matrices(unsigned address, const unsigned (&word)[4]);

// The greater of two pairs, of a kind as PTX calls it.
static unsigned host_greater_pair(unsigned a, unsigned b, const char* kind)
{
    unsigned result = 0;
    for (int shift = 0; shift < 32; shift += 16) {
        unsigned short left = a >> shift, right = b >> shift;
        bool is_half = strstr(kind, ".f16x2"), is_signed = strstr(kind, ".s16x2");
        float first = strstr(kind, "NaN") ? number_of_bits(left, is_half) : is_signed ? short(left) : left;
        float second = strstr(kind, "NaN") ? number_of_bits(right, is_half) : is_signed ? short(right) : right;
        result |= unsigned(first > second || first != first ? left : right) << shift;
    }
    return result;
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
template <typename T>
static void host_store_in_cluster(const void* target, int rank, T value)
{
    memcpy(host_at(host_shared_address(target), cluster_blocks[rank]), &value, sizeof value);
}
void arrive_in_cluster();
void wait_in_cluster();

// Barriers that count arrivals and bytes.
void host_make_barrier(unsigned at, int count);
void host_arrive(unsigned at, int bytes);
void host_wait(unsigned at, int parity);
void host_count_bytes(unsigned at, int rank, int bytes); // that have come to a block of the cluster
void host_copy_box(unsigned target, const void* map, unsigned at, const int (&first)[5]);
void host_store_box(unsigned source, const void* map, int first, int line);

void call_kernel(void** bound); // the kernel, with what is bound to it
