// What a block computes of its queries, and of new keys and values, as rows in shared memory: each thread has
// neighbours of a row. And how a warp loads queries from there.

// What no query will fill in shared memory is zero: there may be fewer rows, and columns, of them.
__device__ __forceinline__ void clear_queries(tile_t* queries)
{
    constexpr bool NARROW = HEAD_SIZE < QK_WIDTH;
    constexpr int FIRST = NARROW ? 0 : ROWS * Q_PITCH / 2, ALL = SETS * 8 * Q_PITCH / 2;
    if (FIRST < ALL) {
        for (int index = FIRST + int(threadIdx.x); index < ALL; index += THREADS) {
            reinterpret_cast<uint*>(queries)[index] = 0;
        }
    }
    if (NARROW) {
        __syncthreads(); // others will write here
    }
}

// The OPERAND_PACK neighbours, of COUNT rows of SIZE columns, that one of SOME threads has in a turn, from a column on;
// where there are no more, others again. Where turns are whole rows, the column is the same in all of them.
template <int COUNT, int SIZE, int SOME = THREADS>
struct PlaceOfTurn {
    static constexpr int PACKS = SIZE / OPERAND_PACK, TURNS = (COUNT * PACKS + SOME - 1) / SOME;
    static_assert(SIZE % OPERAND_PACK == 0, "rows are whole packs");
    int row, column;

    __device__ __forceinline__ explicit PlaceOfTurn(int turn)
    {
        int thread = int(threadIdx.x);
        if (SOME % PACKS == 0) {
            row = min(thread / PACKS + turn * (SOME / PACKS), COUNT - 1);
            column = thread % PACKS * OPERAND_PACK;
        } else {
            int pack = min(turn * SOME + thread, COUNT * PACKS - 1);
            row = pack / PACKS;
            column = pack % PACKS * OPERAND_PACK;
        }
    }
};

template <typename T>
__device__ __forceinline__ Pack<T, OPERAND_PACK> pack_of(const float (&value)[OPERAND_PACK])
{
    Pack<T, OPERAND_PACK> pack;
    #pragma unroll
    for (int u = 0; u < OPERAND_PACK; ++u) {
        pack[u] = T(value[u]);
    }
    return pack;
}

// A thread's part of so many rows. There is no branch between the loads, so that all of them are issued before the first
// is waited for.
template <int COUNT, int SIZE, int SOME = THREADS>
struct OwnPacks {
    typedef PlaceOfTurn<COUNT, SIZE, SOME> Place;
    float value[Place::TURNS][OPERAND_PACK];

    // Calls for each turn: the values to compute, its number, its row and its column.
    template <typename Compute>
    __device__ __forceinline__ void compute(Compute compute)
    {
        #pragma unroll
        for (int turn = 0; turn < Place::TURNS; ++turn) {
            Place place(turn);
            compute(value[turn], turn, place.row, place.column);
        }
    }

    // Calls for each element: its row, its column, and itself.
    template <typename Use>
    __device__ __forceinline__ void each(Use use) const
    {
        #pragma unroll
        for (int turn = 0; turn < Place::TURNS; ++turn) {
            Place place(turn);
            #pragma unroll
            for (int u = 0; u < OPERAND_PACK; ++u) {
                use(place.row, place.column + u, value[turn][u]);
            }
        }
    }

    // Stores them in rows of shared memory that are STEP elements apart.
    template <int STEP, typename T>
    __device__ __forceinline__ void store(T* rows) const
    {
        #pragma unroll
        for (int turn = 0; turn < Place::TURNS; ++turn) {
            Place place(turn);
            store_pack(rows + place.row * STEP + place.column, pack_of<T>(value[turn]));
        }
    }
};

// A thread's part of the queries, which the first SOME threads compute.
template <int SOME = THREADS>
struct OwnQueries : OwnPacks<ROWS, HEAD_SIZE, SOME> {
    __device__ __forceinline__ void compute(int batch, int group, OPERAND_PARAMETERS const Params& p)
    {
        OwnPacks<ROWS, HEAD_SIZE, SOME>::compute([&](float (&value)[OPERAND_PACK], int, int row, int column) {
            query_pack(value, batch, group * SHARED + row / OWN_ROWS, row % OWN_ROWS, column, OPERAND_ARGUMENTS p);
        });
    }
};

__device__ __forceinline__ void load_queries(Queries& query, const tile_t* queries)
{
    int lane = int(threadIdx.x) % 32;
    uint first = shared_address(queries + lane % 8 * Q_PITCH + lane / 8 * 8);
    #pragma unroll
    for (int set = 0; set < SETS; ++set) {
        #pragma unroll
        for (int d = 0; d < QK_WIDTH / 16; d += 2) { // of an odd number the last is loaded with what lies behind it
            uint found[4];
            load_matrices(found, first + (set * 8 * Q_PITCH + d * 16) * 2);
            #pragma unroll
            for (int part = 0; part < 4 && d + part / 2 < QK_WIDTH / 16; ++part) {
                query[set][d + part / 2][part % 2] = found[part];
            }
        }
    }
}
