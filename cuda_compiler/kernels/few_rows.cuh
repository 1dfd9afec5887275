// Products of a few rows by a matrix that is read once, on tensor cores: result[v, o] = sum of vector[v, k] * matrix[o,
// k]. The matrix is the operand of 16 rows, vectors are its columns, in groups of eight. Four lanes read 32 neighbours
// of a row, a span, eight numbers each: as loaded, these are a lane's part of two products, since k is permuted in the
// same way for both operands. The warps of CLUSTER blocks share a tile of TILES times 16 rows. Each has neighbouring
// spans and loads DEPTH of them ahead, the first ones before the grid ahead of this one has finished. Grid: clusters
// with tiles in turns in x. Block: 256.
constexpr int THREADS = 256, WARPS = THREADS / 32, TILE = 16 * TILES, SIDES = 2 * TILES; // a lane's rows of a tile
constexpr int CHUNK = 8, WORDS = CHUNK / 2, SPAN = 4 * CHUNK, SPANS = (COMMON + SPAN - 1) / SPAN;
constexpr int SPANS_EACH = (SPANS + WARPS * CLUSTER - 1) / (WARPS * CLUSTER); // of a warp
constexpr int ROUNDS = (SPANS_EACH + DEPTH - 1) / DEPTH;
constexpr bool WHOLE = COMMON % SPAN == 0, EVEN = SPANS == SPANS_EACH * WARPS * CLUSTER && SPANS_EACH % DEPTH == 0;
constexpr int GROUPS = (VECTORS + 7) / 8, COLUMNS = 8 * GROUPS;
constexpr int CHAINS = TILES * GROUPS == 1 ? 2 : 1;  // of products that do not wait for each other
constexpr bool WHOLE_VECTORS = PROLOGUE || CLUSTER == 1; // in shared memory; else what the spans of this block meet
constexpr int STAGED_SPANS = WHOLE_VECTORS ? SPANS : WARPS * SPANS_EACH;
constexpr int VECTOR_ROW = STAGED_SPANS * SPAN + (STAGED_SPANS * SPAN % 64 == 32 ? 0 : 32); // neighbours in other banks
constexpr int PART_ROW = TILE + 4, TURNS = TILES == 1 ? 2 : 1; // with two, tiles wait once for each other
constexpr int PART = WARPS * COLUMNS * PART_ROW;
constexpr int VALUES = STORE_SIZE * PAIRS, ITEMS = TILE / VALUES * VECTORS, SHARE = (ITEMS + CLUSTER - 1) / CLUSTER;
constexpr int ITEMS_EACH = (ITEMS + THREADS - 1) / THREADS, SHARE_EACH = (SHARE + THREADS - 1) / THREADS;
constexpr int GATHERED = CLUSTER > 1 ? CLUSTER * SHARE * VALUES : 0; // floats that the blocks of a cluster send to one
static_assert(TILE % VALUES == 0, "stores take whole tiles");
// Floats of shared memory ahead of the vectors.
constexpr int GATHERED_AT = TURNS * PART, VECTORS_AT = (GATHERED_AT + 2 * GATHERED + 3) / 4 * 4;

// A warp's place in the matrix: a tile, and which of its rounds comes next.
struct Stream {
    const vector_t* matrix;
    int first_span, quad; // of this warp, and the lane's place in a row
    int tile, round;
    bool inside;              // of the matrix
    const vector_t* numbers;  // of this lane's part of the next round's first span, in the first of its rows
    int further[SIDES];       // from there to the same in its other rows

    __device__ __forceinline__ static int row_of(int tile, int side, const Params& p)
    {
        int row = tile * TILE + side * 8 + int(threadIdx.x) % 32 / 4;
        return row < p.outputs ? row : p.outputs - 1;
    }

    __device__ __forceinline__ void seek(int place, const Params& p)
    {
        tile = place;
        round = 0;
        inside = place < p.tiles;
        int first = row_of(inside ? tile : 0, 0, p);
        numbers = matrix + (long long)first * p.matrix_row + (first_span * 4 + quad) * CHUNK;
        #pragma unroll
        for (int side = 0; side < SIDES; ++side) {
            further[side] = (row_of(inside ? tile : 0, side, p) - first) * p.matrix_row;
        }
    }

    __device__ __forceinline__ void advance(int step, const Params& p)
    {
        round += 1;
        if (round == ROUNDS) {
            seek(tile + step, p);
        } else {
            numbers += DEPTH * SPAN;
        }
    }

    __device__ __forceinline__ void load(uint (&word)[SIDES][WORDS], int pass) const
    {
        int own = round * DEPTH + pass, span = first_span + own;
        bool valid = inside && (EVEN || own < SPANS_EACH && span < SPANS);
        valid = valid && (WHOLE || span * SPAN + quad * CHUNK < COMMON);
        #pragma unroll
        for (int side = 0; side < SIDES; ++side) {
            if (!WHOLE) { // nothing that is no number meets the zeros behind the last element
                #pragma unroll
                for (int index = 0; index < WORDS; ++index) {
                    word[side][index] = 0;
                }
            }
            const vector_t* source = numbers + further[side] + pass * SPAN;
            load_bits<CHUNK * 2>(word[side], reinterpret_cast<const uint8*>(source), valid);
        }
    }
};

typedef float Sums[GROUPS][TILES][4]; // in the register layout of mma.m16n8k16

// Adds the products of a span. `vectors` is the lane's part of the first span of the vectors that it has of each group.
__device__ __forceinline__ void multiply_span(
    Sums (&sum)[CHAINS], const uint (&word)[SIDES][WORDS], const vector_t* const (&vectors)[GROUPS], int first)
{
    #pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
        Pack<uint, WORDS> x = load_pack<WORDS>(reinterpret_cast<const uint*>(vectors[group] + first));
        #pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            const uint(&upper)[WORDS] = word[tile * 2], (&lower)[WORDS] = word[tile * 2 + 1];
            #pragma unroll
            for (int side = 0; side < 2; ++side) {
                const uint numbers[4] = {upper[side * 2], lower[side * 2], upper[side * 2 + 1], lower[side * 2 + 1]};
                TensorCores<vector_t>::multiply(sum[side % CHAINS][group][tile], numbers, x[side * 2], x[side * 2 + 1]);
            }
        }
    }
}

// Copies STAGED_SPANS spans of the vectors to shared memory; zeros behind the last element.
__device__ __forceinline__ void stage_vectors(vector_t* staged, const vector_t* vector, int first_span, const Params& p)
{
#if !PROLOGUE
    constexpr int ALL = STAGED_SPANS * SPAN / CHUNK;
    #pragma unroll 4
    for (int index = int(threadIdx.x); index < VECTORS * ALL; index += THREADS) {
        int v = index / ALL, chunk = index % ALL, k = first_span * SPAN + chunk * CHUNK;
        bool valid = k < COMMON;
        copy_chunk(
            staged + v * VECTOR_ROW + chunk * CHUNK, vector + (long long)v * p.vector_row + (valid ? k : 0), valid);
    }
    commit_copies();
    wait_for_copies<0>();
#else
    for (int k = COMMON + int(threadIdx.x) * CHUNK; k < SPANS * SPAN; k += THREADS * CHUNK) {
        for (int v = 0; v < VECTORS; ++v) {
            store_pack(staged + v * VECTOR_ROW + k, Pack<vector_t, CHUNK>{});
        }
    }
#endif
}

// A thread's values of a tile's results: which rows of the result, and which neighbours.
struct Item {
    int v, first, at; // `at` is the first of VALUES neighbours, `first` its place in the tile

    __device__ __forceinline__ Item(int index, int tile)
    {
        v = index / (TILE / VALUES);
        first = index % (TILE / VALUES) * VALUES;
        at = tile * TILE + first;
    }
};

// Sums of a tile from their parts, always in the same order: those of a block's warps, and those of a cluster's blocks.
__device__ __forceinline__ float sum_of_warps(const float* parts, int v, int row)
{
    float sum = parts[v * PART_ROW + row];
    #pragma unroll
    for (int warp = 1; warp < WARPS; ++warp) {
        sum += parts[(warp * COLUMNS + v) * PART_ROW + row];
    }
    return sum;
}
__device__ __forceinline__ float sum_of_blocks(const float* gathered)
{
    float sum = gathered[0];
    #pragma unroll
    for (int block = 1; block < CLUSTER; ++block) {
        sum += gathered[block * SHARE * VALUES];
    }
    return sum;
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) few_rows(
    const vector_t* matrix, VECTOR_PARAMETERS OUT_T* out, EPILOGUE_PARAMETERS const Params p)
{
    extern __shared__ __align__(16) unsigned char dynamic_shared[];
    float* floats = reinterpret_cast<float*>(dynamic_shared);
    vector_t* staged = reinterpret_cast<vector_t*>(floats + VECTORS_AT);
    int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32, quad = lane % 4;
    int rank = CLUSTER > 1 ? int(blockIdx.x) % CLUSTER : 0, clusters = int(gridDim.x) / CLUSTER;
    if (CLUSTER > 1) {
        announce_to_cluster();
    }
    if (HURRIES) {
        hurry_next_grid();
    }
#if PROLOGUE
    ask_ahead(THREADS, VECTOR_ARGUMENTS p);
#endif
    if (!MATRIX_CONSTANT) {
        wait_for_previous_grid();
    }
    int first_span = (rank * WARPS + warp) * SPANS_EACH;
    Stream stream{matrix, first_span, quad};
    stream.seek(int(blockIdx.x) / CLUSTER, p);
    uint words[DEPTH][SIDES][WORDS];
    #pragma unroll
    for (int pass = 0; pass < DEPTH; ++pass) {
        stream.load(words[pass], pass);
    }
    stream.advance(clusters, p);
    if (MATRIX_CONSTANT) {
        wait_for_previous_grid();
    }
    int staged_first = WHOLE_VECTORS ? 0 : rank * WARPS * SPANS_EACH;
#if PROLOGUE
    for (int v = int(threadIdx.x) / ROW_THREADS; v < VECTORS; v += THREADS / ROW_THREADS) {
        compute_row(v, int(threadIdx.x) % ROW_THREADS, staged + v * (VECTOR_ROW - COMMON), VECTOR_ARGUMENTS p);
    }
    stage_vectors(staged, nullptr, 0, p);
#else
    stage_vectors(staged, vector, staged_first, p);
#endif
    __syncthreads();
    const vector_t* vectors[GROUPS];
    #pragma unroll
    for (int group = 0; group < GROUPS; ++group) { // behind the last vector they have another one's numbers, unread
        int column = group * 8 + lane / 4 < VECTORS ? group * 8 + lane / 4 : 0;
        vectors[group] = staged + column * VECTOR_ROW + (first_span - staged_first) * SPAN + quad * CHUNK;
    }
    if (CLUSTER > 1) {
        wait_for_cluster();
    }
    int turn = 0;
    for (int tile = int(blockIdx.x) / CLUSTER; tile < p.tiles; tile += clusters, turn ^= 1) {
        Sums sum[CHAINS] = {};
        Fetched fetched[SHARE_EACH];
        #pragma unroll
        for (int index = 0; index < SHARE_EACH; ++index) {
            int own = int(threadIdx.x) + index * THREADS;
            Item item(rank * SHARE + own, tile);
            if (own < SHARE && item.v < VECTORS && item.at < p.outputs) {
                fetched[index] = fetch(0, item.v, item.at / PAIRS, EPILOGUE_ARGUMENTS p);
            }
        }
        #pragma unroll 1
        for (int round = 0; round < ROUNDS; ++round) {
            #pragma unroll
            for (int pass = 0; pass < DEPTH; ++pass) {
                int own = round * DEPTH + pass;
                if (EVEN || own < SPANS_EACH && first_span + own < SPANS) {
                    multiply_span(sum, words[pass], vectors, own * SPAN);
                }
                stream.load(words[pass], pass);
            }
            stream.advance(clusters, p);
        }
        float* part = floats + turn % TURNS * PART;
        float* mine = part + warp * COLUMNS * PART_ROW + quad * 2 * PART_ROW + lane / 4;
        #pragma unroll
        for (int found = 0; found < GROUPS * TILES * 4; ++found) {
            int group = found / 4 / TILES, at = found / 4 % TILES, index = found % 4;
            float other = CHAINS == 2 ? sum[CHAINS - 1][group][at][index] : 0.0f;
            mine[(group * 8 + index % 2) * PART_ROW + at * 16 + index / 2 * 8] = sum[0][group][at][index] + other;
        }
        __syncthreads();
        float* gathered = floats + GATHERED_AT + turn * GATHERED;
        if (CLUSTER > 1) {
            #pragma unroll
            for (int index = 0; index < ITEMS_EACH; ++index) {
                int own = int(threadIdx.x) + index * THREADS;
                if (own < ITEMS) {
                    Item item(own, tile);
                    float* target = gathered + (rank * SHARE + own % SHARE) * VALUES;
                    #pragma unroll
                    for (int u = 0; u < VALUES; ++u) {
                        store_in_cluster(target + u, own / SHARE, sum_of_warps(part, item.v, item.first + u));
                    }
                }
            }
            arrive_at_cluster();
            wait_for_cluster();
        }
        #pragma unroll
        for (int index = 0; index < SHARE_EACH; ++index) {
            int own = int(threadIdx.x) + index * THREADS;
            Item item(rank * SHARE + own, tile);
            if (own < SHARE && item.v < VECTORS && item.at < p.outputs) {
                float value[VALUES];
                #pragma unroll
                for (int u = 0; u < VALUES; ++u) {
                    value[u] = CLUSTER > 1 ? sum_of_blocks(gathered + own * VALUES + u)
                                           : sum_of_warps(part, item.v, item.first + u);
                }
                store(value, fetched[index], 0, item.v, item.at / PAIRS, out, EPILOGUE_ARGUMENTS p);
            }
        }
        if (TURNS == 1 && CLUSTER == 1) { // a cluster's blocks have read theirs when all have arrived
            __syncthreads();
        }
    }
}
