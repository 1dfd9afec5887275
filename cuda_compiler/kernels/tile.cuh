// A block's tile of a matrix product of 16-bit operands: TILE_M x TILE_N results, TILE_K of the common dimension at a
// time, STAGES of them on their way into shared memory. The kernel that includes this says how a tile is copied.
constexpr int WARPS = WARPS_M * WARPS_N, THREADS = WARPS * 32;
constexpr int WARP_M = TILE_M / WARPS_M, WARP_N = TILE_N / WARPS_N;
constexpr int STEPS_M = WARP_M / 16, STEPS_N = WARP_N / 8;
constexpr int CHUNK = 8; // elements of 16 bytes
constexpr int A_BYTES = TILE_M * TILE_K * 2, B_BYTES = TILE_N * TILE_K * 2, STAGE_BYTES = A_BYTES + B_BYTES;
static_assert(STEPS_N % 2 == 0 && TILE_K % 16 == 0, "a warp multiplies 16 x 16 by 16 x 16");

// Chunks of a row are permuted so that eight rows at one column lie in different banks.
template <int ROW_CHUNKS>
__device__ __forceinline__ int swizzled(int row, int chunk)
{
    constexpr int MASK = ROW_CHUNKS < 8 ? ROW_CHUNKS - 1 : 7;
    int turn = ROW_CHUNKS < 8 ? row * ROW_CHUNKS / 8 : row;
    return row * ROW_CHUNKS + (chunk ^ (turn & MASK));
}

// Where the chunk of an operand's tile lies: `along` counts its rows or columns, `k` the common dimension.
template <int EXTENT, bool ALONG_K>
__device__ __forceinline__ int chunk_index(int along, int k)
{
    return ALONG_K ? swizzled<TILE_K / CHUNK>(along, k / CHUNK) : swizzled<EXTENT / CHUNK>(k, along / CHUNK);
}

template <int EXTENT, bool ALONG_K>
__device__ __forceinline__ float element(const tile_t* tile, int along, int k)
{
    return float(tile[chunk_index<EXTENT, ALONG_K>(along, k) * CHUNK + (ALONG_K ? k % CHUNK : along % CHUNK)]);
}

struct Accumulator {
    float at[STEPS_M][STEPS_N][4];

    __device__ void clear()
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

__device__ __forceinline__ void multiply_on_tensor_cores(Accumulator& sum, const tile_t* a, const tile_t* b)
{
    int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
    int a_base = warp / WARPS_N * WARP_M, b_base = warp % WARPS_N * WARP_N;
    #pragma unroll
    for (int k = 0; k < TILE_K; k += 16) {
        uint a_part[STEPS_M][4], b_part[STEPS_N / 2][4];
        #pragma unroll
        for (int m = 0; m < STEPS_M; ++m) {
            if (A_ALONG_K) {
                int at = chunk_index<TILE_M, true>(a_base + m * 16 + lane % 16, k + lane / 16 * 8);
                load_matrices(a_part[m], a + at * CHUNK);
            } else {
                int at = chunk_index<TILE_M, false>(a_base + m * 16 + lane / 8 % 2 * 8, k + lane / 16 * 8 + lane % 8);
                load_matrices_transposed(a_part[m], a + at * CHUNK);
            }
        }
        #pragma unroll
        for (int n = 0; n < STEPS_N / 2; ++n) {
            if (B_ALONG_K) {
                int at = chunk_index<TILE_N, true>(b_base + n * 16 + lane / 16 * 8 + lane % 8, k + lane / 8 % 2 * 8);
                load_matrices(b_part[n], b + at * CHUNK);
            } else {
                int at = chunk_index<TILE_N, false>(b_base + n * 16 + lane / 16 * 8, k + lane / 8 % 2 * 8 + lane % 8);
                load_matrices_transposed(b_part[n], b + at * CHUNK);
            }
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
__device__ __forceinline__ void multiply_plainly(Accumulator& sum, const tile_t* a, const tile_t* b)
{
    int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
    int row = warp / WARPS_N * WARP_M + lane / 4, col = warp % WARPS_N * WARP_N + lane % 4 * 2;
    for (int k = 0; k < TILE_K; ++k) {
        #pragma unroll
        for (int m = 0; m < STEPS_M * 2; ++m) {
            float left = element<TILE_M, A_ALONG_K>(a, row + m * 8, k);
            #pragma unroll
            for (int n = 0; n < STEPS_N * 2; ++n) {
                float right = element<TILE_N, B_ALONG_K>(b, col + n / 2 * 8 + n % 2, k);
                sum.at[m / 2][n / 2][m % 2 * 2 + n % 2] += left * right;
            }
        }
    }
}

// Multiplies the tiles `first` to `last` of the common dimension. `copier.copy(tile, a, b)` starts copying one; tiles are
// asked for in order.
template <typename Copier>
__device__ __forceinline__ void multiply_tiles(
    Accumulator& sum, Copier& copier, int first, int last, unsigned char* shared)
{
    sum.clear();
    #pragma unroll
    for (int stage = 0; stage < STAGES - 1; ++stage) {
        if (first + stage < last) {
            unsigned char* slot = shared + stage * STAGE_BYTES;
            copier.copy(first + stage, reinterpret_cast<tile_t*>(slot), reinterpret_cast<tile_t*>(slot + A_BYTES));
        }
        commit_copies();
    }
    for (int tile = first; tile < last; ++tile) {
        wait_for_copies<STAGES - 2>();
        __syncthreads();
        int next = tile + STAGES - 1;
        if (next < last) {
            unsigned char* slot = shared + (next - first) % STAGES * STAGE_BYTES;
            copier.copy(next, reinterpret_cast<tile_t*>(slot), reinterpret_cast<tile_t*>(slot + A_BYTES));
        }
        commit_copies();
        unsigned char* slot = shared + (tile - first) % STAGES * STAGE_BYTES;
        const tile_t* a = reinterpret_cast<const tile_t*>(slot);
        const tile_t* b = reinterpret_cast<const tile_t*>(slot + A_BYTES);
        if (TensorCores<tile_t>::available) {
            multiply_on_tensor_cores(sum, a, b);
        } else {
            multiply_plainly(sum, a, b);
        }
    }
    wait_for_copies<0>();
    __syncthreads();
}

#if SPLITS > 1
// Arrivals at each tile of the result; the last one leaves zero behind.
__device__ uint arrivals[RESULT_TILES];

// Adds the parts that SPLITS blocks have of one tile, always in the same order. True in the block that has the sum.
__device__ __forceinline__ bool add_splits(Accumulator& sum, int tile, int split, float* partial)
{
    constexpr int QUADS = STEPS_M * STEPS_N;
    float4* parts = reinterpret_cast<float4*>(partial) + (long long)tile * SPLITS * QUADS * THREADS + threadIdx.x;
    #pragma unroll
    for (int quad = 0; quad < QUADS; ++quad) {
        const float (&own)[4] = sum.at[quad / STEPS_N][quad % STEPS_N];
        __stcg(parts + (split * QUADS + quad) * THREADS, make_float4(own[0], own[1], own[2], own[3]));
    }
    __threadfence();
    __syncthreads();
    __shared__ bool is_last;
    if (threadIdx.x == 0) {
        is_last = atomicInc(&arrivals[tile], SPLITS - 1) == SPLITS - 1;
    }
    __syncthreads();
    if (!is_last) {
        return false;
    }
    __threadfence();
    sum.clear();
    #pragma unroll 1
    for (int other = 0; other < SPLITS; ++other) {
        #pragma unroll
        for (int quad = 0; quad < QUADS; ++quad) {
            float4 part = __ldcg(parts + (other * QUADS + quad) * THREADS);
            float (&own)[4] = sum.at[quad / STEPS_N][quad % STEPS_N];
            own[0] += part.x, own[1] += part.y, own[2] += part.z, own[3] += part.w;
        }
    }
    return true;
}
#endif

// Brings results into rows, so that each thread stores neighbours: STORE_SIZE at a time. The tile begins at `row` and
// `col` of a matrix of `rows` by `columns`, whose own first column counts as `base` for the epilogue.
__device__ __forceinline__ void store_tile(
    const Accumulator& sum, unsigned char* shared, int batch, int row, int col, int rows, int columns, int base,
    OUT_T* out, EPILOGUE_PARAMETERS const Params& p)
{
    constexpr int STRIDE = WARP_N + 4; // floats; keeps the quads of a fragment in different banks
    int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
    float* staged = reinterpret_cast<float*>(shared) + warp * 16 * STRIDE;
    row += warp / WARPS_N * WARP_M;
    col += warp % WARPS_N * WARP_N;
    #pragma unroll
    for (int m = 0; m < STEPS_M; ++m) {
        __syncwarp();
        #pragma unroll
        for (int n = 0; n < STEPS_N; ++n) {
            float* at = staged + lane / 4 * STRIDE + n * 8 + lane % 4 * 2;
            *reinterpret_cast<float2*>(at) = make_float2(sum.at[m][n][0], sum.at[m][n][1]);
            *reinterpret_cast<float2*>(at + 8 * STRIDE) = make_float2(sum.at[m][n][2], sum.at[m][n][3]);
        }
        __syncwarp();
        constexpr int PACKS = WARP_N / STORE_SIZE;
        #pragma unroll
        for (int pack = lane; pack < 16 * PACKS; pack += 32) {
            int r = pack / PACKS, c = pack % PACKS * STORE_SIZE;
            float value[STORE_SIZE];
            #pragma unroll
            for (int u = 0; u < STORE_SIZE; ++u) {
                value[u] = staged[r * STRIDE + c + u];
            }
            if (row + m * 16 + r < rows && col + c < columns) {
                store(value, batch, row + m * 16 + r, base + col + c, out, EPILOGUE_ARGUMENTS p);
            }
        }
    }
}

constexpr int STAGING_BYTES = WARPS * 16 * (WARP_N + 4) * 4;
static_assert(STAGING_BYTES <= STAGES * STAGE_BYTES, "results are staged where the operands were");
