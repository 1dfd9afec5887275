// A block's tile of a matrix product of 16-bit operands: TILE_M x TILE_N results, TILE_K of the common dimension at a
// time, STAGES of them on their way into shared memory. The kernel that includes this says how a tile is copied, and
// `tile_warps`, `tile_warpgroups` or `tile_teams` how it is multiplied.
constexpr int WARPS = WARPS_M * WARPS_N, TEAM_THREADS = WARPS * 32; // that share a tile of results
constexpr int COPY_THREADS = TEAMS ? 128 : TEAM_THREADS; // a warpgroup of their own behind the teams, if there are any
constexpr int THREADS = TEAMS ? TEAMS * TEAM_THREADS + COPY_THREADS : TEAM_THREADS;
constexpr int WARP_M = TILE_M / WARPS_M, WARP_N = TILE_N / WARPS_N;
constexpr int STEPS_M = WARP_M / 16, STEPS_N = WARP_N / 8; // a warp's blocks of 16 x 8 results
constexpr int CHUNK = 8; // elements of 16 bytes
constexpr int A_BYTES = TILE_M * TILE_K * 2, B_BYTES = TILE_N * TILE_K * 2, STAGE_BYTES = A_BYTES + B_BYTES;

// Where an element of an operand's tile lies, in bytes: `along` counts its rows or columns, `k` the common dimension.
// The 16-byte chunks of a line are permuted so that eight lines at one column lie in different banks.
template <int EXTENT, bool ALONG_K>
__device__ __forceinline__ uint tile_offset(uint along, uint k)
{
    constexpr uint CHUNKS = (ALONG_K ? TILE_K : EXTENT) / CHUNK, MASK = CHUNKS < 8 ? CHUNKS - 1 : 7;
    uint line = ALONG_K ? along : k, place = ALONG_K ? k : along;
    uint turn = CHUNKS < 8 ? line * CHUNKS / 8 : line;
    return (line * CHUNKS + (place / CHUNK ^ (turn & MASK))) * 16 + place % CHUNK * 2;
}

// A thread's number among those that copy.
__device__ __forceinline__ uint copy_thread() { return threadIdx.x % COPY_THREADS; }

// Which column of the result is multiplied at a position of the second operand's tile. Of eight positions each of the
// four lanes that share a row has two neighbours. Where columns are DEALT out, these positions have columns that make
// NEIGHBOURS neighbours for each lane, as many as are stored together.
constexpr int NEIGHBOURS = sizeof(OUT_T) == 1 && TILE_N % 64 == 0 ? 16 : 8, DEAL = 4 * NEIGHBOURS;
template <bool DEALT>
__device__ __forceinline__ constexpr int column_at(int position)
{
    int inside = position % 8 / 2 * NEIGHBOURS + position % DEAL / 8 * 2 + position % 2;
    return DEALT ? position / DEAL * DEAL + inside : position;
}

// Copies tiles of an operand whose chunks are contiguous in memory: every thread has one column of them.
template <int EXTENT, bool ALONG_K, bool DEALT = false, typename T = tile_t>
struct OperandCopier {
    static constexpr int CHUNKS = (ALONG_K ? TILE_K : EXTENT) / CHUNK, LINES = ALONG_K ? EXTENT : TILE_K;
    static constexpr int STEP = COPY_THREADS / CHUNKS, ROUNDS = LINES / STEP;
    static_assert(
        COPY_THREADS % CHUNKS == 0 && LINES % STEP == 0 && STEP % 8 == 0, "every thread copies as many chunks");
    const T* source; // of this thread's first chunk in the next tile
    long long line_stride, tile_stride;
    uint target;
    int depth, common;    // position of the first chunk along k, and where k ends
    int inside;           // rows from this thread's first one on, or for chunks along the rows whether this one exists

    OperandCopier() = default;

    // `base` is the tile's first row, below `limit`, the number of rows; `common` is the extent of k.
    __device__ __forceinline__ OperandCopier(
        const T* operand, int base, int limit, int stride_along, int stride_k, int first_tile, int common)
        : common(common)
    {
        int line = int(copy_thread() / CHUNKS), place = int(copy_thread() % CHUNKS) * CHUNK;
        int along = base + (ALONG_K ? column_at<DEALT>(line) : place);
        depth = first_tile * TILE_K + (ALONG_K ? place : line);
        source = operand + (long long)along * stride_along + (long long)depth * stride_k;
        line_stride = ALONG_K ? stride_along : stride_k;
        tile_stride = (long long)TILE_K * stride_k;
        target = ALONG_K ? tile_offset<EXTENT, true>(line, place) : tile_offset<EXTENT, false>(place, line);
        inside = ALONG_K ? limit - along : int(along < limit);
    }

    __device__ __forceinline__ void copy(unsigned char* tile)
    {
        #pragma unroll
        for (int round = 0; round < ROUNDS; ++round) {
            int line = ALONG_K ? column_at<DEALT>(round * STEP) : round * STEP;
            bool valid = ALONG_K ? line < inside && depth < common : inside && depth + line < common;
            copy_chunk(tile + target + round * STEP * CHUNKS * 16, source + line * line_stride, valid);
        }
        source += tile_stride;
        depth += TILE_K;
    }
};

struct Accumulator {
    float at[STEPS_M][STEPS_N][4];

    __device__ __forceinline__ void clear()
    {
        #pragma unroll
        for (int m = 0; m < STEPS_M; ++m) {
            #pragma unroll
            for (int n = 0; n < STEPS_N; ++n) {
                at[m][n][0] = at[m][n][1] = at[m][n][2] = at[m][n][3] = 0.0f;
            }
        }
    }
};

// Sums of codes are integers, whose bits stand for them until a tile is done; sums of numbers stay as they are.
__device__ __forceinline__ void make_numbers(Accumulator& sum)
{
    #pragma unroll
    for (int m = 0; m < STEPS_M; ++m) {
        #pragma unroll
        for (int n = 0; n < STEPS_N; ++n) {
            #pragma unroll
            for (int i = 0; i < 4 && TensorCores<tile_t>::counts; ++i) {
                sum.at[m][n][i] = float(__float_as_int(sum.at[m][n][i]));
            }
        }
    }
}

// Where a tile of results lies: its batch, its first row and column, and the column that the epilogue counts from.
struct Part {
    int batch, row, col, base;
};
__device__ Part part_of(int tile, const Params& p); // the kernel says

// A position among a result's tiles.
struct Place {
    int row, col;
};

// Tiles follow each other along the columns, in panels of PANEL rows of tiles inside of which rows come first: blocks
// that run at a time then share what they read of both operands.
__device__ __forceinline__ Place place_of(int tile, int tiles_m, int tiles_n)
{
    int panel = tile / (PANEL * tiles_n), inside = tile % (PANEL * tiles_n);
    int height = tiles_m - panel * PANEL < PANEL ? tiles_m - panel * PANEL : PANEL;
    return {(panel * PANEL + inside % height) * TILE_M, inside / height * TILE_N};
}
