// Pieces of pages that hold numbers: how they come to shared memory, what is new among them, and their products.
#define SCALE_PARAMETERS
#define SCALE_ARGUMENTS
typedef Queries PieceQueries;

// The pages of a head of keys.
struct Pools {
    KEPT stored_t *k, *v;

    __device__ __forceinline__ Pools(KEPT stored_t* k, KEPT stored_t* v, int group) : k(k), v(v) {}

    // Starts copying a piece, which begins at a place of a page.
    __device__ __forceinline__ void copy(unsigned char* stage, long long page, long long within, int count) const
    {
        copy_rows<HEAD_SIZE, QK_WIDTH, K_PITCH, K_ROW>(stage, k + page * K_PAGE + within * K_ROW, count);
        copy_rows<VALUE_SIZE, V_WIDTH, V_PITCH, V_ROW>(stage + K_BYTES, v + page * V_PAGE + within * V_ROW, count);
    }
};

template <typename Own>
__device__ __forceinline__ void leave_piece_queries(const Own& own, tile_t* queries)
{
    own.template store<Q_PITCH>(queries);
}
__device__ __forceinline__ void load_piece_queries(Queries& query, const tile_t* queries)
{
    load_queries(query, queries);
}
__device__ __forceinline__ void multiply_piece_keys(Scores& score, const Queries& query, const unsigned char* stage)
{
    multiply_keys(score, query, stage);
}
__device__ __forceinline__ void add_piece_values(Rows& rows, const Scores& weight, const unsigned char* stage)
{
    add_values(rows, weight, stage + K_BYTES);
}
__device__ __forceinline__ float piece_result(const Rows& rows, int set, int e, int u)
{
    return lane_result(rows, set, e, u);
}
__device__ __forceinline__ int piece_column(int e, int u) { return lane_column(e, u); }

#if FRESH
// The new keys and values of a block's text, side by side.
struct NewRows {
    alignas(16) tile_t number[FRESH][NEW];
};

// Puts a thread's part of them where the whole block can read it, and, in the block that `writes`, into the pages.
template <typename Own>
__device__ __forceinline__ void leave_new(NewRows& rows, const Own& own, const Pools& pools, bool writes)
{
    own.keys.each([&](int row, int column, const float (&value)[OPERAND_PACK], long long place) {
        store_pack(&rows.number[row][column], pack_of<tile_t>(value));
        if (writes && place >= 0) {
            store_pack(pools.k + place * K_ROW + column, pack_of<tile_t>(value));
        }
    });
    own.values.each([&](int row, int column, const float (&value)[OPERAND_PACK], long long place) {
        store_pack(&rows.number[row][HEAD_SIZE + column], pack_of<tile_t>(value));
        if (writes && place >= 0) {
            store_pack(pools.v + place * V_ROW + column, pack_of<tile_t>(value));
        }
    });
}

__device__ __forceinline__ void write_new(const NewRows&, const Pools&) {} // `leave_new` has

// Puts a new token at a place of a piece, with all lanes of a warp: one of the block's own rows, or what `value_of`
// gives where that is negative.
template <typename Value>
__device__ __forceinline__ void put_new(unsigned char* stage, int at, const NewRows& rows, int row, Value value_of)
{
    unsigned char *keys = stage + at * K_PITCH, *values = stage + K_BYTES + at * V_PITCH;
    for (int column = int(threadIdx.x) % 32; column < NEW; column += 32) {
        tile_t value = row >= 0 ? rows.number[row][column] : tile_t(value_of(column));
        unsigned char* target = column < HEAD_SIZE ? keys + column * 2 : values + (column - HEAD_SIZE) * 2;
        *reinterpret_cast<tile_t*>(target) = value;
    }
}
#endif
