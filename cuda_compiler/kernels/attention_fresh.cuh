// New keys and values of a step whose keys and values lie in pages: what a text's own are, and where they go.
#if FRESH
constexpr int TOKENS = RESULT_TILES / GROUPS * FRESH, NEW = HEAD_SIZE + VALUE_SIZE;
constexpr int PAGE_PLACES = K_PAGE / K_ROW; // rows from one page to the next
static_assert(V_PAGE / V_ROW == PAGE_PLACES, "keys and values lie alike");

// A token whose new keys and values lie among the positions of this block: its place in a page.
struct Fresh {
    short token, place;
    int page;
};

// An element of the keys and values of a token, side by side.
__device__ __forceinline__ float fresh_value(int token, int group, int column, OPERAND_PARAMETERS const Params& p)
{
    return column < HEAD_SIZE ? key_value(0, token, group, column, OPERAND_ARGUMENTS p)
                              : value_value(0, token, group, column - HEAD_SIZE, OPERAND_ARGUMENTS p);
}

// A thread's part of the new keys, or values, of its text, and where in the pool they go. Places can be found before
// the grid ahead has finished. There is no branch between the loads.
template <int SIZE>
struct OwnRows {
    static constexpr int TURNS = turns_of(FRESH * SIZE);
    float value[TURNS];
    long long place[TURNS]; // negative where there is none

    __device__ __forceinline__ void find(int batch, OPERAND_PARAMETERS const Params& p)
    {
        #pragma unroll
        for (int turn = 0; turn < TURNS; ++turn) {
            int token = batch * FRESH + element_of_turn<FRESH * SIZE>(turn) / SIZE;
            place[turn] = fresh_place(0, token, 0, 0, OPERAND_ARGUMENTS p);
        }
    }

    template <typename Compute>
    __device__ __forceinline__ void compute(int batch, Compute value_of)
    {
        #pragma unroll
        for (int turn = 0; turn < TURNS; ++turn) {
            int index = element_of_turn<FRESH * SIZE>(turn);
            value[turn] = value_of(batch * FRESH + index / SIZE, index % SIZE);
        }
    }

    // Calls for each element: its row, its column, itself and the place of its row.
    template <typename Use>
    __device__ __forceinline__ void each(Use use) const
    {
        #pragma unroll
        for (int turn = 0; turn < TURNS; ++turn) {
            int index = element_of_turn<FRESH * SIZE>(turn);
            use(index / SIZE, index % SIZE, value[turn], place[turn]);
        }
    }
};

// What a thread has of the new keys and values of its text.
struct OwnNew {
    OwnRows<HEAD_SIZE> keys;
    OwnRows<VALUE_SIZE> values;

    __device__ __forceinline__ void find(int batch, OPERAND_PARAMETERS const Params& p)
    {
        keys.find(batch, OPERAND_ARGUMENTS p);
        values.find(batch, OPERAND_ARGUMENTS p);
    }

    __device__ __forceinline__ void compute(int batch, int group, OPERAND_PARAMETERS const Params& p)
    {
        keys.compute(
            batch, [&](int token, int column) { return key_value(0, token, group, column, OPERAND_ARGUMENTS p); });
        values.compute(
            batch, [&](int token, int column) { return value_value(0, token, group, column, OPERAND_ARGUMENTS p); });
    }
};
#endif
