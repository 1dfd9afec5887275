// Pieces of pages that hold codes of a byte, and behind them the scales of their rows: how they come to shared memory,
// what is new among them, and their products.
#define SCALE_PARAMETERS KEPT k_scale_t *k_scales, KEPT v_scale_t *v_scales,
#define SCALE_ARGUMENTS k_scales, v_scales,
typedef CodedQueries PieceQueries;
static_assert(K_SCALE_ROW == 1 && V_SCALE_ROW == 1, "the scales of a piece lie side by side");

// The pages of a head of keys.
struct Pools {
    KEPT stored_t *k, *v;
    KEPT k_scale_t* k_scales;
    KEPT v_scale_t* v_scales;

    __device__ __forceinline__ Pools(KEPT stored_t* k, KEPT stored_t* v, SCALE_PARAMETERS int group)
        : k(k), v(v), k_scales(k_scales + (long long)group * K_SCALE_HEAD),
          v_scales(v_scales + (long long)group * V_SCALE_HEAD)
    {
    }

    // Starts copying a piece, which begins at a place of a page.
    __device__ __forceinline__ void copy(unsigned char* stage, long long page, long long within, int count) const
    {
        constexpr int K_CHUNKS = PIECE * int(sizeof(k_scale_t)) / 16, V_CHUNKS = PIECE * int(sizeof(v_scale_t)) / 16;
        copy_bytes<HEAD_SIZE, K_PITCH, K_ROW>(stage, k + page * K_PAGE + within * K_ROW);
        copy_bytes<VALUE_SIZE, V_PITCH, V_ROW>(stage + K_BYTES, v + page * V_PAGE + within * V_ROW);
        int lane = int(threadIdx.x) % 32;
        if (lane < K_CHUNKS) {
            copy_chunk(
                stage + K_SCALES_AT + lane * 16, k_scales + page * K_SCALE_PAGE + within + lane * (PIECE / K_CHUNKS),
                true);
        } else if (lane < K_CHUNKS + V_CHUNKS) {
            lane -= K_CHUNKS;
            copy_chunk(
                stage + V_SCALES_AT + lane * 16, v_scales + page * V_SCALE_PAGE + within + lane * (PIECE / V_CHUNKS),
                true);
        }
    }
};

template <typename Own>
__device__ __forceinline__ void leave_piece_queries(const Own& own, tile_t* queries)
{
    leave_coded(own, queries);
}
__device__ __forceinline__ void load_piece_queries(CodedQueries& query, const tile_t* queries) { query.load(queries); }
__device__ __forceinline__ float piece_result(const Rows& rows, int set, int e, int u)
{
    return coded_lane_result(rows, set, e, u);
}
__device__ __forceinline__ int piece_column(int e, int u) { return coded_lane_column(e, u); }

#if FRESH
static_assert(K_SCALE_PAGE == PAGE_PLACES && V_SCALE_PAGE == PAGE_PLACES, "scales lie as rows do");

// The new keys and values of a block's text, side by side, and where they go.
struct NewRows {
    alignas(16) float number[FRESH][NEW];
    long long place[FRESH];
};

// Puts a thread's part of them where the whole block can read it.
template <typename Own>
__device__ __forceinline__ void leave_new(NewRows& rows, const Own& own, const Pools&, bool)
{
    own.keys.each([&](int row, int column, const float (&value)[OPERAND_PACK], long long place) {
        store_pack(&rows.number[row][column], pack_of<float>(value));
        if (column == 0) {
            rows.place[row] = place;
        }
    });
    own.values.each([&](int row, int column, const float (&value)[OPERAND_PACK], long long) {
        store_pack(&rows.number[row][HEAD_SIZE + column], pack_of<float>(value));
    });
}

// Writes them to the pages, in codes, a row for a warp: the last ones first, which have the fewest pieces.
__device__ __forceinline__ void write_new(const NewRows& rows, const Pools& pools)
{
    for (int each = WARPS - 1 - int(threadIdx.x) / 32; each < FRESH * 2; each += WARPS) {
        int row = each / 2;
        long long place = rows.place[row];
        if (place < 0) {
            continue;
        }
        const float* number = rows.number[row];
        bool is_first = threadIdx.x % 32 == 0;
        if (each % 2 == 0) {
            k_scale_t scale(round_row<HEAD_SIZE>(pools.k + place * K_ROW, [&](int column) { return number[column]; }));
            if (is_first) {
                pools.k_scales[place] = scale;
            }
        } else {
            v_scale_t scale(
                round_row<VALUE_SIZE>(pools.v + place * V_ROW, [&](int column) { return number[HEAD_SIZE + column]; }));
            if (is_first) {
                pools.v_scales[place] = scale;
            }
        }
    }
}

// Puts a new token at a place of a piece, with all lanes of a warp: one of the block's own rows, or what `value_of`
// gives where that is negative.
template <typename Value>
__device__ __forceinline__ void put_new(unsigned char* stage, int at, const NewRows& rows, int row, Value value_of)
{
    auto number_at = [&](int column) { return row >= 0 ? rows.number[row][column] : value_of(column); };
    k_scale_t key_scale(round_row<HEAD_SIZE>(stage + at * K_PITCH, number_at, permutation_of<K_PITCH>(at)));
    v_scale_t value_scale(round_row<VALUE_SIZE>(
        stage + K_BYTES + at * V_PITCH, [&](int column) { return number_at(HEAD_SIZE + column); },
        permutation_of<V_PITCH>(at)));
    if (threadIdx.x % 32 == 0) {
        key_scales_of(stage)[at] = key_scale;
        value_scales_of(stage)[at] = value_scale;
    }
}
#endif
