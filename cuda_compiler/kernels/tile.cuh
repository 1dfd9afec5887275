// A block's tile of a matrix product of 16-bit operands: TILE_M x TILE_N results, TILE_K of the common dimension at a
// time, STAGES of them on their way into shared memory. The kernel that includes this says how a tile is copied.
constexpr int WARPS = WARPS_M * WARPS_N, THREADS = WARPS * 32;
constexpr int WARP_M = TILE_M / WARPS_M, WARP_N = TILE_N / WARPS_N;
constexpr int STEPS_M = WARP_M / 16, STEPS_N = WARP_N / 8;
constexpr int CHUNK = 8; // elements of 16 bytes
constexpr int A_BYTES = TILE_M * TILE_K * 2, B_BYTES = TILE_N * TILE_K * 2, STAGE_BYTES = A_BYTES + B_BYTES;
static_assert(STEPS_N % 2 == 0 && TILE_K % 16 == 0, "a warp multiplies 16 x 16 by 16 x 16");

// Where an element of an operand's tile lies, in bytes: `along` counts its rows or columns, `k` the common dimension. The
// 16-byte chunks of a line are permuted so that eight lines at one column lie in different banks.
template <int EXTENT, bool ALONG_K>
__device__ __forceinline__ uint tile_offset(uint along, uint k)
{
    constexpr uint CHUNKS = (ALONG_K ? TILE_K : EXTENT) / CHUNK, MASK = CHUNKS < 8 ? CHUNKS - 1 : 7;
    uint line = ALONG_K ? along : k, place = ALONG_K ? k : along;
    uint turn = CHUNKS < 8 ? line * CHUNKS / 8 : line;
    return (line * CHUNKS + (place / CHUNK ^ (turn & MASK))) * 16 + place % CHUNK * 2;
}

// Copies tiles of an operand whose chunks are contiguous in memory: every thread has one column of them.
template <int EXTENT, bool ALONG_K>
struct OperandCopier {
    static constexpr int CHUNKS = (ALONG_K ? TILE_K : EXTENT) / CHUNK, LINES = ALONG_K ? EXTENT : TILE_K;
    static constexpr int STEP = THREADS / CHUNKS, ROUNDS = LINES / STEP;
    static_assert(THREADS % CHUNKS == 0 && LINES % STEP == 0 && STEP % 8 == 0, "every thread copies as many chunks");
    const tile_t* source; // of this thread's first chunk in the next tile
    long long round_stride, tile_stride;
    uint target;
    int depth, common;    // position of the first chunk along k, and where k ends
    int inside;           // rounds whose rows exist, or for chunks along the rows whether this one does

    // `base` is the tile's first row, below `limit`; `common` the extent of k.
    __device__ __forceinline__ OperandCopier(
        const tile_t* operand, int base, int limit, int stride_along, int stride_k, int first_tile, int common)
        : common(common)
    {
        int line = int(threadIdx.x / CHUNKS), place = int(threadIdx.x % CHUNKS) * CHUNK;
        int along = base + (ALONG_K ? line : place);
        depth = first_tile * TILE_K + (ALONG_K ? place : line);
        source = operand + (long long)along * stride_along + (long long)depth * stride_k;
        round_stride = (long long)STEP * (ALONG_K ? stride_along : stride_k);
        tile_stride = (long long)TILE_K * stride_k;
        target = ALONG_K ? tile_offset<EXTENT, true>(line, place) : tile_offset<EXTENT, false>(place, line);
        inside = ALONG_K ? (limit - along + STEP - 1) / STEP : int(along < limit);
    }

    __device__ __forceinline__ void copy(unsigned char* tile)
    {
        #pragma unroll
        for (int round = 0; round < ROUNDS; ++round) {
            bool valid = ALONG_K ? round < inside && depth < common : inside && depth + round * STEP < common;
            copy_chunk(tile + target + round * STEP * CHUNKS * 16, source + round * round_stride, valid);
        }
        source += tile_stride;
        depth += TILE_K;
    }
};

struct Accumulator {
    float at[STEPS_M][STEPS_N][4];

    __device__ __forceinline__ void clear()
    {
        #pragma unroll
        for (int m = 0; m < STEPS_M; ++m) {
            #pragma unroll
            for (int n = 0; n < STEPS_N; ++n) {
                at[m][n][0] = at[m][n][1] = at[m][n][2] = at[m][n][3] = 0.0f;
            }
        }
    }
};

// Where a lane's row of the first 16 x 16 block of an operand begins; `base` is the warp's first row or column.
__device__ __forceinline__ uint a_fragment(uint base)
{
    uint lane = threadIdx.x % 32;
    return A_ALONG_K ? tile_offset<TILE_M, true>(base + lane % 16, lane / 16 * 8)
                     : tile_offset<TILE_M, false>(base + lane / 8 % 2 * 8, lane / 16 * 8 + lane % 8);
}

__device__ __forceinline__ uint b_fragment(uint base)
{
    uint lane = threadIdx.x % 32;
    return B_ALONG_K ? tile_offset<TILE_N, true>(base + lane / 16 * 8 + lane % 8, lane / 8 % 2 * 8)
                     : tile_offset<TILE_N, false>(base + lane / 16 * 8, lane / 8 % 2 * 8 + lane % 8);
}

// The block `step` further along and `k` further down; chunks are permuted by exclusive or, so that steps are too.
template <int EXTENT, bool ALONG_K>
__device__ __forceinline__ void load_fragment(uint (&part)[4], uint tile, uint first, int step, int k)
{
    if (ALONG_K) {
        load_matrices(part, tile + (first ^ uint(k * 2)) + step * 16 * TILE_K * 2);
    } else {
        load_matrices_transposed(part, tile + (first ^ uint(step * 32)) + k * EXTENT * 2);
    }
}

__device__ __forceinline__ void multiply_on_tensor_cores(Accumulator& sum, uint tile, uint a_first, uint b_first)
{
    #pragma unroll
    for (int k = 0; k < TILE_K; k += 16) {
        uint a_part[STEPS_M][4], b_part[STEPS_N / 2][4];
        #pragma unroll
        for (int m = 0; m < STEPS_M; ++m) {
            load_fragment<TILE_M, A_ALONG_K>(a_part[m], tile, a_first, m, k);
        }
        #pragma unroll
        for (int n = 0; n < STEPS_N / 2; ++n) {
            load_fragment<TILE_N, B_ALONG_K>(b_part[n], tile + A_BYTES, b_first, n, k);
        }
        #pragma unroll
        for (int m = 0; m < STEPS_M; ++m) {
            #pragma unroll
            for (int n = 0; n < STEPS_N; ++n) {
                TensorCores<tile_t>::multiply(
                    sum.at[m][n], a_part[m], b_part[n / 2][n % 2 * 2], b_part[n / 2][n % 2 * 2 + 1]);
            }
        }
    }
}

// The same without tensor cores, into the same registers.
__device__ __forceinline__ void multiply_plainly(Accumulator& sum, const unsigned char* tile)
{
    uint lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint row = warp / WARPS_N * WARP_M + lane / 4, col = warp % WARPS_N * WARP_N + lane % 4 * 2;
    for (int k = 0; k < TILE_K; ++k) {
        #pragma unroll
        for (int m = 0; m < STEPS_M * 2; ++m) {
            uint a = tile_offset<TILE_M, A_ALONG_K>(row + m * 8, k);
            float left = float(*reinterpret_cast<const tile_t*>(tile + a));
            #pragma unroll
            for (int n = 0; n < STEPS_N * 2; ++n) {
                uint b = A_BYTES + tile_offset<TILE_N, B_ALONG_K>(col + n / 2 * 8 + n % 2, k);
                float right = float(*reinterpret_cast<const tile_t*>(tile + b));
                sum.at[m / 2][n / 2][m % 2 * 2 + n % 2] += left * right;
            }
        }
    }
}

// Multiplies `count` tiles. `copier.copy_a(slot)` and `copier.copy_b(slot)` start copying the next one; with B_CONSTANT
// nothing before this grid writes what the latter read.
template <typename Copier>
__device__ __forceinline__ void multiply_tiles(Accumulator& sum, Copier& copier, int count, unsigned char* shared)
{
    uint warp = threadIdx.x / 32;
    uint a_first = a_fragment(warp / WARPS_N * WARP_M), b_first = b_fragment(warp % WARPS_N * WARP_N);
    sum.clear();
    if (!B_CONSTANT) {
        wait_for_previous_grid();
    }
    #pragma unroll
    for (int stage = 0; stage < STAGES - 1; ++stage) {
        if (stage < count) {
            copier.copy_b(shared + stage * STAGE_BYTES + A_BYTES);
        }
    }
    if (B_CONSTANT) {
        wait_for_previous_grid();
    }
    #pragma unroll
    for (int stage = 0; stage < STAGES - 1; ++stage) {
        if (stage < count) {
            copier.copy_a(shared + stage * STAGE_BYTES);
        }
        commit_copies();
    }
    int reading = 0, writing = (STAGES - 1) * STAGE_BYTES;
    for (int tile = 0; tile < count; ++tile) {
        wait_for_copies<STAGES - 2>();
        __syncthreads();
        if (tile + STAGES - 1 < count) {
            copier.copy_a(shared + writing);
            copier.copy_b(shared + writing + A_BYTES);
        }
        commit_copies();
        if (TensorCores<tile_t>::available) {
            multiply_on_tensor_cores(sum, shared_address(shared) + reading, a_first, b_first);
        } else {
            multiply_plainly(sum, shared + reading);
        }
        reading = reading == (STAGES - 1) * STAGE_BYTES ? 0 : reading + STAGE_BYTES;
        writing = writing == (STAGES - 1) * STAGE_BYTES ? 0 : writing + STAGE_BYTES;
    }
    wait_for_copies<0>();
    __syncthreads();
}
