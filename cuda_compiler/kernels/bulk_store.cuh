// What happens to a tile of results in registers: parts that SPLITS blocks have are added, then rows are stored. A
// thread's results of four blocks of columns, a group, are eight neighbours in each of two rows.
constexpr int TAKEN = STORE_SIZE * PAIRS, PACKS = 8 / TAKEN;

// Whether a result is one of the matrix, whose columns are whole groups. Where tiles fill the matrix there is no
// condition: the compiler can then interleave the arithmetic of several groups.
__device__ __forceinline__ bool is_inside(int row, int group_col, const Params& p)
{
    return (WHOLE_ROWS || row < p.m) && (WHOLE_COLUMNS || group_col < p.n);
}

// Stores a pack of a thread's results of one group, of its upper or its lower row.
__device__ __forceinline__ void store_part(
    const float (&sum)[4][4], int half_group, int pack, const Fetched& fetched, int row, int group_col, OUT_T* out,
    EPILOGUE_PARAMETERS const Params& p)
{
    int col = group_col + int(threadIdx.x) % 4 * 8;
    float value[TAKEN];
    #pragma unroll
    for (int i = 0; i < TAKEN; ++i) {
        int at = pack * TAKEN + i;
        value[i] = sum[at / 2][half_group * 2 + at % 2];
    }
    if (is_inside(row, group_col, p)) {
        store(value, fetched, 0, row, col / PAIRS + pack * STORE_SIZE, out, EPILOGUE_ARGUMENTS p);
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

// What the epilogue reads for the results of a thread, which are ITEMS groups, one group of columns after another. As
// far as there are registers, it is loaded before the tile is multiplied: all that is the same for all columns; what is
// the same for all rows, one group of columns ahead; the rest, as many groups ahead as fit.
struct Operands {
    static constexpr int ITEMS = STEPS_M * GROUPS, OTHER_REGISTERS = 28;
    static constexpr int REGISTERS_OF_ELEMENTS = 28; // of their addresses
    static constexpr int FREE_REGISTERS = PRODUCT_REGISTERS - OTHER_REGISTERS - STEPS_M * GROUP_COLUMNS / 2;
    static constexpr int SIDES = STEPS_M * 2 * int(sizeof(FetchedByRow)) + 2 * PACKS * int(sizeof(FetchedByColumn));
    static constexpr int FREE_BYTES = (FREE_REGISTERS - REGISTERS_OF_ELEMENTS) * 4 - SIDES;
    static constexpr int FITTING = FREE_BYTES / (2 * PACKS * int(sizeof(FetchedByElement)));
    static constexpr int HELD = FITTING < 1 ? 1 : FITTING < ITEMS ? FITTING : ITEMS;
    static constexpr bool EARLY = FITTING >= 1, SIDES_EARLY = FREE_REGISTERS * 4 >= SIDES; // else when their turn comes
    static constexpr int COLUMNS_HELD = SIDES_EARLY ? 2 : 1;
    int row, first_col; // of the thread's results, and of its warp's
    FetchedByRow of_row[STEPS_M * 2];
    FetchedByColumn of_column[COLUMNS_HELD][PACKS];
    FetchedByElement of_element[HELD][2][PACKS];

    __device__ __forceinline__ Operands(const Work& work, int warp, EPILOGUE_PARAMETERS const Params& p)
    {
        row = work.row + group_row(warp / 4) + warp % 4 * 16 + int(threadIdx.x) % 32 / 4;
        first_col = work.col + group_col(warp / 4);
        if (SIDES_EARLY) {
            fetch_rows(EPILOGUE_ARGUMENTS p);
            fetch_column(0, EPILOGUE_ARGUMENTS p);
        }
        #pragma unroll
        for (int item = 0; item < (EARLY ? HELD : 0); ++item) {
            fetch_element(item, EPILOGUE_ARGUMENTS p);
        }
    }

    __device__ __forceinline__ int row_of(int step, int half_group) const { return row + step * 64 + half_group * 8; }
    __device__ __forceinline__ int col_of(int group) const { return first_col + group * 32; }
    __device__ __forceinline__ int pack_of(int group, int pack) const
    {
        return (col_of(group) + int(threadIdx.x) % 4 * 8) / PAIRS + pack * STORE_SIZE;
    }

    __device__ __forceinline__ void fetch_rows(EPILOGUE_PARAMETERS const Params& p)
    {
        #pragma unroll
        for (int i = 0; i < STEPS_M * 2; ++i) {
            int r = row_of(i / 2, i % 2);
            if (WHOLE_ROWS || r < p.m) {
                of_row[i] = fetch_by_row(0, r, first_col / PAIRS, EPILOGUE_ARGUMENTS p);
            }
        }
    }

    __device__ __forceinline__ void fetch_column(int group, EPILOGUE_PARAMETERS const Params& p)
    {
        #pragma unroll
        for (int pack = 0; pack < PACKS; ++pack) {
            if (WHOLE_COLUMNS || col_of(group) < p.n) {
                of_column[group % COLUMNS_HELD][pack] =
                    fetch_by_column(0, row, pack_of(group, pack), EPILOGUE_ARGUMENTS p);
            }
        }
    }

    __device__ __forceinline__ void fetch_element(int item, EPILOGUE_PARAMETERS const Params& p)
    {
        #pragma unroll
        for (int i = 0; i < 2 * PACKS; ++i) {
            int r = row_of(item % STEPS_M, i / PACKS), group = item / STEPS_M;
            if (is_inside(r, col_of(group), p)) {
                of_element[item % HELD][i / PACKS][i % PACKS] =
                    fetch_by_element(0, r, pack_of(group, i % PACKS), EPILOGUE_ARGUMENTS p);
            }
        }
    }

    __device__ __forceinline__ void store_all(const Sums& sums, OUT_T* out, EPILOGUE_PARAMETERS const Params& p)
    {
        if (!SIDES_EARLY) {
            fetch_rows(EPILOGUE_ARGUMENTS p);
        }
        #pragma unroll
        for (int item = 0; item < ITEMS; ++item) {
            int step = item % STEPS_M, group = item / STEPS_M, next = group + COLUMNS_HELD - 1;
            if (!EARLY) {
                fetch_element(item, EPILOGUE_ARGUMENTS p);
            }
            if (step == 0 && next < GROUPS) {
                fetch_column(next, EPILOGUE_ARGUMENTS p);
            }
            float own[4][4];
            take_group(own, sums, step * GROUPS + group);
            #pragma unroll
            for (int i = 0; i < 2 * PACKS; ++i) {
                int half_group = i / PACKS, pack = i % PACKS;
                Fetched fetched{of_row[step * 2 + half_group], of_column[group % COLUMNS_HELD][pack],
                                of_element[item % HELD][half_group][pack]};
                store_part(own, half_group, pack, fetched, row_of(step, half_group), col_of(group), out,
                           EPILOGUE_ARGUMENTS p);
            }
            if (EARLY && item + HELD < ITEMS) {
                fetch_element(item + HELD, EPILOGUE_ARGUMENTS p);
            }
        }
    }
};
#else
#define KERNEL_ATTRIBUTES __cluster_dims__(1, SPLITS, 1)

__device__ __forceinline__ void store_shared(uint address, const float (&value)[4])
{
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(value[0]), "f"(value[1]), "f"(value[2]),
                 "f"(value[3])
                 : "memory");
}

// What the epilogue reads for the groups that a warp adds, loaded before the tile is multiplied.
struct Operands {
    static constexpr int OWN = STEPS_M * GROUPS, ALL = 8 * OWN; // groups of a warp, and of the tile
    static constexpr int ITEMS = (OWN + SPLITS - 1) / SPLITS;
    int row, col; // of the tile
    Fetched fetched[ITEMS][2 * PACKS];

    __device__ __forceinline__ Operands(const Work& work, int warp, EPILOGUE_PARAMETERS const Params& p)
    {
        row = work.row + int(threadIdx.x) % 32 / 4, col = work.col;
        #pragma unroll
        for (int item = 0; item < ITEMS; ++item) {
            int group = group_of(item, warp);
            #pragma unroll
            for (int i = 0; i < 2 * PACKS; ++i) {
                int r = row_of(group, i / PACKS), c = (col_of(group) + int(threadIdx.x) % 4 * 8) / PAIRS;
                if (group < ALL && is_inside(r, col_of(group), p)) {
                    fetched[item][i] = fetch(0, r, c + i % PACKS * STORE_SIZE, EPILOGUE_ARGUMENTS p);
                }
            }
        }
    }

    __device__ __forceinline__ static int group_of(int item, int warp)
    {
        return int(blockIdx.y) + SPLITS * (warp + 8 * item);
    }
    __device__ __forceinline__ int row_of(int group, int half_group) const
    {
        int owner = group / OWN, inside = group % OWN;
        return row + group_row(owner / 4) + inside / GROUPS * 64 + owner % 4 * 16 + half_group * 8;
    }
    __device__ __forceinline__ int col_of(int group) const
    {
        return col + group_col(group / OWN / 4) + group % OWN % GROUPS * 32;
    }

    // Adds the parts that the blocks of a cluster have, always in the same order: each adds and stores some of the
    // groups, of all warps. All threads of the cluster come to two barriers here.
    __device__ __forceinline__ void add_and_store(
        const Sums& sums, const Ring& ring, int warp, OUT_T* out, EPILOGUE_PARAMETERS const Params& p)
    {
        static_assert(ALL * 16 * 128 <= STAGES * STAGE_BYTES, "results are staged where the operands were");
        int lane = int(threadIdx.x % 32);
        synchronize(1, 256); // both warpgroups have multiplied what was there
        #pragma unroll
        for (int i = 0; i < OWN * 4; ++i) {
            const float (&own)[4] = sums.at[i / 4 / GROUPS][i / 4 % GROUPS * 4 + i % 4];
            store_shared(ring.base + ((warp * OWN * 4 + i) * 32 + lane) * 16, own);
        }
        synchronize_cluster();
        #pragma unroll
        for (int item = 0; item < ITEMS; ++item) {
            int group = group_of(item, warp);
            if (group >= ALL || !is_inside(row_of(group, 0), col_of(group), p)) {
                continue; // a part that nobody adds may still be on its way when its block has left the cluster
            }
            float sum[4][4] = {};
            #pragma unroll
            for (int block = 0; block < SPLITS; ++block) {
                #pragma unroll
                for (int i = 0; i < 4; ++i) {
                    float4 part = load_from_cluster(ring.base + ((group * 4 + i) * 32 + lane) * 16, block);
                    sum[i][0] += part.x, sum[i][1] += part.y, sum[i][2] += part.z, sum[i][3] += part.w;
                }
            }
            #pragma unroll
            for (int i = 0; i < 2 * PACKS; ++i) {
                store_part(sum, i / PACKS, i % PACKS, fetched[item][i], row_of(group, i / PACKS), col_of(group), out,
                           EPILOGUE_ARGUMENTS p);
            }
        }
        leave_cluster(); // the others may still read what is staged here
    }
};
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
        Operands operands(work, group * 4 + warp, EPILOGUE_ARGUMENTS p);
        multiply_steps(sums, ring, turn, group, work.count);
#if SPLITS == 1
        operands.store_all(sums, out, EPILOGUE_ARGUMENTS p);
#else
        operands.add_and_store(sums, ring, group * 4 + warp, out, EPILOGUE_ARGUMENTS p);
#endif
    }
}
