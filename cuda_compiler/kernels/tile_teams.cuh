// Tiles multiplied by warpgroups, with `wgmma` of compute capability 9.0, while a warpgroup of their own copies: it
// runs ahead through a ring of STAGES stages, into the next tile of results while this one is stored. Blocks stay;
// their TEAMS of WARPS_M / 4 warpgroups take tiles of results in turns, so that one stores while another multiplies.
static_assert(TILE_K == 64 && A_ALONG_K && B_ALONG_K, "lines of 128 bytes, swizzled as the tensor cores expect");
static_assert(A_BYTES % 1024 == 0 && B_BYTES % 1024 == 0, "the pattern repeats every eight lines");
constexpr int BARRIERS_AT = STAGES * STAGE_BYTES;
#define KERNEL_ATTRIBUTES

// The operands in shared memory, and where a thread is among them.
struct Ring : Turn {
    unsigned char* stages;

    __device__ explicit Ring(unsigned char* shared) : stages(shared) {}
    __device__ StageBarriers<BARRIERS_AT> barriers() const { return {shared_address(stages)}; }
    __device__ unsigned char* operands() const { return stages + stage * STAGE_BYTES; }
};

// What the copying warpgroup does. `copier.begin(tile)` goes to a tile of results, of which it then copies `steps`
// tiles along the common dimension; its `copy_a(stage)` and `copy_b(stage)` start copying the next one. With B_CONSTANT
// nothing before this grid writes what the latter reads.
template <typename Copier>
__device__ __forceinline__ void copy_tiles(Copier& copier, Ring ring, int steps)
{
    int early = min(STAGES, steps), tile = int(blockIdx.x);
    copier.begin(tile);
    if (!B_CONSTANT) {
        wait_for_previous_grid();
    }
    for (int stage = 0; stage < early; ++stage) {
        copier.copy_b(ring.stages + stage * STAGE_BYTES + A_BYTES);
    }
    if (B_CONSTANT) {
        wait_for_previous_grid();
    }
    while (true) {
        for (int step = 0; step < steps; ++step) {
            // The parity before: the first time around, every stage is empty.
            wait_for_phase(ring.barriers().empty(ring.stage), ring.parity ^ 1);
            copier.copy_a(ring.operands());
            if (early > 0) {
                --early;
            } else {
                copier.copy_b(ring.operands() + A_BYTES);
            }
            arrive_with_copies(ring.barriers().full(ring.stage));
            ring.next();
        }
        tile += int(gridDim.x);
        if (tile >= RESULT_TILES) {
            break;
        }
        copier.begin(tile);
    }
    wait_for_copies<0>();
}

// Starts all products of a tile of results and waits for all but the last ones, whose stage it gives.
__device__ __forceinline__ int start_products(Accumulator& sum, Ring& ring, int group, int steps)
{
    uint64 a = matrix_descriptor(shared_address(ring.stages) + group * GROUP_ROWS * 128);
    uint64 b = matrix_descriptor(shared_address(ring.stages) + A_BYTES);
    int last = 0;
    for (int step = 0; step < steps; ++step) {
        wait_for_phase(ring.barriers().full(ring.stage), ring.parity);
        publish_to_products();
        begin_products();
        uint64 stage = ring.stage * (STAGE_BYTES >> 4);
        #pragma unroll
        for (int k = 0; k < TILE_K / 16; ++k) {
            #pragma unroll
            for (int m = 0; m < STEPS_M; ++m) {
                multiply_64_rows(
                    sum.at[m], a + stage + m * (64 * 128 >> 4) + k * 2, b + stage + k * 2, k > 0 || step > 0);
            }
        }
        commit_products();
        wait_for_products<1>();
        if (step > 0) {
            arrive_by_warp(ring.barriers().empty(last));
        }
        last = ring.stage;
        ring.next();
    }
    return last;
}

// What a warpgroup of a team does.
__device__ __forceinline__ void multiply_tiles(
    Ring ring, int warpgroup, int steps, int rows, int columns, OUT_T* out, EPILOGUE_PARAMETERS const Params& p)
{
    int team = warpgroup / GROUPS, group = warpgroup % GROUPS;
    wait_for_previous_grid();
    ring.skip(team * steps);
    for (int tile = int(blockIdx.x) + team * int(gridDim.x); tile < RESULT_TILES; tile += TEAMS * int(gridDim.x)) {
        TileResults<StoredResults, TILE_N> results(
            StoredResults(), part_of(tile, p), group, rows, columns, EPILOGUE_ARGUMENTS p);
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
        arrive_by_warp(ring.barriers().empty(last));
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
        ring.barriers().make(COPY_THREADS, WARPS);
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
