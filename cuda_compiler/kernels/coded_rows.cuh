// Products of 17 to 64 rows by a matrix in packed codes that is read once: result[v, o] = sum of vector[v, k] *
// number(o, k). Codes and vectors are copied to shared memory as they are, in STAGES stages along k; the first codes
// before the grid ahead of this one has finished. A warp makes numbers of 32 rows of the matrix in registers, the
// operand of 16 rows of tensor cores, and multiplies them by all vectors; k is permuted alike for both operands: four
// lanes have a span's codes of a row side by side, 16 each. SETS sets of warps take spans in turns, each set for all
// rows of the tile, and CLUSTER blocks share k. Grid: clusters with tiles in turns in x.
constexpr int WARPS_N = TILE_N / 32, THREADS = 32 * WARPS_N * SETS;
constexpr int STAGE_K = SPAN * SETS, STEPS = (COMMON + STAGE_K - 1) / STAGE_K, STAGE_BYTES = SETS * SPAN_BYTES;
constexpr int WORDS = BITS / 2; // of a lane's part of a row
constexpr int SIDES = 4, ITEMS_EACH = (ITEMS + THREADS - 1) / THREADS; // a lane's rows, and a thread's results
static_assert(SPAN == 64, "four lanes have 16 places each");
constexpr int PARTS_AT = STAGES * STAGE_BYTES, GATHERED_AT = PARTS_AT + PARTS_BYTES;
constexpr int SCALES_AT = GATHERED_AT + GATHERED_BYTES;

// Scales, zero points and biases of a lane's codes of a span, in SIDES rows, eight rows apart. They are kept as loaded,
// so that nothing waits for a load before its value is used.
struct Belongings {
    scale_t scale[SIDES];
    zero_t zero[SIDES];
    bias_t bias[SIDES];
    int group;

    __device__ __forceinline__ void load(const Groups& b, int row, int span, const Params& p)
    {
        int k = span * SPAN + int(threadIdx.x) % 4 * 16;
        group = (COMMON % SPAN == 0 || k < COMMON ? k : COMMON - 1) / GROUP;
        #pragma unroll
        for (int side = 0; side < SIDES; ++side) {
            load_belonging(scale[side], zero[side], bias[side], b, row_of_scales(row + side * 8, p), group, p);
        }
    }

    // The numbers of an octet of one of the rows; their scale comes last where a row has but one.
    template <int COUNT>
    __device__ __forceinline__ void make_numbers(
        uint (&number)[4], const uint (&word)[COUNT], int octet, int side, const Codebook& codebook) const
    {
        octet_less_zero(number, word, octet, zero[side], group, codebook);
        #pragma unroll
        for (int pair = 0; pair < (ONE_GROUP ? 0 : 4); ++pair) {
            number[pair] = scaled_pair(number[pair], scale[side], bias[side], IN_ORDER_UNIT);
        }
    }
};

// A step along k of one of a block's tiles.
struct Step {
    int tile, step, last;

    __device__ __forceinline__ Step(int first_tile, int rank)
        : tile(first_tile), step(STEPS * rank / CLUSTER), last(STEPS * (rank + 1) / CLUSTER)
    {
    }
    __device__ __forceinline__ void next(int rank, int clusters)
    {
        if (++step == last) {
            step = STEPS * rank / CLUSTER;
            tile += clusters;
        }
    }
};

// Starts copying the codes of a step; zeros for rows and places that the matrix does not have.
__device__ __forceinline__ void copy_codes(unsigned char* stage, const uint8* codes, const Step& at, const Params& p)
{
    constexpr int CHUNKS = CODE_ROW / 16, LINE = CHUNKS * SETS, APART = THREADS / LINE; // chunks of a row; rows
    int chunk = int(threadIdx.x) % LINE, line = int(threadIdx.x) / LINE;
    int first = at.step * (STAGE_K * BITS / 8) + chunk * 16, row = at.tile * TILE_N + line;
    const uint8* source = codes + (long long)row * p.matrix_row + first;
    unsigned char* target = stage + chunk / CHUNKS * SPAN_BYTES + VECTOR_BYTES + line * CODE_ROW + chunk % CHUNKS * 16;
    bool inside = at.tile < p.tiles && (COMMON % STAGE_K == 0 || first < ROW_BYTES);
    #pragma unroll
    for (int index = 0; index < TILE_N / APART; ++index) {
        bool valid = inside && row + index * APART < p.outputs;
        const uint8* from = valid ? source + (long long)index * APART * p.matrix_row : codes;
        copy_chunk(target + index * APART * CODE_ROW, from, valid);
    }
}

// The same for the vectors: lines of 128 bytes, whose chunks are permuted so that lanes read from different banks.
__device__ __forceinline__ void copy_vectors(
    unsigned char* stage, const vector_t* vector, const Step& at, const Params& p)
{
    constexpr int LINE = 8 * SETS, ALL = COLUMNS * LINE;
    #pragma unroll
    for (int first = 0; first < ALL; first += THREADS) {
        int index = first + int(threadIdx.x), v = index / LINE, chunk = index % LINE;
        int k = at.step * STAGE_K + chunk * 8;
        if (ALL % THREADS == 0 || index < ALL) {
            bool valid = at.tile < p.tiles && v < VECTORS && (COMMON % STAGE_K == 0 || k < COMMON);
            const vector_t* from = vector + (valid ? (long long)v * p.vector_row + k : 0);
            copy_chunk(stage + chunk / 8 * SPAN_BYTES + v * 128 + (chunk % 8 ^ v % 8) * 16, from, valid);
        }
    }
}

typedef float Sums[2][COLUMN_BLOCKS][4]; // in the register layout of mma.m16n8k16

// Adds the products of a span.
__device__ __forceinline__ void multiply_span(
    Sums& sum, const unsigned char* span, int first_row, const Belongings& own, const Codebook& codebook)
{
    int lane = int(threadIdx.x) % 32, quad = lane % 4;
    const unsigned char* codes = span + VECTOR_BYTES + (first_row + lane / 4) * CODE_ROW + quad * (WORDS * 4);
    const unsigned char* vectors = span + lane / 4 * 128;
    uint word[SIDES][WORDS];
    #pragma unroll
    for (int side = 0; side < SIDES; ++side) {
        Pack<uint, WORDS> found = load_pack<WORDS>(reinterpret_cast<const uint*>(codes + side * 8 * CODE_ROW));
        #pragma unroll
        for (int index = 0; index < WORDS; ++index) {
            word[side][index] = found[index];
        }
    }
    #pragma unroll
    for (int octet = 0; octet < 2; ++octet) {
        uint number[SIDES][4];
        #pragma unroll
        for (int side = 0; side < SIDES; ++side) {
            own.make_numbers(number[side], word[side], octet, side, codebook);
        }
        Pack<uint, 4> x[COLUMN_BLOCKS];
        #pragma unroll
        for (int block = 0; block < COLUMN_BLOCKS; ++block) {
            const unsigned char* line = vectors + block * 8 * 128 + ((quad * 2 + octet) ^ lane / 4) * 16;
            x[block] = load_pack<4>(reinterpret_cast<const uint*>(line));
        }
        #pragma unroll
        for (int part = 0; part < 4; part += 2) { // products that follow each other add to other sums
            #pragma unroll
            for (int block = 0; block < COLUMN_BLOCKS; ++block) {
                #pragma unroll
                for (int tile = 0; tile < 2; ++tile) {
                    const uint(&upper)[4] = number[tile * 2], (&lower)[4] = number[tile * 2 + 1];
                    const uint a[4] = {upper[part], lower[part], upper[part + 1], lower[part + 1]};
                    TensorCores<vector_t>::multiply(sum[tile][block], a, x[block][part], x[block][part + 1]);
                }
            }
        }
    }
}

// Puts the sums of the sets of warps together, always in the same order.
__device__ __forceinline__ void leave_sums(float* parts, const Sums& sum, int first_row, int set)
{
    int lane = int(threadIdx.x) % 32;
    float* own = parts + lane % 4 * 2 * PART_ROW + first_row + lane / 4;
    #pragma unroll
    for (int turn = 0; turn < SETS; ++turn) {
        if (turn == set) {
            #pragma unroll
            for (int index = 0; index < 2 * COLUMN_BLOCKS * 4; ++index) {
                int tile = index % 2, block = index / 8, i = index / 2 % 4;
                float& place = own[(block * 8 + i % 2) * PART_ROW + tile * 16 + i / 2 * 8];
                place = turn == 0 ? sum[tile][block][i] : place + sum[tile][block][i];
            }
        }
        __syncthreads();
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) coded_rows(
    const uint8* matrix, const scale_t* scales, const zero_t* zeros, const bias_t* biases, const codebook_t* entries,
    const vector_t* vector, OUT_T* out, EPILOGUE_PARAMETERS const Params p)
{
    extern __shared__ __align__(16) unsigned char dynamic_shared[];
    unsigned char* ring = dynamic_shared;
    float* parts = reinterpret_cast<float*>(dynamic_shared + PARTS_AT);
    float* gathered = reinterpret_cast<float*>(dynamic_shared + GATHERED_AT);
    float* row_scale = reinterpret_cast<float*>(dynamic_shared + SCALES_AT);
    int warp = int(threadIdx.x) / 32, set = warp / WARPS_N, first_row = warp % WARPS_N * 32;
    int rank = CLUSTER > 1 ? int(blockIdx.x) % CLUSTER : 0, clusters = int(gridDim.x) / CLUSTER;
    if (CLUSTER > 1) {
        announce_to_cluster();
    }
    const Groups b{scales, zeros, biases};
    Codebook codebook;
    codebook.load(entries);
    Step now(int(blockIdx.x) / CLUSTER, rank), ahead = now, early = now;
    #pragma unroll 1
    for (int stage = 0; stage < STAGES - 1; ++stage) {
        copy_codes(ring + stage * STAGE_BYTES, matrix, early, p);
        early.next(rank, clusters);
    }
    int own_row = first_row + int(threadIdx.x) % 32 / 4;
    Belongings next;
    next.load(b, now.tile * TILE_N + own_row, now.step * SETS + set, p);
    wait_for_previous_grid();
    #pragma unroll 1
    for (int stage = 0; stage < STAGES - 1; ++stage) {
        copy_vectors(ring + stage * STAGE_BYTES, vector, ahead, p);
        commit_copies();
        ahead.next(rank, clusters);
    }
    int stage = 0;
    while (now.tile < p.tiles) {
        Sums sum = {};
        int tile = now.tile;
        scale_t scale{};
        if (ONE_GROUP && int(threadIdx.x) < TILE_N) {
            scale = scales[row_of_scales(tile * TILE_N + int(threadIdx.x), p) * p.scale_row];
        }
        #pragma unroll 1
        while (now.tile == tile) {
            Belongings own = next;
            wait_for_copies<STAGES - 2>();
            __syncthreads();
            now.next(rank, clusters);
            if (now.tile < p.tiles) {
                next.load(b, now.tile * TILE_N + own_row, now.step * SETS + set, p);
            }
            unsigned char* freed = ring + (stage == 0 ? STAGES - 1 : stage - 1) * STAGE_BYTES;
            copy_codes(freed, matrix, ahead, p);
            copy_vectors(freed, vector, ahead, p);
            commit_copies();
            ahead.next(rank, clusters);
            multiply_span(sum, ring + stage * STAGE_BYTES + set * SPAN_BYTES, first_row, own, codebook);
            stage = stage + 1 == STAGES ? 0 : stage + 1;
        }
        Fetched fetched[ITEMS_EACH];
        #pragma unroll
        for (int index = 0; index < ITEMS_EACH; ++index) {
            Item item(int(threadIdx.x) + index * THREADS, 0, tile * TILE_N, rank, p);
            if (item.exists) {
                fetched[index] = fetch(0, item.v, item.at / PAIRS, EPILOGUE_ARGUMENTS p);
            }
        }
        if (ONE_GROUP && int(threadIdx.x) < TILE_N) {
            row_scale[threadIdx.x] = float(scale) / IN_ORDER_UNIT;
        }
        leave_sums(parts, sum, first_row, set);
        if (CLUSTER > 1) {
            wait_for_cluster();
            send_sums<THREADS>(gathered, parts, rank, int(threadIdx.x));
            arrive_at_cluster();
            wait_for_cluster();
        }
        #pragma unroll
        for (int index = 0; index < ITEMS_EACH; ++index) {
            Item item(int(threadIdx.x) + index * THREADS, 0, tile * TILE_N, rank, p);
            if (item.exists) {
                float value[VALUES];
                item.read(value, CLUSTER > 1 ? gathered : parts, row_scale);
                store(value, fetched[index], 0, item.v, item.at / PAIRS, out, EPILOGUE_ARGUMENTS p);
            }
        }
        if (CLUSTER == 1) {
            __syncthreads(); // the next tile's sums take the same place
        }
    }
    wait_for_copies<0>();
}
