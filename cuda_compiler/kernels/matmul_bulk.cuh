// Matrix products on compute capability 9.0: a[m, k] by b[k, n], lines of both along k. One warp asks the copy engine for
// tiles, two warpgroups multiply what is there. With TURNS each of them has a tile of its own, and one stores while the other
// multiplies; else they share the rows of one. Blocks stay and walk over the tiles, and over SPLITS parts of k. CLUSTER
// neighbouring blocks copy once what they share: the columns' operand if they follow each other ALONG_ROWS, else the rows'.
//
// Lines of b come in groups of 32, ordered by its map so that a thread's results, two of every eight columns for the tensor
// cores, are eight neighbours of a row.
constexpr int THREADS = 384, GROUP_ROWS = TURNS ? TILE_M : TILE_M / 2, STEPS_M = GROUP_ROWS / 64, GROUPS = TILE_N / 32;
constexpr int A_BYTES = TILE_M * 128, B_BYTES = TILE_N * 128, STAGE_BYTES = A_BYTES + B_BYTES;
constexpr int BLOCKS = CLUSTER * SPLITS; // of a cluster
constexpr int CLUSTER_ROWS = ALONG_ROWS ? CLUSTER : 1, CLUSTER_COLUMNS = ALONG_ROWS ? 1 : CLUSTER;
constexpr int A_PART = TILE_M / CLUSTER_COLUMNS, B_PART = TILE_N / CLUSTER_ROWS; // lines that a block copies
constexpr int TAKEN = STORE_SIZE * PAIRS, PACKS = 8 / TAKEN;
static_assert(TILE_N % 32 == 0 && B_PART % 32 == 0 && GROUP_ROWS % 64 == 0 && A_PART % 8 == 0, "whole groups of lines");

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
            make_barrier(empty(stage), 4 * (TURNS ? 1 : 2) * CLUSTER);
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

// A block's share of the work: its place in the result, and the steps along k.
struct Work {
    int split, row, col, first, count;

    __device__ __forceinline__ Work(int item, const Params& p)
    {
        int rank = int(blockIdx.x) % CLUSTER, panel = item / (PANEL * p.tiles_n), inside = item % (PANEL * p.tiles_n);
        split = int(blockIdx.x) % SPLITS;
        int height = min(p.tiles_m - panel * PANEL, PANEL);
        row = ((panel * PANEL + inside % height) * CLUSTER_ROWS + (ALONG_ROWS ? rank : 0)) * TILE_M;
        col = (inside / height * CLUSTER_COLUMNS + (ALONG_ROWS ? 0 : rank)) * TILE_N;
        int steps = (p.k + 63) / 64;
        first = steps * split / SPLITS;
        count = steps * (split + 1) / SPLITS - first;
    }
};

__device__ __forceinline__ void copy_a(const Ring& ring, int stage, const TensorMap& map, const Work& work, int step)
{
    int part = int(blockIdx.x) % CLUSTER_COLUMNS * A_PART;
    copy_lines<CLUSTER_COLUMNS>(
        ring.a(stage) + part * 128, map, ring.full(stage), (work.first + step) * 64, work.row + part);
}

__device__ __forceinline__ void copy_b(const Ring& ring, int stage, const TensorMap& map, const Work& work, int step)
{
    int part = int(blockIdx.x) % CLUSTER_ROWS * B_PART;
    copy_groups<CLUSTER_ROWS>(
        ring.b(stage) + part * 128, map, ring.full(stage), (work.first + step) * 64, (work.col + part) / 32);
}

// What the copying thread does. With B_CONSTANT nothing before this grid writes what b holds.
__device__ __forceinline__ void copy_operands(
    const Ring& ring, const TensorMap& a, const TensorMap& b, int clusters, int items, const Params& p)
{
    int item = int(blockIdx.x) / BLOCKS;
    int ahead = 0;
    if (B_CONSTANT && item < items) {
        Work work(item, p);
        ahead = min(work.count, STAGES);
        for (int step = 0; step < ahead; ++step) {
            arrive_and_expect(ring.full(step), STAGE_BYTES);
            copy_b(ring, step, b, work, step);
        }
    }
    wait_for_previous_grid();
    Turn turn;
    turn.parity = 1; // the first time around, everything is free
    for (; item < items; item += clusters) {
        Work work(item, p);
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
            arrive_in_cluster<CLUSTER>(ring.empty(before));
        }
        before = turn.stage;
        turn.next();
    }
    wait_for_products<0>();
    arrive_in_cluster<CLUSTER>(ring.empty(before));
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
__device__ __forceinline__ void finish(
    const Sums& sums, const Work& work, int row, int col, OUT_T* out, EPILOGUE_PARAMETERS const Params& p)
{
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
// Adds the parts that the blocks of a cluster have, always in the same order: each adds and stores some of the groups, of
// all warps. All threads of the cluster come to two barriers here.
__device__ __forceinline__ void finish(
    const Sums& sums, const Work& work, const Ring& ring, int warp, OUT_T* out, EPILOGUE_PARAMETERS const Params& p)
{
    constexpr int OWN = STEPS_M * GROUPS, ALL = 8 * OWN;
    static_assert(ALL * 16 * 128 <= STAGES * STAGE_BYTES, "results are staged where the operands were");
    int lane = int(threadIdx.x % 32);
    synchronize(1, 256); // both warpgroups have multiplied what was there
    #pragma unroll
    for (int i = 0; i < OWN * 4; ++i) {
        const float (&own)[4] = sums.at[i / 4 / GROUPS][i / 4 % GROUPS * 4 + i % 4];
        uint at = ring.base + ((warp * OWN * 4 + i) * 32 + lane) * 16;
        asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(at), "f"(own[0]), "f"(own[1]), "f"(own[2]), "f"(own[3])
                     : "memory");
    }
    wait_for_cluster<true>();
    #pragma unroll 2
    for (int group = work.split + SPLITS * warp; group < ALL; group += SPLITS * 8) {
        int owner = group / OWN, inside = group % OWN;
        int row = work.row + owner / 4 * GROUP_ROWS + inside / GROUPS * 64 + owner % 4 * 16 + lane / 4;
        int col = work.col + inside % GROUPS * 32 + lane % 4 * 8;
        GroupOperands found;
        fetch_group(found, row, col, EPILOGUE_ARGUMENTS p);
        float sum[4][4] = {};
        #pragma unroll
        for (int split = 0; split < SPLITS; ++split) {
            #pragma unroll
            for (int i = 0; i < 4; ++i) {
                float4 part = load_from_block(ring.base + ((group * 4 + i) * 32 + lane) * 16, split);
                sum[i][0] += part.x, sum[i][1] += part.y, sum[i][2] += part.z, sum[i][3] += part.w;
            }
        }
        store_group(sum, found, row, col, out, EPILOGUE_ARGUMENTS p);
    }
    wait_for_cluster<false>(); // the others may still read what is staged here
}
#endif

// What a multiplying warpgroup does.
__device__ __forceinline__ void multiply_and_store(
    const Ring& ring, int group, int clusters, int items, OUT_T* out, EPILOGUE_PARAMETERS const Params& p)
{
    int warp = int(threadIdx.x) / 32 % 4, lane = int(threadIdx.x) % 32, first_row = TURNS ? 0 : group * GROUP_ROWS;
    Turn turn;
    int number = 0;
    if (TURNS && group == 1) {
        pass_turn(group);
    }
    for (int item = int(blockIdx.x) / BLOCKS; item < items; item += clusters, ++number) {
        Work work(item, p);
        if (TURNS && number % 2 != group) {
            turn.skip(work.count);
            continue;
        }
        Sums sums;
        multiply_steps(sums, ring, turn, group, first_row, work.count);
#if SPLITS == 1
        int row = work.row + first_row + warp * 16 + lane / 4, col = work.col + lane % 4 * 8;
        finish(sums, work, row, col, out, EPILOGUE_ARGUMENTS p);
#else
        finish(sums, work, ring, group * 4 + warp, out, EPILOGUE_ARGUMENTS p);
#endif
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) matmul_bulk(
    const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b, OUT_T* out,
    EPILOGUE_PARAMETERS const Params p)
{
    extern __shared__ __align__(1024) unsigned char shared[];
    Ring ring{shared_address(shared)};
    int role = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
    int clusters = int(gridDim.x) / BLOCKS, items = p.tiles_m * p.tiles_n;
    if (threadIdx.x == 0) {
        ring.make();
        publish_barriers();
        prefetch_map(a);
        prefetch_map(b);
    }
    if (CLUSTER > 1) {
        wait_for_cluster<false>();
    } else {
        __syncthreads();
    }
    if (role == 0) {
        leave_registers<24>();
        if (threadIdx.x == 0) {
            copy_operands(ring, a, b, clusters, items, p);
        }
        if (SPLITS > 1) {
            wait_for_cluster<true>();
            wait_for_cluster<false>();
        }
    } else {
        allow_registers<240>();
        wait_for_previous_grid();
        multiply_and_store(ring, role - 1, clusters, items, out, EPILOGUE_ARGUMENTS p);
    }
    if (CLUSTER > 1) {
        wait_for_cluster<false>(); // the others may still arrive at barriers, or copy
    }
}
