// What happens to a tile of results: parts of several blocks are added, then rows are stored.
#define KERNEL_ATTRIBUTES

#if SPLITS > 1
// Arrivals at each tile of the result; the last one leaves zero behind.
__device__ uint arrivals[RESULT_TILES];

// Adds the parts that SPLITS blocks have of one tile, always in the same order. True in the block that has the sum.
__device__ __forceinline__ bool add_splits(Accumulator& sum, float* partial)
{
    int tile = int(blockIdx.x), split = int(blockIdx.y);
    constexpr int QUADS = STEPS_M * STEPS_N;
    float4* parts = reinterpret_cast<float4*>(partial) + (long long)tile * SPLITS * QUADS * THREADS + threadIdx.x;
    #pragma unroll
    for (int quad = 0; quad < QUADS; ++quad) {
        const float (&own)[4] = sum.at[quad / STEPS_N][quad % STEPS_N];
        __stcg(parts + (split * QUADS + quad) * THREADS, make_float4(own[0], own[1], own[2], own[3]));
    }
    if (!is_last_of(SPLITS, arrivals[tile])) {
        return false;
    }
    sum.clear();
    #pragma unroll 2
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

constexpr int SLICE = WARP_N % 64 == 0 ? 64 : WARP_N % 32 == 0 ? 32 : 16; // columns that a warp stores at a time
constexpr int STORE_STRIDE = SLICE + 4; // floats; keeps the quads of a fragment in different banks
constexpr int STAGING_BYTES = WARPS * 16 * STORE_STRIDE * 4;
static_assert(STAGING_BYTES <= SHARED_BYTES, "results are staged where the operands were");

// Brings results of a matrix of `rows` by `columns` into rows, so that each thread stores neighbours: STORE_SIZE at a
// time, made of PAIRS columns each. What the epilogue reads is fetched one step ahead.
__device__ __forceinline__ void store_tile(
    const Accumulator& sum, unsigned char* shared, int rows, int columns, OUT_T* out,
    EPILOGUE_PARAMETERS const Params& p)
{
    constexpr int TAKEN = STORE_SIZE * PAIRS, PACKS = SLICE / TAKEN, ROUNDS = 16 * PACKS / 32, SLICES = WARP_N / SLICE;
    static_assert(32 % PACKS == 0 || PACKS % 32 == 0, "lanes share rows evenly");
    uint lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float* staged = reinterpret_cast<float*>(shared) + warp * 16 * STORE_STRIDE;
    Part part = part_of(int(blockIdx.x), p);
    int batch = part.batch, base = part.base, row = part.row + warp_row(0), col = (part.col + warp_col()) / PAIRS;
    columns /= PAIRS;
    Fetched fetched[2][ROUNDS];
    #pragma unroll
    for (int step = -1; step < STEPS_M * SLICES; ++step) {
        const int next = step + 1, m = step / SLICES, first = step % SLICES * (SLICE / 8);
        #pragma unroll
        for (int round = 0; round < ROUNDS && next < STEPS_M * SLICES; ++round) {
            uint pack = lane + round * 32;
            int r = row + warp_row(next / SLICES) - warp_row(0) + pack / PACKS;
            int c = col + next % SLICES * (SLICE / PAIRS) + pack % PACKS * STORE_SIZE;
            if (r < rows && c < columns) {
                fetched[next % 2][round] = fetch(batch, r, base + c, EPILOGUE_ARGUMENTS p);
            }
        }
        if (step < 0) {
            continue;
        }
        __syncwarp();
        #pragma unroll
        for (int n = 0; n < SLICE / 8; ++n) {
            const float (&own)[4] = sum.at[m][first + n];
            float* at = staged + lane / 4 * STORE_STRIDE + n * 8 + lane % 4 * 2;
            *reinterpret_cast<float2*>(at) = make_float2(own[0], own[1]);
            *reinterpret_cast<float2*>(at + 8 * STORE_STRIDE) = make_float2(own[2], own[3]);
        }
        __syncwarp();
        #pragma unroll
        for (int round = 0; round < ROUNDS; ++round) {
            uint pack = lane + round * 32;
            int r = row + warp_row(m) - warp_row(0) + pack / PACKS;
            int c = col + step % SLICES * (SLICE / PAIRS) + pack % PACKS * STORE_SIZE;
            Pack<float, TAKEN> value = load_pack<TAKEN>(staged + pack / PACKS * STORE_STRIDE + pack % PACKS * TAKEN);
            if (r < rows && c < columns) {
                store(value.at, fetched[step % 2][round], batch, r, base + c, out, EPILOGUE_ARGUMENTS p);
            }
        }
    }
}

// Stores a tile, in the block that has the sum of all parts of it.
__device__ __forceinline__ void finish_tile(
    Accumulator& sum, unsigned char* shared, float* partial, int rows, int columns, OUT_T* out,
    EPILOGUE_PARAMETERS const Params& p)
{
#if SPLITS > 1
    if (!add_splits(sum, partial)) {
        return;
    }
#endif
    store_tile(sum, shared, rows, columns, out, EPILOGUE_ARGUMENTS p);
}
