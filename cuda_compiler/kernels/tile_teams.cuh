// Tiles multiplied by warpgroups, with `wgmma` of compute capability 9.0, while a warpgroup of their own copies: it
// runs ahead through a ring of STAGES slots, into the next tile of results while this one is stored. Blocks stay; their
// TEAMS of WARPS_M / 4 warpgroups take tiles of results in turns, so that one stores while another multiplies.
static_assert(TILE_K == 64 && A_ALONG_K && B_ALONG_K, "lines of 128 bytes, swizzled as the tensor cores expect");
static_assert(A_BYTES % 1024 == 0 && B_BYTES % 1024 == 0, "the pattern repeats every eight lines");
constexpr int BARRIERS_AT = STAGES * STAGE_BYTES;
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
// `copier.copy_b(slot)` start copying the next of its `steps` tiles along the common dimension; with B_CONSTANT nothing
// before this grid writes what the latter read.
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

// Starts all products of a tile of results and waits for all but the last ones, whose slot it gives.
__device__ __forceinline__ int start_products(Accumulator& sum, Ring& ring, int group, int steps)
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
    return last;
}

// The generated functions of a kernel with one epilogue.
struct OwnEpilogue {
    static constexpr bool OWN_ROWS = false; // for which lanes leave each other nothing
    using FetchedByRow = ::FetchedByRow;
    using FetchedByColumn = ::FetchedByColumn;
    using FetchedByElement = ::FetchedByElement;
    using Fetched = ::Fetched;

    template <typename... Given>
    __device__ __forceinline__ static FetchedByRow fetch_by_row(const Given&... given)
    {
        return ::fetch_by_row(given...);
    }
    template <typename... Given>
    __device__ __forceinline__ static FetchedByColumn fetch_by_column(const Given&... given)
    {
        return ::fetch_by_column(given...);
    }
    template <typename... Given>
    __device__ __forceinline__ static FetchedByElement fetch_by_element(const Given&... given)
    {
        return ::fetch_by_element(given...);
    }
    template <typename... Given>
    __device__ __forceinline__ static void ask_by_element(const Given&... given)
    {
        ::ask_by_element(given...);
    }
    template <typename... Given>
    __device__ __forceinline__ static void store(const Given&... given)
    {
        ::store(given...);
    }
    __device__ __forceinline__ static void stored(int, int) {}
};

// What a warpgroup of a team does.
__device__ __forceinline__ void multiply_tiles(
    Ring ring, int warpgroup, int steps, int rows, int columns, OUT_T* out, EPILOGUE_PARAMETERS const Params& p)
{
    int team = warpgroup / GROUPS, group = warpgroup % GROUPS;
    wait_for_previous_grid();
    ring.skip(team * steps);
    for (int tile = int(blockIdx.x) + team * int(gridDim.x); tile < RESULT_TILES; tile += TEAMS * int(gridDim.x)) {
        TileResults<OwnEpilogue, TILE_N> results(
            OwnEpilogue(), part_of(tile, p), group, rows, columns, EPILOGUE_ARGUMENTS p);
        int next = tile + TEAMS * int(gridDim.x);
        // Registers hold what this tile's epilogue reads: more must be on its way to fill the bus.
        if (next < RESULT_TILES) {
            results.ask(part_of(next, p), group, rows, columns, EPILOGUE_ARGUMENTS p);
        }
        Accumulator sum;
        if (TEAMS > 1 && tile != int(blockIdx.x)) {
            synchronize(1 + team, 2 * TEAM_THREADS); // the team ahead has found all of its operands there
        }
        int last = start_products(sum, ring, group, steps);
        if (TEAMS > 1 && tile + int(gridDim.x) < RESULT_TILES) {
            arrive_at(1 + (team + 1) % TEAMS, 2 * TEAM_THREADS);
        }
        wait_for_products<0>();
        arrive_by_warp(ring.free(last));
        ring.skip((TEAMS - 1) * steps);
        make_numbers(sum);
        results.store_all(sum.at, out, EPILOGUE_ARGUMENTS p);
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
        leave_registers<COPY_REGISTERS>();
        copy_tiles(copier, ring, steps);
    } else {
        allow_registers<PRODUCT_REGISTERS>();
        multiply_tiles(ring, role, steps, rows, columns, out, EPILOGUE_ARGUMENTS p);
    }
}
