// Products of many rows by a matrix in packed codes on compute capability 9.0: result[v, o] = sum of vector[v, k] *
// number(o, k). The copy engine copies codes and vectors as they are, a span of k at a time, to STAGES stages; the
// first codes before the grid ahead of this one has finished. Some warps copy scales, zero points and biases.
// Warpgroups make numbers of 64 rows of the matrix each, in the registers that tensor cores take them from, beside the
// products of the numbers before: of every eight codes of a row a lane reads the pair that is its own. CLUSTER blocks
// share the spans. Grid: clusters with tiles in turns in x, VECTORS by TILE_N results each.
constexpr int PRODUCERS = 128, BRINGERS = 96, MULTIPLIERS = TILE_N * 2, THREADS = PRODUCERS + MULTIPLIERS;
constexpr bool ALL_VECTORS = ROW_VALUES > 0; // bytes for what is the same all along a row of the result
constexpr int SIDES = 2, ITEMS_EACH = (ITEMS + 127) / 128; // a lane's rows, and a thread's results
constexpr int STEPS = SPAN / 32, PANELS = SPAN / 64, PANEL_BYTES = COLUMNS * 128; // parts of a span that are multiplied
constexpr int PIECE = GROUP % SPAN == 0 || GROUP >= COMMON ? SPAN : SPAN % GROUP == 0 ? GROUP : 32; // of one group
constexpr int PIECES = SPAN / PIECE, ROWS_EACH = (TILE_N + BRINGERS - 1) / BRINGERS;
constexpr bool SUBNORMAL = AS_THEY_ARE && BITS == 8; // codes of four bits have their own instructions
constexpr float NUMBER_UNIT = SUBNORMAL ? SUBNORMAL_UNIT : 1.0f;
constexpr int AHEAD = 4; // spans whose belongings are on their way in registers
constexpr bool BELONGINGS = !ONE_GROUP || ZEROS || BIASES;
constexpr int BIASES_AT = ONE_GROUP ? 0 : PIECES * TILE_N * sizeof(scale_t);
constexpr int ZEROS_AT = BIASES_AT + (BIASES ? PIECES * TILE_N * sizeof(bias_t) : 0);
constexpr int BELONGING_BYTES = ZEROS_AT + (ZEROS ? PIECES * TILE_N * 2 : 0);
constexpr int BELONGINGS_AT = STAGES * SPAN_BYTES, PARTS_AT = BELONGINGS_AT + STAGES * BELONGING_BYTES;
constexpr int GATHERED_AT = PARTS_AT + TILE_N / 64 * PARTS_BYTES;
constexpr int SCALES_AT = GATHERED_AT + TILE_N / 64 * GATHERED_BYTES;
constexpr int ROWS_AT = SCALES_AT + TILE_N * 4, BARRIERS_AT = ROWS_AT + COLUMNS * ROW_VALUES;
static_assert(SPAN % 64 == 0 && CODE_ROW <= 128, "lines of vectors are full, and those of codes no longer");
static_assert(GROUP % 32 == 0 || GROUP >= COMMON, "a part of a row that is multiplied at a time is of one group");

// Where many sums need registers, the threads that copy give up some of theirs.
constexpr bool WIDE = COLUMNS > 64;
constexpr int BRING_REGISTERS = 88, PRODUCT_REGISTERS = 200;
static_assert(!WIDE || TILE_N <= 128, "registers of two warpgroups");

// Codes and vectors in shared memory.
struct Ring : StageBarriers<BARRIERS_AT> {
    __device__ __forceinline__ uint vectors(int stage) const { return base + stage * SPAN_BYTES; }
    __device__ __forceinline__ uint codes(int stage) const { return vectors(stage) + VECTOR_BYTES; }
};

// A span of one of a block's tiles; tiles of the same rows of the matrix follow each other. Where a tile has all
// vectors, blocks that have whole rows begin with different spans, so that they do not all ask for the same vectors at
// once.
struct Place {
    int tile, span, done = 0;

    __device__ __forceinline__ Place(int rank)
    {
        tile = int(blockIdx.x) / CLUSTER;
        span = ALL_VECTORS && CLUSTER == 1 ? tile % SPANS : first(rank);
    }

    __device__ __forceinline__ int row(const Params& p) const { return tile / p.tiles_m * TILE_N; }
    __device__ __forceinline__ int vector(const Params& p) const { return tile % p.tiles_m * COLUMNS; }

    __device__ __forceinline__ static int first(int rank) { return SPANS * rank / CLUSTER; }
    __device__ __forceinline__ void next(int rank, int clusters)
    {
        if (++span == first(rank + 1)) {
            span = first(rank);
        }
        if (++done == first(rank + 1) - first(rank)) {
            done = 0;
            tile += clusters;
        }
    }
};

// What the copying thread does. Nothing before this grid writes the codes.
__device__ __forceinline__ void bring_spans(
    const Ring& ring, const TensorMap& codes, const TensorMap& vectors, int rank, int clusters, const Params& p)
{
    Place early(rank), now = early;
    int begun = 0;
    for (; begun < STAGES && early.tile < p.tiles; ++begun) {
        arrive_and_expect(ring.full(begun), SPAN_BYTES);
        copy_lines(ring.codes(begun), codes, ring.full(begun), early.span * (CODE_ROW / 2), early.row(p));
        early.next(rank, clusters);
    }
    wait_for_previous_grid();
    Turn turn{0, 1}; // the first time around, everything is free
    while (now.tile < p.tiles) {
        uint full = ring.full(turn.stage);
        if (begun == 0) {
            wait_for_phase(ring.empty(turn.stage), turn.parity);
            arrive_and_expect(full, SPAN_BYTES);
            copy_lines(ring.codes(turn.stage), codes, full, now.span * (CODE_ROW / 2), now.row(p));
        } else {
            --begun;
        }
        #pragma unroll
        for (int panel = 0; panel < PANELS; ++panel) {
            copy_lines(
                ring.vectors(turn.stage) + panel * PANEL_BYTES, vectors, full, now.span * SPAN + panel * 64,
                now.vector(p));
        }
        now.next(rank, clusters);
        turn.next();
    }
}

// Scales, zero points and biases of a span in a row of a tile, as loaded.
struct Belonging {
    scale_t scale[PIECES];
    zero_t zero[PIECES];
    bias_t bias[PIECES];

    __device__ __forceinline__ static int group_of(int span, int piece)
    {
        int k = span * SPAN + piece * PIECE;
        return (COMMON % SPAN == 0 || k < COMMON ? k : COMMON - 1) / GROUP;
    }
    __device__ __forceinline__ void load(const Groups& b, int row, const Place& at, const Params& p)
    {
        long long own = row_of_scales(at.row(p) + row, p);
        #pragma unroll
        for (int piece = 0; piece < PIECES; ++piece) {
            load_belonging(scale[piece], zero[piece], bias[piece], b, own, group_of(at.span, piece), p);
        }
    }
    __device__ __forceinline__ void store(unsigned char* target, int row, int span) const
    {
        #pragma unroll
        for (int piece = 0; piece < PIECES; ++piece) {
            int at = piece * TILE_N + row;
            if (!ONE_GROUP) {
                reinterpret_cast<scale_t*>(target)[at] = scale[piece];
            }
            if (BIASES) {
                reinterpret_cast<bias_t*>(target + BIASES_AT)[at] = bias[piece];
            }
            if (ZEROS) {
                float value = float(zero_of(zero[piece], group_of(span, piece)));
                reinterpret_cast<unsigned short*>(target + ZEROS_AT)[at] = (unsigned short)offset_pair(value, SUBNORMAL);
            }
        }
    }
};

// What the warps do that copy scales, zero points and biases.
__device__ __forceinline__ void bring_belongings(
    unsigned char* shared, const Ring& ring, const Groups& b, int rank, int clusters, const Params& p)
{
    int first_row = int(threadIdx.x) - (PRODUCERS - BRINGERS);
    Place now(rank), later = now;
    Belonging own[AHEAD][ROWS_EACH];
    #pragma unroll
    for (int ahead = 0; ahead < AHEAD; ++ahead) {
        #pragma unroll
        for (int index = 0; index < ROWS_EACH; ++index) {
            own[ahead][index].load(b, first_row + index * BRINGERS, later, p);
        }
        later.next(rank, clusters);
    }
    Turn turn{0, 1};
    while (now.tile < p.tiles) {
        #pragma unroll
        for (int ahead = 0; ahead < AHEAD; ++ahead) {
            if (now.tile < p.tiles) {
                wait_for_phase(ring.empty(turn.stage), turn.parity);
                unsigned char* stage = shared + BELONGINGS_AT + turn.stage * BELONGING_BYTES;
                #pragma unroll
                for (int index = 0; index < ROWS_EACH; ++index) {
                    int row = first_row + index * BRINGERS;
                    if (TILE_N % BRINGERS == 0 || row < TILE_N) {
                        own[ahead][index].store(stage, row, now.span);
                    }
                    own[ahead][index].load(b, row, later, p);
                }
                __syncwarp();
                arrive_by_warp(ring.full(turn.stage));
                later.next(rank, clusters);
                now.next(rank, clusters);
                turn.next();
            }
        }
    }
}

// A lane's pair of codes of an octet: they are neighbours. Chunks of 16 bytes of a line lie permuted by exclusive or.
__device__ __forceinline__ uint load_codes(const unsigned char* line, int octet)
{
    constexpr int CHUNKS = CODE_ROW / 16, LINES = 128 / CODE_ROW; // lines that have the same permutation
    int quad = int(threadIdx.x) % 4, turned = int(threadIdx.x) % 32 / 4 / LINES % CHUNKS;
    const unsigned char* chunk = line + quad * BITS / 4 + ((octet * BITS / 16) ^ turned) * 16;
    const unsigned char* place = chunk + octet * BITS % 16;
    return BITS == 8 ? *reinterpret_cast<const unsigned short*>(place) : *place;
}

// A lane's codes of a step, a pair of each of four octets in SIDES rows, with their scales, zero points and biases, as
// loaded.
struct Codes {
    uint pair[SIDES][4];
    scale_t scale[SIDES];
    bias_t bias[SIDES];
    unsigned short zero[SIDES];

    // From where a stage's codes and belongings begin; `row` is the first of the lane's rows of the tile.
    __device__ __forceinline__ void load(const unsigned char* codes, const unsigned char* belongings, int row, int step)
    {
        #pragma unroll
        for (int side = 0; side < SIDES; ++side) {
            #pragma unroll
            for (int octet = 0; octet < 4; ++octet) {
                pair[side][octet] = load_codes(codes + (row + side * 8) * CODE_ROW, step * 4 + octet);
            }
            int at = step * 32 / PIECE * TILE_N + row + side * 8;
            if (!ONE_GROUP) {
                scale[side] = reinterpret_cast<const scale_t*>(belongings)[at];
            }
            if (BIASES) {
                bias[side] = reinterpret_cast<const bias_t*>(belongings + BIASES_AT)[at];
            }
            if (ZEROS) {
                zero[side] = reinterpret_cast<const unsigned short*>(belongings + ZEROS_AT)[at];
            }
        }
    }

    // The numbers of one of the rows; their scale comes last where a row has but one.
    __device__ __forceinline__ void make_numbers(uint (&number)[4], int side, const Codebook& codebook) const
    {
        const uint(&code)[4] = pair[side];
        uint offset = ZEROS ? zero[side] * 0x10001u : offset_pair(float(ZERO), SUBNORMAL);
#if CODEBOOK
        codebook.numbers_of(number, code[0] | code[1] << 8 | code[2] << 16 | code[3] << 24);
#else
        if (SUBNORMAL) {
            #pragma unroll
            for (int octet = 0; octet < 4; ++octet) {
                uint spread = __byte_perm(code[octet], 0, 0x4140) ^ equal_codes(ABOVE, 0);
                number[octet] = Numbers::fma(spread, factor_of_codes(0), offset);
            }
        } else if (BITS == 8) { // pairs are of bytes 0 and 2, 1 and 3
            uint first = __byte_perm(code[0], code[1], 0x5140), second = __byte_perm(code[2], code[3], 0x5140);
            bytes_as_numbers(number, first, second, offset);
        } else { // 16 + the code, whose bits are the highest of the mantissa
            constexpr int PLACE = Numbers::MANTISSA - 4;
            #pragma unroll
            for (int octet = 0; octet < 4; ++octet) {
                uint moved = code[octet] * (0x1001u << PLACE); // one instruction, beside the logical unit
                number[octet] = Numbers::sub(and_or(moved, 0x000f000fu << PLACE, Numbers::SIXTEEN), offset);
            }
        }
#endif
        #pragma unroll
        for (int octet = 0; octet < (ONE_GROUP ? 0 : 4); ++octet) {
            number[octet] = scaled_pair(number[octet], scale[side], bias[side], NUMBER_UNIT);
        }
    }
};

typedef float Sums[COLUMN_BLOCKS][4]; // of rows and vectors as the results of such products lie

// Starts the products of a step of a span. Its numbers are made while those of the step before are multiplied.
__device__ __forceinline__ void multiply_step(
    Sums& sum, uint (&number)[2][4], const Codes& codes, uint64 vectors, int step, const Codebook& codebook, int adds)
{
    uint made[SIDES][4];
    #pragma unroll
    for (int side = 0; side < SIDES; ++side) {
        codes.make_numbers(made[side], side, codebook);
    }
    #pragma unroll
    for (int part = 0; part < 2; ++part) {
        #pragma unroll
        for (int index = 0; index < 4; ++index) {
            number[part][index] = made[index % 2][part * 2 + index / 2];
        }
    }
    uint64 line = vectors + step / 2 * (PANEL_BYTES >> 4) + step % 2 * 4;
    begin_products();
    #pragma unroll
    for (int part = 0; part < 2; ++part) {
        multiply_64_rows(sum, number[part], line + part * 2, adds || part);
    }
    commit_products();
}

// What the epilogue reads for a thread's results. Where a tile has all vectors, idle warps bring what is the same all
// along a row of the result, once, beside the products; and where blocks share a tile, so that a thread has few
// results, all else is loaded ahead of the products.
struct Operands {
    static constexpr bool ROWS_EARLY = ALL_VECTORS && COLUMNS == GATHERED && sizeof(FetchedByRow) <= ROW_VALUES;
    static constexpr bool EARLY = ALL_VECTORS && COLUMNS == GATHERED && CLUSTER > 1;
    FetchedByRow of_row[ITEMS_EACH];
    FetchedByColumn of_column[ITEMS_EACH];
    FetchedByElement of_element[ITEMS_EACH];

    // The results of a warpgroup's rows of the matrix from `row` on, and of some vectors.
    __device__ __forceinline__ static Item item(int index, int vector, int row, int rank, const Params& p)
    {
        return Item(int(threadIdx.x) % 128 + index * 128, vector, row, rank, p);
    }
    __device__ __forceinline__ void fetch_rows(
        const FetchedByRow* rows, int vector, int row, int rank, EPILOGUE_PARAMETERS const Params& p)
    {
        #pragma unroll
        for (int index = 0; index < ITEMS_EACH; ++index) {
            Item own = item(index, vector, row, rank, p);
            if (own.exists) {
                of_row[index] = ROWS_EARLY ? rows[own.v] : fetch_by_row(0, own.v, own.at / PAIRS, EPILOGUE_ARGUMENTS p);
            }
        }
    }
    __device__ __forceinline__ void fetch_others(int vector, int row, int rank, EPILOGUE_PARAMETERS const Params& p)
    {
        #pragma unroll
        for (int index = 0; index < ITEMS_EACH; ++index) {
            Item own = item(index, vector, row, rank, p);
            if (own.exists) {
                of_column[index] = fetch_by_column(0, own.v, own.at / PAIRS, EPILOGUE_ARGUMENTS p);
                of_element[index] = fetch_by_element(0, own.v, own.at / PAIRS, EPILOGUE_ARGUMENTS p);
            }
        }
    }
};

constexpr int ROWS_BARRIER = 15; // where warpgroups wait for what is the same all along a row

// What the warps of the copying warpgroup but the first do at the beginning.
__device__ __forceinline__ void bring_rows(FetchedByRow* rows, EPILOGUE_PARAMETERS const Params& p)
{
    wait_for_previous_grid();
    int v = int(threadIdx.x) - (PRODUCERS - BRINGERS);
    if (v < p.vectors) {
        rows[v] = fetch_by_row(0, v, 0, EPILOGUE_ARGUMENTS p);
    }
    arrive_at(ROWS_BARRIER, BRINGERS + MULTIPLIERS);
}

// Puts the parts of a warpgroup's rows of a tile together and stores them.
__device__ __forceinline__ void finish(
    unsigned char* shared, const Sums& sum, Operands& operands, float scale, const Place& at, int rank, OUT_T* out,
    EPILOGUE_PARAMETERS const Params& p)
{
    int group = int(threadIdx.x) / 128 - 1, thread = int(threadIdx.x) % 128, first_row = at.row(p) + group * 64;
    float* parts = reinterpret_cast<float*>(shared + PARTS_AT + group * PARTS_BYTES);
    float* gathered = reinterpret_cast<float*>(shared + GATHERED_AT + group * GATHERED_BYTES);
    float* row_scale = reinterpret_cast<float*>(shared + SCALES_AT) + group * 64;
    #pragma unroll
    for (int column = 0; column < COLUMNS; column += GATHERED) {
        int vector = at.vector(p) + column;
        operands.fetch_rows(
            reinterpret_cast<const FetchedByRow*>(shared + ROWS_AT), vector, first_row, rank, EPILOGUE_ARGUMENTS p);
        if (!Operands::EARLY) {
            operands.fetch_others(vector, first_row, rank, EPILOGUE_ARGUMENTS p);
        }
        synchronize(1 + group, 128); // what was put there before has been read
        if (column == 0 && thread < 64) {
            row_scale[thread] = scale;
        }
        #pragma unroll
        for (int index = 0; index < GATHERED / 2; ++index) {
            int v = index / 4 * 8 + thread % 4 * 2 + index % 2;
            int row = thread / 32 * 16 + thread % 32 / 4 + index % 4 / 2 * 8;
            parts[v * PART_ROW + row] = sum[column / 8 + index / 4][index % 4];
        }
        synchronize(1 + group, 128);
        if (CLUSTER > 1) {
            wait_for_cluster();
            send_sums<128>(gathered, parts, rank, thread);
            arrive_at_cluster();
            wait_for_cluster();
        }
        #pragma unroll
        for (int index = 0; index < ITEMS_EACH; ++index) {
            Item item = Operands::item(index, vector, first_row, rank, p);
            if (item.exists) {
                float value[VALUES];
                item.read(value, CLUSTER > 1 ? gathered : parts, row_scale);
                Fetched fetched{operands.of_row[index], operands.of_column[index], operands.of_element[index]};
                store(value, fetched, 0, item.v, item.at / PAIRS, out, EPILOGUE_ARGUMENTS p);
            }
        }
    }
}

// What the multiplying warpgroups do. Codes of a step are loaded before the numbers of the one before are made.
__device__ __forceinline__ void multiply_and_store(
    unsigned char* shared, const Ring& ring, const scale_t* scales, const codebook_t* entries, int rank, int clusters,
    OUT_T* out, EPILOGUE_PARAMETERS const Params& p)
{
    int thread = int(threadIdx.x) - PRODUCERS, row = thread / 32 * 16 + thread % 32 / 4;
    Codebook codebook;
    codebook.load(entries);
    Place now(rank);
    wait_for_previous_grid();
    Operands operands;
    Turn turn{0, 0};
    while (now.tile < p.tiles) {
        Sums sum;
        uint number[2][2][4];
        Place at = now;
        int adds = 0;
        float scale = 1.0f / NUMBER_UNIT;
        if (ONE_GROUP && thread % 128 < 64) {
            scale *= float(scales[row_of_scales(at.row(p) + thread / 128 * 64 + thread % 128, p) * p.scale_row]);
        }
        if (Operands::EARLY) {
            operands.fetch_others(0, at.row(p) + thread / 128 * 64, rank, EPILOGUE_ARGUMENTS p);
        }
        uint freed = 0;
        #pragma unroll 1
        while (now.tile == at.tile) {
            now.next(rank, clusters);
            wait_for_phase(ring.full(turn.stage), turn.parity);
            const unsigned char* codes = shared + turn.stage * SPAN_BYTES + VECTOR_BYTES;
            const unsigned char* belongings = shared + BELONGINGS_AT + turn.stage * BELONGING_BYTES;
            uint64 vectors = matrix_descriptor(ring.vectors(turn.stage));
            Codes next;
            next.load(codes, belongings, row, 0);
            #pragma unroll
            for (int step = 0; step < STEPS; ++step) {
                Codes own = next;
                if (step + 1 < STEPS) {
                    next.load(codes, belongings, row, step + 1);
                }
                wait_for_products<1>(); // the numbers of the step before the last one have been read
                if (step == 1 && adds) {
                    arrive_by_warp(freed); // and so have all of the span before
                }
                multiply_step(sum, number[step % 2], own, vectors, step, codebook, adds || step);
            }
            adds = 1;
            freed = ring.empty(turn.stage);
            turn.next();
        }
        wait_for_products<0>();
        arrive_by_warp(freed);
        if (Operands::ROWS_EARLY && at.tile == int(blockIdx.x) / CLUSTER) {
            synchronize(ROWS_BARRIER, BRINGERS + MULTIPLIERS);
        }
        finish(shared, sum, operands, scale, at, rank, out, EPILOGUE_ARGUMENTS p);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) warpgroup_codes(
    const __grid_constant__ TensorMap matrix, const scale_t* scales, const zero_t* zeros, const bias_t* biases,
    const codebook_t* entries, const __grid_constant__ TensorMap vector, OUT_T* out, EPILOGUE_PARAMETERS const Params p)
{
    extern __shared__ __align__(1024) unsigned char shared[];
    Ring ring{shared_address(shared)};
    int role = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
    int rank = CLUSTER > 1 ? int(blockIdx.x) % CLUSTER : 0, clusters = int(gridDim.x) / CLUSTER;
    if (CLUSTER > 1) {
        announce_to_cluster();
    }
    if (threadIdx.x == 0) {
        ring.make(1 + (BELONGINGS ? BRINGERS / 32 : 0), MULTIPLIERS / 32);
        publish_barriers();
        prefetch_map(matrix);
        prefetch_map(vector);
    }
    __syncthreads();
    if (role == 0) {
        if (WIDE) {
            leave_registers<BRING_REGISTERS>();
        }
        if (Operands::ROWS_EARLY && threadIdx.x >= PRODUCERS - BRINGERS) {
            bring_rows(reinterpret_cast<FetchedByRow*>(shared + ROWS_AT), EPILOGUE_ARGUMENTS p);
        }
        if (threadIdx.x == 0) {
            bring_spans(ring, matrix, vector, rank, clusters, p);
        } else if (BELONGINGS && threadIdx.x >= PRODUCERS - BRINGERS) {
            bring_belongings(shared, ring, Groups{scales, zeros, biases}, rank, clusters, p);
        }
        __syncwarp();
        if (CLUSTER > 1) {
            wait_for_cluster();
            arrive_at_cluster();
            wait_for_cluster();
        }
    } else {
        if (WIDE) {
            allow_registers<PRODUCT_REGISTERS>();
        }
        multiply_and_store(shared, ring, scales, entries, rank, clusters, out, EPILOGUE_ARGUMENTS p);
    }
}
