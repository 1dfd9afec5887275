// Tiles multiplied by warpgroups, with `wgmma` of compute capability 9.0, while a warpgroup of their own copies: it runs ahead
// through a ring of STAGES slots, into the next tile of results while this one is stored. Blocks stay; their TEAMS of
// WARPS_M / 4 warpgroups take tiles of results in turns, so that one stores while another multiplies. Columns are dealt out so
// that each thread has eight neighbours of a row in its registers, and stores them from there.
static_assert(TILE_K == 64 && A_ALONG_K && B_ALONG_K, "lines of 128 bytes, swizzled as the tensor cores expect");
static_assert(A_BYTES % 1024 == 0 && B_BYTES % 1024 == 0, "the pattern repeats every eight lines");
static_assert(WARPS_N == 1 && TILE_N % 32 == 0 && SPLITS == 1, "a warpgroup has whole rows of a tile of its own");
constexpr int GROUP_ROWS = WARP_M * 4, GROUPS = TEAM_THREADS / 128;
constexpr int BARRIERS_AT = STAGES * STAGE_BYTES;
constexpr int COPY_REGISTERS = TEAMS * GROUPS == 2 && TILE_M > 128 ? 96 : 56; // by rows whose pixels it keeps
constexpr int PRODUCT_REGISTERS = TEAMS * GROUPS == 2 ? (504 - COPY_REGISTERS) / 16 * 8 : 152;
constexpr int FETCH_BYTES = (PRODUCT_REGISTERS - STEPS_M * STEPS_N * 4 - (EXCHANGE ? 52 : 32)) * 4; // of a thread, for operands of the epilogue
#define KERNEL_ATTRIBUTES

// Barriers of the slots: when a tile of both operands is there, and when it is no longer needed.
struct Ring {
    unsigned char* base;
    int stage = 0, parity = 0;

    __device__ explicit Ring(unsigned char* shared) : base(shared) {}
    __device__ unsigned char* slot() const { return base + stage * STAGE_BYTES; }
    __device__ uint there(int of) const { return shared_address(base) + BARRIERS_AT + of * 16; }
    __device__ uint free(int of) const { return there(of) + 8; }
    __device__ void make() const
    {
        for (int i = 0; i < STAGES; ++i) {
            make_barrier(there(i), COPY_THREADS);
            make_barrier(free(i), WARPS);
        }
    }
    __device__ void advance()
    {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
    __device__ void skip(int steps)
    {
        stage += steps;
        parity ^= stage / STAGES & 1;
        stage %= STAGES;
    }
};

// What the copying warpgroup does. `copier.begin(tile)` goes to a tile of results, `copier.copy_a(slot)` and
// `copier.copy_b(slot)` start copying the next of its `steps` tiles along the common dimension; with B_CONSTANT nothing before
// this grid writes what the latter read.
template <typename Copier>
__device__ __forceinline__ void copy_tiles(Copier& copier, Ring ring, int steps)
{
    int early = min(STAGES, steps), tile = int(blockIdx.x);
    copier.begin(tile);
    if (!B_CONSTANT) {
        wait_for_previous_grid();
    }
    for (int stage = 0; stage < early; ++stage) {
        copier.copy_b(ring.base + stage * STAGE_BYTES + A_BYTES);
    }
    if (B_CONSTANT) {
        wait_for_previous_grid();
    }
    while (true) {
        for (int step = 0; step < steps; ++step) {
            wait_for_phase(ring.free(ring.stage), ring.parity ^ 1); // the first time around, everything is free
            copier.copy_a(ring.slot());
            if (early > 0) {
                --early;
            } else {
                copier.copy_b(ring.slot() + A_BYTES);
            }
            arrive_with_copies(ring.there(ring.stage));
            ring.advance();
        }
        tile += int(gridDim.x);
        if (tile >= RESULT_TILES) {
            break;
        }
        copier.begin(tile);
    }
    wait_for_copies<0>();
}

// A tile of results as a thread sees it: packs of eight neighbours of a row. Of 32 columns each four lanes have a row; where
// there are 64, they leave half of it to the four lanes that have the next row and take half of that, so that eight lanes
// store 128 bytes. The first result of a row counts as `base` for the epilogue, whose operands are fetched ahead, the first
// ones before the tile is multiplied.
struct Results {
    static constexpr bool SHARED_ROWS = EXCHANGE && TILE_N % 64 == 0;
    static constexpr int TAKEN = STORE_SIZE * PAIRS, EACH = 8 / TAKEN, PACKS_EACH = TILE_N / 32; // of a step's 8 rows
    static constexpr int COUNT = STEPS_M * 2 * PACKS_EACH * EACH;
    static constexpr int FITTING = FETCH_BYTES / int(sizeof(FetchedByElement)), DEPTH = FITTING < COUNT ? FITTING : COUNT;
    const int batch, rows, columns, base;
    const bool lower; // of the two rows that eight lanes share
    int row, col;
    FetchedByColumn of_column[2];
    FetchedByElement of_element[DEPTH];

    __device__ __forceinline__ Results(Part part, int group, int rows, int columns, EPILOGUE_PARAMETERS const Params& p)
        : batch(part.batch), rows(rows), columns(columns / PAIRS), base(part.base), lower(threadIdx.x / 4 % 2)
    {
        int thread = int(threadIdx.x) % 128;
        row = part.row + group * GROUP_ROWS + thread / 32 * 16 + thread % 32 / 4 - (SHARED_ROWS && lower ? 1 : 0);
        col = (part.col + thread % 4 * 8 + (SHARED_ROWS && lower ? 32 : 0)) / PAIRS;
        fetch_column(0, EPILOGUE_ARGUMENTS p);
        #pragma unroll
        for (int number = 0; number < DEPTH; ++number) {
            fetch_element(number, EPILOGUE_ARGUMENTS p);
        }
    }

    __device__ __forceinline__ int row_of(int number) const
    {
        int pack = number / EACH, rest = SHARED_ROWS ? pack % 2 : 0;
        return row + pack / PACKS_EACH / 2 * 64 + pack / PACKS_EACH % 2 * 8 + rest;
    }
    __device__ __forceinline__ int col_of(int number) const
    {
        int pack = number / EACH % PACKS_EACH, first = SHARED_ROWS ? pack / 2 * 64 : pack * 32;
        return col + (first + number % EACH * TAKEN) / PAIRS;
    }
    __device__ __forceinline__ bool is_inside(int number) const
    {
        return row_of(number) < rows && col_of(number) < columns;
    }

    __device__ __forceinline__ void fetch_column(int number, EPILOGUE_PARAMETERS const Params& p)
    {
        if (col_of(number) < columns) {
            of_column[number % 2] = fetch_by_column(batch, 0, base + col_of(number), EPILOGUE_ARGUMENTS p);
        }
    }
    __device__ __forceinline__ void fetch_element(int number, EPILOGUE_PARAMETERS const Params& p)
    {
        if (is_inside(number)) {
            int c = base + col_of(number);
            of_element[number % DEPTH] = fetch_by_element(batch, row_of(number), c, EPILOGUE_ARGUMENTS p);
        }
    }

    // The results of a pack and, where rows are shared, of the next one.
    __device__ __forceinline__ void take(float (&value)[2][8], const Accumulator& sum, int pack) const
    {
        const int step = pack / PACKS_EACH / 2, upper = pack / PACKS_EACH % 2 * 2, block = pack % PACKS_EACH * 4;
        #pragma unroll
        for (int i = 0; i < 8; ++i) {
            value[0][i] = sum.at[step][block + i / 2][upper + i % 2];
            if (SHARED_ROWS) {
                value[1][i] = sum.at[step][block + 4 + i / 2][upper + i % 2];
                float other = __shfl_xor_sync(0xffffffffu, lower ? value[0][i] : value[1][i], 4);
                (lower ? value[0][i] : value[1][i]) = other;
            }
        }
    }

    __device__ __forceinline__ void store_all(const Accumulator& sum, OUT_T* out, EPILOGUE_PARAMETERS const Params& p)
    {
        float value[2][8];
        #pragma unroll
        for (int number = 0; number < COUNT; ++number) {
            const int pack = number / EACH, held = SHARED_ROWS ? pack % 2 : 0;
            if (number % EACH == 0 && held == 0) {
                take(value, sum, pack);
            }
            if (number + 1 < COUNT) {
                fetch_column(number + 1, EPILOGUE_ARGUMENTS p);
            }
            if (is_inside(number)) {
                float part[TAKEN];
                #pragma unroll
                for (int i = 0; i < TAKEN; ++i) {
                    part[i] = value[held][number % EACH * TAKEN + i];
                }
                Fetched fetched{of_column[number % 2], of_element[number % DEPTH]};
                store(part, fetched, batch, row_of(number), base + col_of(number), out, EPILOGUE_ARGUMENTS p);
            }
            if (number + DEPTH < COUNT) {
                fetch_element(number + DEPTH, EPILOGUE_ARGUMENTS p);
            }
        }
    }
};

// Multiplies the tiles along the common dimension of one tile of results.
__device__ __forceinline__ void multiply_tile(Accumulator& sum, Ring& ring, int group, int steps)
{
    uint64 a = matrix_descriptor(shared_address(ring.base) + group * GROUP_ROWS * 128);
    uint64 b = matrix_descriptor(shared_address(ring.base) + A_BYTES);
    int last = 0;
    for (int step = 0; step < steps; ++step) {
        wait_for_phase(ring.there(ring.stage), ring.parity);
        publish_to_products();
        begin_products();
        uint64 slot = ring.stage * (STAGE_BYTES >> 4);
        #pragma unroll
        for (int k = 0; k < TILE_K / 16; ++k) {
            #pragma unroll
            for (int m = 0; m < STEPS_M; ++m) {
                multiply_64_rows(
                    sum.at[m], a + slot + m * (64 * 128 >> 4) + k * 2, b + slot + k * 2, k > 0 || step > 0);
            }
        }
        commit_products();
        wait_for_products<1>();
        if (step > 0) {
            arrive_by_warp(ring.free(last));
        }
        last = ring.stage;
        ring.advance();
    }
    wait_for_products<0>();
    arrive_by_warp(ring.free(last));
}

// What a warpgroup of a team does.
__device__ __forceinline__ void multiply_tiles(
    Ring ring, int warpgroup, int steps, int rows, int columns, OUT_T* out, EPILOGUE_PARAMETERS const Params& p)
{
    int team = warpgroup / GROUPS, group = warpgroup % GROUPS;
    wait_for_previous_grid();
    ring.skip(team * steps);
    for (int tile = int(blockIdx.x) + team * int(gridDim.x); tile < RESULT_TILES; tile += TEAMS * int(gridDim.x)) {
        Results results(part_of(tile, p), group, rows, columns, EPILOGUE_ARGUMENTS p);
        Accumulator sum;
        if (TEAMS > 1 && tile != int(blockIdx.x)) {
            synchronize(1 + team, 2 * TEAM_THREADS); // the team ahead has found all of its tiles there
        }
        multiply_tile(sum, ring, group, steps);
        if (TEAMS > 1 && tile + int(gridDim.x) < RESULT_TILES) {
            arrive_at(1 + (team + 1) % TEAMS, 2 * TEAM_THREADS);
        }
        ring.skip((TEAMS - 1) * steps);
        results.store_all(sum, out, EPILOGUE_ARGUMENTS p);
    }
}

template <typename Copier>
__device__ __forceinline__ void compute_tiles(
    Copier& copier, int steps, unsigned char* shared, float*, int rows, int columns, OUT_T* out,
    EPILOGUE_PARAMETERS const Params& p)
{
    Ring ring(shared);
    if (threadIdx.x == 0) {
        ring.make();
    }
    __syncthreads();
    int role = __shfl_sync(0xffffffffu, int(threadIdx.x) / 128, 0);
    if (role == TEAMS * GROUPS) {
        if (TEAMS * GROUPS > 1) {
            leave_registers<COPY_REGISTERS>();
        }
        copy_tiles(copier, ring, steps);
    } else {
        if (TEAMS * GROUPS > 1) {
            allow_registers<PRODUCT_REGISTERS>();
        }
        multiply_tiles(ring, role, steps, rows, columns, out, EPILOGUE_ARGUMENTS p);
    }
}
