// Matrix products on compute capability 9.0: a[m, k] by b[k, n], lines of both along k. One warp asks the copy engine for
// tiles, two warpgroups multiply what is there. With TURNS each of them has a tile of its own, and one stores while the other
// multiplies; else they share the rows of one. Blocks stay and walk over the tiles. SPLITS parts of k have a block each,
// which form a cluster; such blocks compute one tile.
//
// Lines of b come in groups of 32, ordered by its map so that a thread's results, two of every eight columns for the tensor
// cores, are eight neighbours of a row.
constexpr int THREADS = 384, GROUP_ROWS = TURNS ? TILE_M : TILE_M / 2, STEPS_M = GROUP_ROWS / 64, GROUPS = TILE_N / 32;
constexpr int A_BYTES = TILE_M * 128, B_BYTES = TILE_N * 128, STAGE_BYTES = A_BYTES + B_BYTES;
constexpr int TAKEN = STORE_SIZE * PAIRS, PACKS = 8 / TAKEN;
static_assert(TILE_N % 32 == 0 && GROUP_ROWS % 64 == 0, "whole groups of lines");
static_assert(SPLITS == 1 || !TURNS, "blocks of a cluster add one tile");
// Where a thread has few results, registers are left to blocks of the kernel ahead, beside which this one can then begin.
constexpr bool LEAN = STEPS_M * TILE_N <= 160;
constexpr int MOST_THREADS = LEAN ? 512 : THREADS, COPY_REGISTERS = LEAN ? 56 : 24, PRODUCT_REGISTERS = LEAN ? 160 : 240;

// Barriers of the operands in shared memory: when they are there, and when they are no longer needed.
struct Ring {
    uint base;
    __device__ __forceinline__ uint a(int stage) const { return base + stage * STAGE_BYTES; }
    __device__ __forceinline__ uint b(int stage) const { return a(stage) + A_BYTES; }
    __device__ __forceinline__ uint full(int stage) const { return base + STAGES * STAGE_BYTES + stage * 16; }
    __device__ __forceinline__ uint empty(int stage) const { return full(stage) + 8; }
    __device__ void make() const
    {
        for (int stage = 0; stage < STAGES; ++stage) {
            make_barrier(full(stage), 1);
            make_barrier(empty(stage), TURNS ? 4 : 8); // warps
        }
    }
};

// A stage of the ring, and the parity of its barriers' phase.
struct Turn {
    int stage = 0, parity = 0;
    __device__ __forceinline__ void next()
    {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
    __device__ __forceinline__ void skip(int count)
    {
        int turns = stage + count;
        stage = turns % STAGES;
        parity ^= turns / STAGES & 1;
    }
};

// A block's share of the work: a tile, and the steps along k. Tiles are in panels of PANEL rows of them, inside of which rows
// come first: blocks then share what they read of both operands.
struct Work {
    int row, col, first, count;

    __device__ __forceinline__ Work(int tile, const Params& p)
    {
        int panel = tile / (PANEL * p.tiles_n), inside = tile % (PANEL * p.tiles_n);
        int height = min(p.tiles_m - panel * PANEL, PANEL);
        row = (panel * PANEL + inside % height) * TILE_M;
        col = inside / height * TILE_N;
        int steps = (p.k + 63) / 64, split = int(blockIdx.y);
        first = steps * split / SPLITS;
        count = steps * (split + 1) / SPLITS - first;
    }
};

__device__ __forceinline__ void copy_a(const Ring& ring, int stage, const TensorMap& map, const Work& work, int step)
{
    copy_lines(ring.a(stage), map, ring.full(stage), (work.first + step) * 64, work.row);
}

__device__ __forceinline__ void copy_b(const Ring& ring, int stage, const TensorMap& map, const Work& work, int step)
{
    copy_groups(ring.b(stage), map, ring.full(stage), (work.first + step) * 64, work.col / 32);
}

// What the copying thread does. With B_CONSTANT nothing before this grid writes what b holds.
__device__ __forceinline__ void copy_operands(
    const Ring& ring, const TensorMap& a, const TensorMap& b, const Params& p)
{
    int tile = int(blockIdx.x), ahead = 0;
    if (B_CONSTANT) {
        Work work(tile, p);
        ahead = min(work.count, STAGES);
        for (int step = 0; step < ahead; ++step) {
            arrive_and_expect(ring.full(step), STAGE_BYTES);
            copy_b(ring, step, b, work, step);
        }
    }
    wait_for_previous_grid();
    Turn turn;
    turn.parity = 1; // the first time around, everything is free
    for (; tile < p.tiles_m * p.tiles_n; tile += int(gridDim.x)) {
        Work work(tile, p);
        for (int step = 0; step < work.count; ++step) {
            if (ahead == 0) {
                wait_for_phase(ring.empty(turn.stage), turn.parity);
                arrive_and_expect(ring.full(turn.stage), STAGE_BYTES);
                copy_b(ring, turn.stage, b, work, step);
            } else {
                --ahead;
            }
            copy_a(ring, turn.stage, a, work, step);
            turn.next();
        }
    }
}

// A warpgroup's results: blocks of 16 x 8 a warp.
struct Sums {
    float at[STEPS_M][TILE_N / 8][4];
};

// Lets the other warpgroup begin with its tile. Until then it must not look at the ring: its barriers tell phases only from
// those right before and after them.
__device__ __forceinline__ void pass_turn(int group) { arrive_at(2 - group, 256); }
__device__ __forceinline__ void wait_for_turn(int group) { synchronize(1 + group, 256); }

// Multiplies the steps of one share of the work.
__device__ __forceinline__ void multiply_steps(
    Sums& sums, const Ring& ring, Turn& turn, int group, int first_row, int count)
{
    if (TURNS) {
        wait_for_turn(group);
    }
    uint64 a = matrix_descriptor(ring.a(0) + first_row * 128), b = matrix_descriptor(ring.b(0));
    int before = 0;
    for (int step = 0; step < count; ++step) {
        wait_for_phase(ring.full(turn.stage), turn.parity);
        uint64 at = uint64(turn.stage * (STAGE_BYTES >> 4));
        begin_products();
        #pragma unroll
        for (int k = 0; k < 4; ++k) {
            #pragma unroll
            for (int m = 0; m < STEPS_M; ++m) {
                multiply_64_rows(sums.at[m], a + at + m * (64 * 128 >> 4) + k * 2, b + at + k * 2, step + k > 0);
            }
        }
        commit_products();
        if (TURNS && step + 1 == count) {
            pass_turn(group);
        }
        wait_for_products<1>();
        if (step > 0) {
            arrive_by_warp(ring.empty(before));
        }
        before = turn.stage;
        turn.next();
    }
    wait_for_products<0>();
    arrive_by_warp(ring.empty(before));
}

// What the epilogue reads for a thread's results of one group: eight neighbours in each of two rows.
struct GroupOperands {
    Fetched at[2][PACKS];
};

__device__ __forceinline__ void fetch_group(GroupOperands& found, int row, int col, EPILOGUE_PARAMETERS const Params& p)
{
    #pragma unroll
    for (int half_group = 0; half_group < 2; ++half_group) {
        int r = row + half_group * 8;
        #pragma unroll
        for (int pack = 0; pack < PACKS; ++pack) {
            if (r < p.m && col < p.n) {
                found.at[half_group][pack] = fetch(0, r, col / PAIRS + pack * STORE_SIZE, EPILOGUE_ARGUMENTS p);
            }
        }
    }
}

__device__ __forceinline__ void store_group(
    const float (&sum)[4][4], const GroupOperands& found, int row, int col, OUT_T* out, EPILOGUE_PARAMETERS const Params& p)
{
    #pragma unroll
    for (int half_group = 0; half_group < 2; ++half_group) {
        int r = row + half_group * 8;
        #pragma unroll
        for (int pack = 0; pack < PACKS; ++pack) {
            float value[TAKEN];
            #pragma unroll
            for (int i = 0; i < TAKEN; ++i) {
                int at = pack * TAKEN + i;
                value[i] = sum[at / 2][half_group * 2 + at % 2];
            }
            if (r < p.m && col < p.n) {
                store(value, found.at[half_group][pack], 0, r, col / PAIRS + pack * STORE_SIZE, out, EPILOGUE_ARGUMENTS p);
            }
        }
    }
}

// The four blocks of a group, of all that a thread has.
__device__ __forceinline__ void take_group(float (&taken)[4][4], const Sums& sums, int group)
{
    #pragma unroll
    for (int i = 0; i < 16; ++i) {
        taken[i / 4][i % 4] = sums.at[group / GROUPS][group % GROUPS * 4 + i / 4][i % 4];
    }
}

#if SPLITS == 1
#define KERNEL_ATTRIBUTES

// Stores what a warp, by its number among those that multiply, has.
__device__ __forceinline__ void finish(
    const Sums& sums, const Ring& ring, const Work& work, int warp, OUT_T* out, EPILOGUE_PARAMETERS const Params& p)
{
    int lane = int(threadIdx.x % 32), col = work.col + lane % 4 * 8;
    int row = work.row + (TURNS ? 0 : warp / 4 * GROUP_ROWS) + warp % 4 * 16 + lane / 4;
    constexpr int AHEAD = TURNS ? 0 : 1; // of two warpgroups that take turns, the other hides the latency
    GroupOperands found[AHEAD + 1];
    if (AHEAD) {
        fetch_group(found[0], row, col, EPILOGUE_ARGUMENTS p);
    }
    #pragma unroll
    for (int group = 0; group < STEPS_M * GROUPS; ++group) {
        int next = group + AHEAD;
        if (next < STEPS_M * GROUPS) {
            int r = row + next / GROUPS * 64, c = col + next % GROUPS * 32;
            fetch_group(found[next % (AHEAD + 1)], r, c, EPILOGUE_ARGUMENTS p);
        }
        float own[4][4];
        take_group(own, sums, group);
        store_group(own, found[group % (AHEAD + 1)], row + group / GROUPS * 64, col + group % GROUPS * 32, out,
                    EPILOGUE_ARGUMENTS p);
    }
}
#else
#define KERNEL_ATTRIBUTES __cluster_dims__(1, SPLITS, 1)

// Adds the parts that the blocks of a cluster have, always in the same order: each adds and stores some of the groups, of
// all warps. All threads of the cluster come to two barriers here.
__device__ __forceinline__ void finish(
    const Sums& sums, const Ring& ring, const Work& work, int warp, OUT_T* out, EPILOGUE_PARAMETERS const Params& p)
{
    constexpr int OWN = STEPS_M * GROUPS, ALL = 8 * OWN;
    static_assert(ALL * 16 * 128 <= STAGES * STAGE_BYTES, "results are staged where the operands were");
    int lane = int(threadIdx.x % 32), split = int(blockIdx.y);
    synchronize(1, 256); // both warpgroups have multiplied what was there
    #pragma unroll
    for (int i = 0; i < OWN * 4; ++i) {
        const float (&own)[4] = sums.at[i / 4 / GROUPS][i / 4 % GROUPS * 4 + i % 4];
        store_shared(ring.base + ((warp * OWN * 4 + i) * 32 + lane) * 16, own);
    }
    wait_for_cluster();
    #pragma unroll 2
    for (int group = split + SPLITS * warp; group < ALL; group += SPLITS * 8) {
        int owner = group / OWN, inside = group % OWN;
        int row = work.row + owner / 4 * GROUP_ROWS + inside / GROUPS * 64 + owner % 4 * 16 + lane / 4;
        int col = work.col + inside % GROUPS * 32 + lane % 4 * 8;
        GroupOperands found;
        fetch_group(found, row, col, EPILOGUE_ARGUMENTS p);
        float sum[4][4] = {};
        #pragma unroll
        for (int block = 0; block < SPLITS; ++block) {
            #pragma unroll
            for (int i = 0; i < 4; ++i) {
                float4 part = load_from_block(ring.base + ((group * 4 + i) * 32 + lane) * 16, block);
                sum[i][0] += part.x, sum[i][1] += part.y, sum[i][2] += part.z, sum[i][3] += part.w;
            }
        }
        store_group(sum, found, row, col, out, EPILOGUE_ARGUMENTS p);
    }
    leave_cluster(); // the others may still read what is staged here
}
#endif

// What a multiplying warpgroup does.
__device__ __forceinline__ void multiply_and_store(
    const Ring& ring, int group, OUT_T* out, EPILOGUE_PARAMETERS const Params& p)
{
    int warp = int(threadIdx.x) / 32 % 4, first_row = TURNS ? 0 : group * GROUP_ROWS;
    Turn turn;
    int number = 0;
    if (TURNS && group == 1) {
        pass_turn(group);
    }
    for (int tile = int(blockIdx.x); tile < p.tiles_m * p.tiles_n; tile += int(gridDim.x), ++number) {
        Work work(tile, p);
        if (TURNS && number % 2 != group) {
            turn.skip(work.count);
            continue;
        }
        Sums sums;
        multiply_steps(sums, ring, turn, group, first_row, work.count);
        finish(sums, ring, work, group * 4 + warp, out, EPILOGUE_ARGUMENTS p);
    }
}

// Grid: blocks that stay in x, parts of k in y.
extern "C" __global__ void KERNEL_ATTRIBUTES __launch_bounds__(MOST_THREADS, 1) matmul_bulk(
    const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b, OUT_T* out, EPILOGUE_PARAMETERS const Params p)
{
    extern __shared__ __align__(1024) unsigned char shared[];
    Ring ring{shared_address(shared)};
    int role = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
    if (threadIdx.x == 0) {
        ring.make();
        publish_barriers();
        prefetch_map(a);
        prefetch_map(b);
    }
    __syncthreads();
    if (role == 0) {
        leave_registers<COPY_REGISTERS>();
        if (threadIdx.x == 0) {
            copy_operands(ring, a, b, p);
        }
        if (SPLITS > 1) {
            wait_for_cluster();
            leave_cluster();
        }
    } else {
        allow_registers<PRODUCT_REGISTERS>();
        wait_for_previous_grid();
        multiply_and_store(ring, role - 1, out, EPILOGUE_ARGUMENTS p);
    }
}
