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
// the grid ahead has finished.
template <int SIZE>
struct OwnRows : OwnPacks<FRESH, SIZE> {
    typedef PlaceOfTurn<FRESH, SIZE> Place;
    long long place[Place::TURNS]; // negative where there is none

    __device__ __forceinline__ void find(int batch, OPERAND_PARAMETERS const Params& p)
    {
        #pragma unroll
        for (int turn = 0; turn < Place::TURNS; ++turn) {
            place[turn] = fresh_place(0, batch * FRESH + Place(turn).row, 0, 0, OPERAND_ARGUMENTS p);
        }
    }

    // Calls for each turn: its row, its column, its values and the place of the row.
    template <typename Use>
    __device__ __forceinline__ void each(Use use) const
    {
        #pragma unroll
        for (int turn = 0; turn < Place::TURNS; ++turn) {
            Place at(turn);
            use(at.row, at.column, this->value[turn], place[turn]);
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
        keys.compute([&](float (&value)[OPERAND_PACK], int, int row, int column) {
            key_pack(value, 0, batch * FRESH + row, group, column, OPERAND_ARGUMENTS p);
        });
        values.compute([&](float (&value)[OPERAND_PACK], int, int row, int column) {
            value_pack(value, 0, batch * FRESH + row, group, column, OPERAND_ARGUMENTS p);
        });
    }
};
#endif
