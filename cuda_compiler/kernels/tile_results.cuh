// How a team of warpgroups stores its tile: from the registers where it was multiplied, columns having been dealt out
// so that each thread has eight neighbours of a row.
constexpr int GROUPS = TEAM_THREADS / 128, GROUP_ROWS = WARP_M * 4;
constexpr int COPY_REGISTERS = TILE_M > 192 ? 96 : TILE_M > 128 ? 80 : 56; // by the rows whose pixels a thread keeps
constexpr int PRODUCT_REGISTERS = ((TEAMS * GROUPS == 2 ? 504 : 512) - COPY_REGISTERS) / (TEAMS * GROUPS * 8) * 8;
// Of a thread, beside its results and what the epilogue reads for them.
constexpr int OTHER_REGISTERS = TEAMS * GROUPS == 2 ? 60 : 40;
static_assert(TEAMS * GROUPS == 2 || TEAMS * GROUPS == 3, "registers of a multiprocessor: 504 or 512 for four threads");
static_assert(WARPS_N == 1 && TILE_N % 32 == 0 && SPLITS == 1, "a warpgroup has whole rows of a tile of its own");

// A tile of results as a thread sees it: packs of NEIGHBOURS of a row, of which each four lanes have a row. Where eight
// neighbours are 16 bytes and there are 64 columns, they exchange half of their row for half of the next one with the
// four lanes that have that, so that eight lanes store 128 bytes of a row. The first result of a row counts as `base`
// for the epilogue, whose operands are fetched ahead, as many as there are registers for before the tile is multiplied.
// Those that are the same for all rows are held for all columns, or for those of one pack at a time, whose rows then
// follow each other. The functions of EPILOGUE get the `operands` of the kernel; `stored` is called after each pack.
// KEPT registers of a thread are left to others.
template <typename EPILOGUE, int WIDTH, int KEPT = 0>
struct TileResults {
    using FetchedByColumn = typename EPILOGUE::FetchedByColumn;
    using FetchedByElement = typename EPILOGUE::FetchedByElement;
    using Fetched = typename EPILOGUE::Fetched;
    using Sums = float[STEPS_M][WIDTH / 8][4];
    static constexpr bool WIDE = NEIGHBOURS == 16, SHARED_ROWS = !EPILOGUE::OWN_ROWS && !WIDE && WIDTH % 64 == 0;
    static constexpr int TAKEN = STORE_SIZE * PAIRS, EACH = NEIGHBOURS / TAKEN;
    static constexpr int ROWS_EACH = STEPS_M * 2, PACKS_EACH = WIDTH / DEAL, COUNT = ROWS_EACH * PACKS_EACH * EACH;
    static constexpr int COLUMNS_EACH = PACKS_EACH / (SHARED_ROWS ? 2 : 1) * EACH;
    static constexpr int FREE_REGISTERS = PRODUCT_REGISTERS - OTHER_REGISTERS - STEPS_M * WIDTH / 2 - KEPT;
    static constexpr bool HOLDS_ALL = !WIDE || COLUMNS_EACH * int(sizeof(FetchedByColumn)) <= FREE_REGISTERS * 4;
    static constexpr int COLUMNS_HELD = HOLDS_ALL ? COLUMNS_EACH : EACH;
    static constexpr int FREE_BYTES = FREE_REGISTERS * 4 - COLUMNS_HELD * int(sizeof(FetchedByColumn));
    static constexpr int FITTING = FREE_BYTES / int(sizeof(FetchedByElement));
    static constexpr int DEPTH = FITTING < 1 ? 1 : FITTING < COUNT ? FITTING : COUNT;
    const int batch, rows, columns, base;
    const bool lower; // of the two rows that eight lanes share
    EPILOGUE epilogue;
    int row, col;
    FetchedByColumn of_column[COLUMNS_HELD];
    FetchedByElement of_element[DEPTH];

    template <typename... Operands>
    __device__ __forceinline__ TileResults(
        const EPILOGUE& epilogue, Part part, int group, int rows, int columns, const Operands&... operands)
        : batch(part.batch), rows(rows), columns(columns / PAIRS), base(part.base), lower(threadIdx.x / 4 % 2),
          epilogue(epilogue)
    {
        int thread = int(threadIdx.x) % 128;
        row = part.row + group * GROUP_ROWS + thread / 32 * 16 + thread % 32 / 4 - (SHARED_ROWS && lower ? 1 : 0);
        col = (part.col + thread % 4 * NEIGHBOURS + (SHARED_ROWS && lower ? 32 : 0)) / PAIRS;
        #pragma unroll
        for (int number = 0; number < COUNT; ++number) {
            if (is_first_of_column(number) && column_of(number) < COLUMNS_HELD) {
                fetch_column(number, operands...);
            }
        }
        #pragma unroll
        for (int number = 0; number < DEPTH; ++number) {
            fetch_element(number, operands...);
        }
    }

    // A pack's eight rows out of those of its thread, and its columns.
    static constexpr int step_of(int number) { return WIDE ? number / EACH % ROWS_EACH : number / EACH / PACKS_EACH; }
    static constexpr int pack_of(int number) { return WIDE ? number / EACH / ROWS_EACH : number / EACH % PACKS_EACH; }

    // Which of the packs of operands that are the same for all rows.
    static constexpr int column_of(int number)
    {
        return pack_of(number) / (SHARED_ROWS ? 2 : 1) * EACH + number % EACH;
    }
    static constexpr bool is_first_of_column(int number)
    {
        return step_of(number) == 0 && !(SHARED_ROWS && pack_of(number) % 2);
    }

    __device__ __forceinline__ int row_of(int number) const
    {
        int step = step_of(number), rest = SHARED_ROWS ? pack_of(number) % 2 : 0;
        return row + step / 2 * 64 + step % 2 * 8 + rest;
    }
    __device__ __forceinline__ int col_of(int number) const
    {
        int pack = pack_of(number), first = SHARED_ROWS ? pack / 2 * 64 : pack * DEAL;
        return col + (first + number % EACH * TAKEN) / PAIRS;
    }
    __device__ __forceinline__ bool is_inside(int number) const
    {
        return row_of(number) < rows && col_of(number) < columns;
    }

    template <typename... Operands>
    __device__ __forceinline__ void fetch_column(int number, const Operands&... operands)
    {
        if (col_of(number) < columns) {
            int c = base + col_of(number);
            of_column[column_of(number) % COLUMNS_HELD] = epilogue.fetch_by_column(batch, 0, c, operands...);
        }
    }
    template <typename... Operands>
    __device__ __forceinline__ void fetch_element(int number, const Operands&... operands)
    {
        if (is_inside(number)) {
            int c = base + col_of(number);
            of_element[number % DEPTH] = epilogue.fetch_by_element(batch, row_of(number), c, operands...);
        }
    }

    // Has what the epilogue reads for another tile loaded into the level-2 cache, a line of memory at a time.
    template <typename... Operands>
    __device__ __forceinline__ static void ask(
        Part part, int group, int rows, int columns, const Operands&... operands)
    {
        constexpr int LINE = 64, LINES = GROUP_ROWS * ((WIDTH + LINE - 1) / LINE); // of 16-bit elements
        #pragma unroll
        for (int i = 0; i < LINES; i += 128) {
            int line = i + int(threadIdx.x) % 128, row = part.row + group * GROUP_ROWS + line % GROUP_ROWS;
            int col = (part.col + line / GROUP_ROWS * LINE) / PAIRS;
            if (line < LINES && row < rows && col < columns / PAIRS) {
                EPILOGUE().ask_by_element(part.batch, row, part.base + col, operands...);
            }
        }
    }

    // The results of a pack and, where rows are shared, of the next one.
    __device__ __forceinline__ void take(float (&value)[2][NEIGHBOURS], const Sums& sum, int number) const
    {
        const int step = step_of(number) / 2, upper = step_of(number) % 2 * 2, block = pack_of(number) * (DEAL / 8);
        #pragma unroll
        for (int i = 0; i < NEIGHBOURS; ++i) {
            value[0][i] = sum[step][block + i / 2][upper + i % 2];
            if (SHARED_ROWS) {
                value[1][i] = sum[step][block + 4 + i / 2][upper + i % 2];
                float other = __shfl_xor_sync(0xffffffffu, lower ? value[0][i] : value[1][i], 4);
                (lower ? value[0][i] : value[1][i]) = other;
            }
        }
    }

    template <typename... Operands>
    __device__ __forceinline__ void store_all(const Sums& sum, OUT_T* out, const Operands&... operands)
    {
        float value[2][NEIGHBOURS];
        #pragma unroll
        for (int number = 0; number < COUNT; ++number) {
            const int held = SHARED_ROWS ? pack_of(number) % 2 : 0;
            if (number % EACH == 0 && held == 0) {
                take(value, sum, number);
            }
            if (is_first_of_column(number) && column_of(number) >= COLUMNS_HELD) {
                fetch_column(number, operands...);
            }
            if (is_inside(number)) {
                float part[TAKEN];
                #pragma unroll
                for (int i = 0; i < TAKEN; ++i) {
                    part[i] = value[held][number % EACH * TAKEN + i];
                }
                int r = row_of(number), c = base + col_of(number);
                Fetched fetched{epilogue.fetch_by_row(batch, r, c, operands...),
                                of_column[column_of(number) % COLUMNS_HELD], of_element[number % DEPTH]};
                epilogue.store(part, fetched, batch, r, c, out, operands...);
            }
            epilogue.stored(step_of(number), pack_of(number));
            if (number + DEPTH < COUNT) {
                fetch_element(number + DEPTH, operands...);
            }
        }
    }
};

// The epilogue of a kernel, generated, whose lanes leave each other nothing.
struct StoredResults : OwnEpilogue {
    static constexpr bool OWN_ROWS = false;
    __device__ __forceinline__ void stored(int, int) {}
};
