// Products of 17 to 64 rows by a matrix in packed codes that is read once, on compute capability 9.0: result[v, o] = sum of
// vector[v, k] * number(o, k). Codes come to shared memory as they lie, a span of k at a time, STAGES of them on their way,
// those of the first ones before the grid ahead of this one has finished. Warpgroups make numbers of 64 rows of the matrix
// each, in the registers that tensor cores take them from, beside the products of the numbers before. So k is permuted, and
// the warpgroup that copies permutes the vectors alike. CLUSTER blocks share the spans. Grid: clusters with tiles in turns in x.
constexpr int PRODUCERS = 128, AHEAD = 2; // and the spans of the vectors that they have in registers
constexpr int MULTIPLIERS = TILE_N * 2, THREADS = PRODUCERS + MULTIPLIERS;
constexpr int SIDES = 2, ITEMS_EACH = (ITEMS + MULTIPLIERS - 1) / MULTIPLIERS; // a lane's rows, and a thread's results
constexpr int PARTS_AT = STAGES * SPAN_BYTES, GATHERED_AT = PARTS_AT + PARTS_BYTES, SCALES_AT = GATHERED_AT + GATHERED_BYTES;
constexpr int BARRIERS_AT = SCALES_AT + TILE_N * 4;
static_assert(COLUMNS * 2 <= PRODUCERS, "a thread has half of a vector's span");

// Barriers of the stages: when codes and vectors are there, and when they are no longer needed.
struct Ring {
    uint base;
    __device__ __forceinline__ uint full(int stage) const { return base + BARRIERS_AT + stage * 16; }
    __device__ __forceinline__ uint empty(int stage) const { return full(stage) + 8; }
    __device__ void make() const
    {
        for (int stage = 0; stage < STAGES; ++stage) {
            make_barrier(full(stage), PRODUCERS + PRODUCERS / 32);
            make_barrier(empty(stage), MULTIPLIERS / 32);
        }
    }
};

// A stage of the ring, and the parity of its barriers' phase.
struct Turn {
    int stage, parity;
    __device__ __forceinline__ void next()
    {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};

// A span of one of a block's tiles.
struct Place {
    int tile, span;

    __device__ __forceinline__ static int first(int rank) { return SPANS * rank / CLUSTER; }
    __device__ __forceinline__ void next(int rank, int clusters)
    {
        if (++span == first(rank + 1)) {
            span = first(rank);
            tile += clusters;
        }
    }
};

// Starts copying the codes of a span; zeros for rows and places that the matrix does not have.
__device__ __forceinline__ void copy_codes(unsigned char* stage, const uint8* codes, const Place& at, const Params& p)
{
    constexpr int LINE = CODE_ROW / 16, APART = PRODUCERS / LINE; // chunks of a row, and rows
    int chunk = int(threadIdx.x) % LINE, line = int(threadIdx.x) / LINE;
    int first = at.span * CODE_ROW + chunk * 16, row = at.tile * TILE_N + line;
    const uint8* source = codes + (long long)row * p.matrix_row + first;
    unsigned char* target = stage + VECTOR_BYTES + line * CODE_ROW + chunk * 16;
    bool inside = COMMON % SPAN == 0 || first < ROW_BYTES;
    #pragma unroll
    for (int index = 0; index < TILE_N / APART; ++index) {
        bool valid = inside && row + index * APART < p.outputs;
        copy_chunk(target + index * APART * CODE_ROW, valid ? source : codes, valid);
        source += (long long)APART * p.matrix_row;
    }
}

// A thread's half of a vector's span: every other chunk of eight, from one of the first two on.
struct VectorPart {
    Pack<uint, 4> chunk[4];

    __device__ __forceinline__ void load(const vector_t* vector, const Place& at, const Params& p)
    {
        int v = int(threadIdx.x) / 2, side = int(threadIdx.x) % 2;
        const vector_t* source = vector + (long long)v * p.vector_row + at.span * SPAN + side * 8;
        #pragma unroll
        for (int quad = 0; quad < 4; ++quad) {
            bool valid = at.tile < p.tiles && v < VECTORS;
            valid = valid && (COMMON % SPAN == 0 || at.span * SPAN + side * 8 + quad * 16 < COMMON);
            chunk[quad] = Pack<uint, 4>{};
            if (valid) {
                chunk[quad] = load_pack<4>(reinterpret_cast<const uint*>(source + quad * 16));
            }
        }
    }

    // The pairs that four lanes have at a time become neighbours.
    __device__ __forceinline__ void store(unsigned char* stage) const
    {
        int v = int(threadIdx.x) / 2, side = int(threadIdx.x) % 2;
        if (v >= COLUMNS) {
            return;
        }
        #pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
            Pack<uint, 4> line;
            #pragma unroll
            for (int quad = 0; quad < 4; ++quad) {
                line[quad] = chunk[quad][pair];
            }
            store_pack(reinterpret_cast<uint*>(stage + place_in_panel(v, side * 4 + pair)), line);
        }
    }
};

// What the copying warpgroup does. Nothing before this grid writes what the numbers are made of.
__device__ __forceinline__ void bring_operands(
    unsigned char* shared, const Ring& ring, const uint8* codes, const vector_t* vector, int rank, int clusters,
    const Params& p)
{
    Place early{int(blockIdx.x) / CLUSTER, Place::first(rank)}, now = early, later = early;
    int begun = 0;
    for (; begun < STAGES && early.tile < p.tiles; ++begun) {
        copy_codes(shared + begun * SPAN_BYTES, codes, early, p);
        arrive_with_copies(ring.full(begun));
        early.next(rank, clusters);
    }
    wait_for_previous_grid();
    VectorPart part[AHEAD];
    #pragma unroll
    for (int ahead = 0; ahead < AHEAD; ++ahead) {
        part[ahead].load(vector, later, p);
        later.next(rank, clusters);
    }
    Turn turn{0, 1}; // the first time around, everything is free
    #pragma unroll 1
    while (now.tile < p.tiles) {
        #pragma unroll
        for (int ahead = 0; ahead < AHEAD; ++ahead) {
            if (now.tile < p.tiles) {
                unsigned char* stage = shared + turn.stage * SPAN_BYTES;
                wait_for_phase(ring.empty(turn.stage), turn.parity);
                if (begun == 0) {
                    copy_codes(stage, codes, now, p);
                    arrive_with_copies(ring.full(turn.stage));
                } else {
                    begun -= 1;
                }
                part[ahead].store(stage);
                publish_to_products();
                __syncwarp();
                arrive_by_warp(ring.full(turn.stage));
                part[ahead].load(vector, later, p);
                later.next(rank, clusters);
                now.next(rank, clusters);
                turn.next();
            }
        }
    }
    wait_for_copies<0>();
}

typedef float Sums[COLUMN_BLOCKS][4]; // of rows and vectors as the results of such products lie

// Starts the products of a span. The numbers of an octet are made while those of the octet before are multiplied; the stage
// before is free once these have been.
__device__ __forceinline__ void multiply_span(
    Sums& sum, uint (&number)[2][2][4], const unsigned char* stage, uint64 vectors, int first_row,
    const Belongings<SIDES>& own, const Codebook& codebook, int adds, uint freed)
{
    #pragma unroll
    for (int octet = 0; octet < 2; ++octet) {
        wait_for_products<1>(); // the numbers of this octet of the span before have been read
        if (octet == 1 && adds) {
            arrive_by_warp(freed);
        }
        uint made[SIDES][4];
        #pragma unroll
        for (int side = 0; side < SIDES; ++side) {
            const unsigned char* codes = stage + VECTOR_BYTES + (first_row + side * 8) * CODE_ROW;
            uint word[WORDS];
            Pack<uint, WORDS / 2> found = load_pack<WORDS / 2>(
                reinterpret_cast<const uint*>(codes + int(threadIdx.x) % 4 * (WORDS * 4) + octet * (WORDS * 2)));
            #pragma unroll
            for (int index = 0; index < WORDS; ++index) {
                word[index] = found[index % (WORDS / 2)];
            }
            own.make_numbers(made[side], word, octet, side, codebook);
        }
        #pragma unroll
        for (int part = 0; part < 2; ++part) {
            #pragma unroll
            for (int index = 0; index < 4; ++index) {
                number[octet][part][index] = made[index % 2][part * 2 + index / 2];
            }
        }
        begin_products();
        #pragma unroll
        for (int part = 0; part < 2; ++part) {
            multiply_64_rows(sum, number[octet][part], vectors + (octet * 2 + part) * 2, adds || octet || part);
        }
        commit_products();
    }
}

// Puts the parts of a tile together and stores it.
__device__ __forceinline__ void finish(
    unsigned char* shared, const Sums& sum, float scale, int first_row, int tile, int rank, int thread, OUT_T* out,
    EPILOGUE_PARAMETERS const Params& p)
{
    float* parts = reinterpret_cast<float*>(shared + PARTS_AT);
    float* gathered = reinterpret_cast<float*>(shared + GATHERED_AT);
    float* row_scale = reinterpret_cast<float*>(shared + SCALES_AT);
    Fetched fetched[ITEMS_EACH];
    #pragma unroll
    for (int index = 0; index < ITEMS_EACH; ++index) {
        Item item(thread + index * MULTIPLIERS, tile, rank, p);
        if (item.exists) {
            fetched[index] = fetch(0, item.v, item.at / PAIRS, EPILOGUE_ARGUMENTS p);
        }
    }
    synchronize(1, MULTIPLIERS); // the tile before has been read
    if (thread < TILE_N) {
        row_scale[thread] = scale;
    }
    #pragma unroll
    for (int index = 0; index < COLUMN_BLOCKS * 4; ++index) {
        int v = index / 4 * 8 + thread % 4 * 2 + index % 2;
        parts[v * PART_ROW + first_row + index % 4 / 2 * 8] = sum[index / 4][index % 4];
    }
    synchronize(1, MULTIPLIERS);
    if (CLUSTER > 1) {
        wait_for_cluster();
        send_sums<MULTIPLIERS>(gathered, parts, rank, thread);
        arrive_at_cluster();
        wait_for_cluster();
    }
    #pragma unroll
    for (int index = 0; index < ITEMS_EACH; ++index) {
        Item item(thread + index * MULTIPLIERS, tile, rank, p);
        if (item.exists) {
            float value[VALUES];
            item.read(value, CLUSTER > 1 ? gathered : parts, row_scale);
            store(value, fetched[index], 0, item.v, item.at / PAIRS, out, EPILOGUE_ARGUMENTS p);
        }
    }
}

// What the multiplying warpgroups do.
__device__ __forceinline__ void multiply_and_store(
    unsigned char* shared, const Ring& ring, const Matrix& b, const codebook_t* entries, int rank, int clusters, OUT_T* out,
    EPILOGUE_PARAMETERS const Params& p)
{
    int thread = int(threadIdx.x) - PRODUCERS, first_row = thread / 32 * 16 + thread % 32 / 4;
    Codebook codebook;
    codebook.load(entries);
    Place now{int(blockIdx.x) / CLUSTER, Place::first(rank)};
    Belongings<SIDES> next;
    next.load(b, now.tile * TILE_N + first_row, now.span, p);
    wait_for_previous_grid();
    Turn turn{0, 0};
    uint64 vectors = matrix_descriptor(ring.base);
    while (now.tile < p.tiles) {
        Sums sum;
        uint number[2][2][4];
        int tile = now.tile, adds = 0;
        float scale = 1.0f;
        if (ONE_GROUP && thread < TILE_N) {
            scale = float(b.scales[row_of_scales(tile * TILE_N + thread, p) * p.scale_row]);
        }
        uint freed = 0;
        #pragma unroll 1
        while (now.tile == tile) {
            Belongings<SIDES> own = next;
            now.next(rank, clusters);
            if (now.tile < p.tiles) {
                next.load(b, now.tile * TILE_N + first_row, now.span, p);
            }
            wait_for_phase(ring.full(turn.stage), turn.parity);
            multiply_span(
                sum, number, shared + turn.stage * SPAN_BYTES, vectors + turn.stage * (SPAN_BYTES >> 4), first_row, own,
                codebook, adds, freed);
            adds = 1;
            freed = ring.empty(turn.stage);
            turn.next();
        }
        wait_for_products<0>();
        arrive_by_warp(freed);
        finish(shared, sum, scale, first_row, tile, rank, thread, out, EPILOGUE_ARGUMENTS p);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) warpgroup_codes(
    const uint8* matrix, const scale_t* scales, const zero_t* zeros, const bias_t* biases, const codebook_t* entries,
    const vector_t* vector, OUT_T* out, EPILOGUE_PARAMETERS const Params p)
{
    extern __shared__ __align__(1024) unsigned char shared[];
    Ring ring{shared_address(shared)};
    int role = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
    int rank = CLUSTER > 1 ? int(blockIdx.x) % CLUSTER : 0, clusters = int(gridDim.x) / CLUSTER;
    if (CLUSTER > 1) {
        announce_to_cluster();
    }
    if (threadIdx.x == 0) {
        ring.make();
    }
    __syncthreads();
    if (role == 0) {
        bring_operands(shared, ring, matrix, vector, rank, clusters, p);
        if (CLUSTER > 1) {
            wait_for_cluster();
            arrive_at_cluster();
            wait_for_cluster();
        }
    } else {
        multiply_and_store(
            shared, ring, Matrix{matrix, scales, zeros, biases}, entries, rank, clusters, out, EPILOGUE_ARGUMENTS p);
    }
}
