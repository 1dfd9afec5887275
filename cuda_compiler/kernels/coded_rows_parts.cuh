// What kernels share that turn packed codes into numbers in registers: how codes and vectors lie in shared memory,
// and how the blocks of a cluster add their parts of a tile. A tile is TILE_N rows of the matrix; the columns of tensor
// cores' products are the vectors. A span is SPAN places of k.
constexpr int SPANS = (COMMON + SPAN - 1) / SPAN;
constexpr int CODE_ROW = SPAN * BITS / 8, CODE_BYTES = TILE_N * CODE_ROW, ROW_BYTES = COMMON * BITS / 8;
constexpr int COLUMN_BLOCKS = (VECTORS + 7) / 8, COLUMNS = COLUMN_BLOCKS * 8;
constexpr int VECTOR_BYTES = COLUMNS * SPAN * 2, SPAN_BYTES = VECTOR_BYTES + CODE_BYTES; // vectors come first
constexpr int PART_ROW = PART_N + 4, VALUES = STORE_SIZE * PAIRS; // PART_N rows are put together by the same threads
constexpr int GATHERED = COLUMNS <= 64 ? COLUMNS : 64; // vectors whose sums are put together at a time
constexpr int SHARE = (GATHERED + CLUSTER - 1) / CLUSTER; // those whose results a block of a cluster stores
constexpr int ITEMS = SHARE * (PART_N / VALUES);
constexpr int PARTS_BYTES = GATHERED * PART_ROW * 4, GATHERED_BYTES = CLUSTER > 1 ? CLUSTER * SHARE * PART_ROW * 4 : 0;
static_assert(BITS == 4 || BITS == 8, "whole words have whole codes");
static_assert(TILE_N % PART_N == 0 && PART_N % VALUES == 0, "stores take whole parts");
static_assert(
    COLUMNS % GATHERED == 0 && (COLUMNS == GATHERED || CLUSTER == 1), "clusters put all sums together at once");

// Sends each block of the cluster its share of the sums, by THREADS threads.
template <int THREADS>
__device__ __forceinline__ void send_sums(float* gathered, const float* parts, int rank, int thread)
{
    for (int index = thread; index < GATHERED * (PART_N / 4); index += THREADS) {
        int v = index / (PART_N / 4), first = index % (PART_N / 4) * 4;
        Pack<float, 4> four = load_pack<4>(parts + v * PART_ROW + first);
        float* target = gathered + (rank * SHARE + v % SHARE) * PART_ROW + first;
        store_in_cluster(target, v / SHARE, make_float4(four[0], four[1], four[2], four[3]));
    }
}

// A thread's values of a tile's results: which row of the result, and the first of VALUES neighbours.
struct Item {
    int own, v, first, at;
    bool exists;

    __device__ __forceinline__ Item(int index, int first_vector, int first_row, int rank, const Params& p)
    {
        own = index / (PART_N / VALUES);
        v = first_vector + rank * SHARE + own;
        first = index % (PART_N / VALUES) * VALUES;
        at = first_row + first;
        exists = index < ITEMS && v < p.vectors && at < p.outputs;
    }

    // The sums of the blocks of the cluster, in their order; `sums` are those of this block's share.
    __device__ __forceinline__ void read(float (&value)[VALUES], const float* sums, const float* row_scale) const
    {
        constexpr int TOGETHER = VALUES % 4 == 0 ? 4 : 1; // loaded as one
        #pragma unroll
        for (int at = 0; at < VALUES; at += TOGETHER) {
            #pragma unroll
            for (int block = 0; block < CLUSTER; ++block) {
                Pack<float, TOGETHER> part = load_pack<TOGETHER>(sums + (block * SHARE + own) * PART_ROW + first + at);
                #pragma unroll
                for (int u = 0; u < TOGETHER; ++u) {
                    value[at + u] = block == 0 ? part[u] : value[at + u] + part[u];
                }
            }
            Pack<float, TOGETHER> scale = load_pack<TOGETHER>(row_scale + first + at);
            #pragma unroll
            for (int u = 0; u < (ONE_GROUP ? TOGETHER : 0); ++u) {
                value[at + u] *= scale[u];
            }
        }
    }
};
