// What happens to a tile of results in registers: parts that SPLITS blocks have are added, then rows are stored. A thread's
// results of four blocks of columns, a group, are eight neighbours in each of two rows.
constexpr int TAKEN = STORE_SIZE * PAIRS, PACKS = 8 / TAKEN;

// What the epilogue reads for a thread's results of one group.
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
    int lane = int(threadIdx.x % 32), col = work.col + group_col(warp / 4) + lane % 4 * 8;
    int row = work.row + group_row(warp / 4) + warp % 4 * 16 + lane / 4;
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
    constexpr int OWN = STEPS_M * GROUPS, ALL = 8 * OWN, TOGETHER = RESIDENT == 1 ? 2 : 1;
    static_assert(ALL * 16 * 128 <= STAGES * STAGE_BYTES, "results are staged where the operands were");
    int lane = int(threadIdx.x % 32), split = int(blockIdx.y);
    synchronize(1, 256); // both warpgroups have multiplied what was there
    #pragma unroll
    for (int i = 0; i < OWN * 4; ++i) {
        const float (&own)[4] = sums.at[i / 4 / GROUPS][i / 4 % GROUPS * 4 + i % 4];
        store_shared(ring.base + ((warp * OWN * 4 + i) * 32 + lane) * 16, own);
    }
    wait_for_cluster();
    #pragma unroll TOGETHER
    for (int group = split + SPLITS * warp; group < ALL; group += SPLITS * 8) {
        int owner = group / OWN, inside = group % OWN;
        int row = work.row + group_row(owner / 4) + inside / GROUPS * 64 + owner % 4 * 16 + lane / 4;
        int col = work.col + group_col(owner / 4) + inside % GROUPS * 32 + lane % 4 * 8;
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

// What a multiplying warpgroup does with the tiles of its block.
__device__ __forceinline__ void multiply_and_store(
    const Ring& ring, int group, OUT_T* out, EPILOGUE_PARAMETERS const Params& p)
{
    int warp = int(threadIdx.x) / 32 % 4;
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
        multiply_steps(sums, ring, turn, group, work.count);
        finish(sums, ring, work, group * 4 + warp, out, EPILOGUE_ARGUMENTS p);
    }
}
