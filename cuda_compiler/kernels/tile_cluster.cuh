// What happens to a tile of results that SPLITS blocks share, each with a part of k: they form a cluster, whose blocks
// read each other's shared memory. Each adds and stores its share of the rows.
constexpr int STORE_STRIDE = TILE_N + 4; // floats; keeps the quads of a fragment in different banks
static_assert(TILE_M * STORE_STRIDE * 4 <= SHARED_BYTES, "results are staged where the operands were");

#if __CUDA_ARCH__ >= 900
#define KERNEL_ATTRIBUTES __cluster_dims__(1, SPLITS, 1)
#else
#define KERNEL_ATTRIBUTES
#endif

// Adds the cluster's parts, always in the same order, and stores a tile of a matrix of `rows` by `columns`: STORE_SIZE
// neighbours at a time, made of PAIRS columns each.
__device__ __forceinline__ void finish_tile(
    const Accumulator& sum, unsigned char* shared, float*, int rows, int columns, OUT_T* out,
    EPILOGUE_PARAMETERS const Params& p)
{
    constexpr int TAKEN = STORE_SIZE * PAIRS, PACKS = TILE_N / TAKEN, SHARE = (TILE_M + SPLITS - 1) / SPLITS;
    constexpr int ROUNDS = (SHARE * PACKS + THREADS - 1) / THREADS;
    Part part = part_of(int(blockIdx.x), p);
    int batch = part.batch, row = part.row, col = part.col, base = part.base, split = int(blockIdx.y);
    uint lane = threadIdx.x % 32;
    float* staged = reinterpret_cast<float*>(shared);
    #pragma unroll
    for (int m = 0; m < STEPS_M; ++m) {
        float* at = staged + (warp_row(m) + lane / 4) * STORE_STRIDE + warp_col() + lane % 4 * 2;
        #pragma unroll
        for (int n = 0; n < STEPS_N; ++n) {
            const float (&own)[4] = sum.at[m][n];
            *reinterpret_cast<float2*>(at + n * 8) = make_float2(own[0], own[1]);
            *reinterpret_cast<float2*>(at + n * 8 + 8 * STORE_STRIDE) = make_float2(own[2], own[3]);
        }
    }
    Fetched fetched[ROUNDS];
    bool inside[ROUNDS];
    #pragma unroll
    for (int round = 0; round < ROUNDS; ++round) {
        int pack = int(threadIdx.x) + round * THREADS, line = split * SHARE + pack / PACKS;
        int r = row + line, c = col / PAIRS + pack % PACKS * STORE_SIZE;
        inside[round] = pack < SHARE * PACKS && line < TILE_M && r < rows && c < columns / PAIRS;
        if (inside[round]) {
            fetched[round] = fetch(batch, r, base + c, EPILOGUE_ARGUMENTS p);
        }
    }
    synchronize_cluster();
    #pragma unroll
    for (int round = 0; round < ROUNDS; ++round) {
        int pack = int(threadIdx.x) + round * THREADS, line = split * SHARE + pack / PACKS;
        if (!inside[round]) {
            continue;
        }
        const float* place = staged + line * STORE_STRIDE + pack % PACKS * TAKEN;
        Pack<float, TAKEN> value = load_pack<TAKEN>(place_in_cluster(place, 0));
        #pragma unroll
        for (int other = 1; other < SPLITS; ++other) {
            Pack<float, TAKEN> added = load_pack<TAKEN>(place_in_cluster(place, other));
            #pragma unroll
            for (int i = 0; i < TAKEN; ++i) {
                value[i] += added[i];
            }
        }
        int c = col / PAIRS + pack % PACKS * STORE_SIZE;
        store(value.at, fetched[round], batch, row + line, base + c, out, EPILOGUE_ARGUMENTS p);
    }
    synchronize_cluster(); // the others may still read what is staged here
}
