// Results of a product of several rows: what warps leave of a tile in shared memory, put together, in a cluster by
// blocks that each have a share of them, and stored.
constexpr int PART_ROW = TILE + 4;
constexpr int APART = IN_PLACE ? STAGES * STAGE_BYTES / 4 - COLUMNS * PART_ROW : 0; // floats between those of warps
constexpr int WARP_PART = COLUMNS * PART_ROW + APART, PART = BLOCK_WARPS * WARP_PART;
constexpr int VALUES = STORE_SIZE * PAIRS, ITEMS = TILE / VALUES * VECTORS, SHARE = (ITEMS + CLUSTER - 1) / CLUSTER;
constexpr int ITEMS_EACH = (ITEMS + TEAM - 1) / TEAM, SHARE_EACH = (SHARE + TEAM - 1) / TEAM;
constexpr int GATHERED = CLUSTER > 1 ? TEAMS * CLUSTER * SHARE * VALUES : 0; // floats that blocks send to one of them
constexpr int PARTS_AT = IN_PLACE ? 0 : VECTORS_AT + VECTORS * VECTOR_ROW * 2, GATHERED_AT = PARTS_AT + 2 * PART * 4;
static_assert(TILE % VALUES == 0, "stores take whole tiles");
static_assert(APART >= 0 && (!IN_PLACE || CLUSTER == 1), "a warp's part has room where its codes were");

// A thread's values of a tile's results: which vector, and the first of VALUES neighbours in the tile.
struct Item {
    int v, first;

    Item() = default;
    __device__ __forceinline__ Item(int index)
    {
        v = index / (TILE / VALUES);
        first = index % (TILE / VALUES) * VALUES;
    }
};

// The sum of a tile's result from those of a team's warps, or of a cluster's blocks, always in the same order.
__device__ __forceinline__ float sum_of_warps(const float* parts, const Item& item, int u)
{
    float sum = 0.0f;
    #pragma unroll
    for (int other = 0; other < WARPS_K; ++other) {
        sum += parts[(other * COLUMNS + item.v) * PART_ROW + item.first + u + other * APART];
    }
    return sum;
}
__device__ __forceinline__ float sum_of_blocks(const float* gathered)
{
    float sum = 0.0f;
    #pragma unroll
    for (int block = 0; block < CLUSTER; ++block) {
        sum += gathered[block * SHARE * VALUES];
    }
    return sum;
}

// What a row's numbers are yet to be multiplied by.
__device__ __forceinline__ float factor_of(const float (&parts)[SPLIT])
{
#if FACTOR
    float sum = parts[0];
    #pragma unroll
    for (int other = 1; other < SPLIT; ++other) {
        sum += parts[other];
    }
    return row_factor(sum);
#else
    return 1.0f;
#endif
}

// A thread's share of a tile's results, and what their epilogue reads.
struct Results {
    int rank, member; // of the block in its cluster, of the thread in its team
    Item items[SHARE_EACH];
    FetchedByColumn of_columns[SHARE_EACH];
    Fetched fetched[SHARE_EACH];

    __device__ __forceinline__ Results(int rank, int member) : rank(rank), member(member)
    {
        #pragma unroll
        for (int index = 0; index < SHARE_EACH; ++index) {
            items[index] = Item(rank * SHARE + member + index * TEAM);
            settle(items[index].v);
            settle(items[index].first);
        }
    }

    // Calls `use(index, own, item)` for each of them that a tile has: its number in the thread's share and in the block's.
    template <typename Use>
    __device__ __forceinline__ void each(int tile, const Params& p, Use use) const
    {
        #pragma unroll
        for (int index = 0; index < SHARE_EACH; ++index) {
            int own = member + index * TEAM;
            if (tile < p.tiles && own < SHARE && items[index].v < VECTORS) {
                use(index, own, items[index]);
            }
        }
    }

    __device__ __forceinline__ static int column(int tile, const Item& item)
    {
        return (tile * TILE + item.first) / PAIRS;
    }

    __device__ __forceinline__ void fetch_columns(int tile, EPILOGUE_PARAMETERS const Params& p)
    {
        each(tile, p, [&](int index, int, const Item& item) {
            of_columns[index] = fetch_by_column(0, item.v, column(tile, item), EPILOGUE_ARGUMENTS p);
        });
    }

    __device__ __forceinline__ void fetch(int tile, bool has_columns, EPILOGUE_PARAMETERS const Params& p)
    {
        if (!has_columns) {
            fetch_columns(tile, EPILOGUE_ARGUMENTS p);
        }
        each(tile, p, [&](int index, int, const Item& item) {
            fetched[index] = Fetched{
                fetch_by_row(0, item.v, column(tile, item), EPILOGUE_ARGUMENTS p), of_columns[index],
                fetch_by_element(0, item.v, column(tile, item), EPILOGUE_ARGUMENTS p)};
        });
    }

    // Sends the sums of the team's warps to the blocks that store them.
    __device__ __forceinline__ void send(float* gathered, const float* parts, int tile, const Params& p) const
    {
        #pragma unroll
        for (int index = 0; index < ITEMS_EACH; ++index) {
            int own = member + index * TEAM;
            if (tile < p.tiles && own < ITEMS) {
                float* target = gathered + (rank * SHARE + own % SHARE) * VALUES;
                #pragma unroll
                for (int u = 0; u < VALUES; ++u) {
                    store_in_cluster(target + u, own / SHARE, sum_of_warps(parts, Item(own), u));
                }
            }
        }
    }

    // Stores them, of sums that blocks have sent or of those of the team's warps.
    __device__ __forceinline__ void store_all(
        const float* gathered, const float* parts, const float (&row_parts)[VECTORS][SPLIT], int tile, OUT_T* out,
        EPILOGUE_PARAMETERS const Params& p) const
    {
        each(tile, p, [&](int index, int own, const Item& item) {
            float value[VALUES];
            #pragma unroll
            for (int u = 0; u < VALUES; ++u) {
                value[u] = CLUSTER > 1 ? sum_of_blocks(gathered + own * VALUES + u) : sum_of_warps(parts, item, u);
                value[u] *= factor_of(row_parts[item.v]);
            }
            store(value, fetched[index], 0, item.v, column(tile, item), out, EPILOGUE_ARGUMENTS p);
        });
    }
};
