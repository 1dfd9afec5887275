// What kernels share that turn packed codes into numbers in registers: how codes and vectors lie in shared memory,
// where scales, zero points and biases are, and how the blocks of a cluster add their parts of a tile. A tile is TILE_N
// rows of the matrix; the columns of tensor cores' products are the vectors. A span is SPAN places of k.
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

// Scales, zero points and biases of groups of codes.
struct Groups {
    const scale_t* scales;
    const zero_t* zeros;
    const bias_t* biases;
};

// The row of scales, zero points or biases that a row of the matrix has; the last row's behind that.
__device__ __forceinline__ long long row_of_scales(int row, const Params& p)
{
    return (row < p.outputs ? row : p.outputs - 1) / ROWS;
}

// The scale, zero point and bias of a group of such a row, as loaded.
__device__ __forceinline__ void load_belonging(
    scale_t& scale, zero_t& zero, bias_t& bias, const Groups& b, long long own, int group, const Params& p)
{
    if (!ONE_GROUP) {
        scale = b.scales[own * p.scale_row + group * SCALE_GROUP];
    }
    if (ZEROS) {
        zero = b.zeros[own * p.zero_row + group * ZERO_BITS / 8 * ZERO_GROUP];
    }
    if (BIASES) {
        bias = b.biases[own * p.bias_row + group * BIAS_GROUP];
    }
}

// The zero point of a group, whose byte may have those of others.
__device__ __forceinline__ int zero_of(zero_t zero, int group)
{
    int bits = int(zero);
    return ZERO_BITS < 8 ? bits >> group * ZERO_BITS % 8 & ((1 << ZERO_BITS) - 1) : bits;
}

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
