// A tile of a matrix product whose operands the copy engine brings: TILE_M x TILE_N results, 64 of the common dimension
// at a time, STAGES of them on their way into shared memory. Two warpgroups multiply; with TURNS each has tiles of its
// own, else they share the rows of one, or the columns where there are no more rows than one multiplies.
constexpr bool SHARED_COLUMNS = TILE_M == 64 && !TURNS;
constexpr int GROUP_ROWS = TURNS || SHARED_COLUMNS ? TILE_M : TILE_M / 2;
constexpr int GROUP_COLUMNS = SHARED_COLUMNS ? TILE_N / 2 : TILE_N;
constexpr int THREADS = 384, STEPS_M = GROUP_ROWS / 64, GROUPS = GROUP_COLUMNS / 32;
// A matrix of fewer rows than a tile is copied alone. What is multiplied as the other rows is the stage's part of b;
// their sums are stored nowhere.
constexpr int A_COPIED = COPIED_ROWS * 128, A_BYTES = COPIED_ROWS + TILE_N < TILE_M ? (TILE_M - TILE_N) * 128 : A_COPIED;
constexpr int B_BYTES = TILE_N * 128, STAGE_BYTES = A_BYTES + B_BYTES;
static_assert(GROUP_COLUMNS % 32 == 0 && GROUP_ROWS % 64 == 0, "whole groups of lines");
static_assert(SPLITS == 1 || !TURNS, "blocks of a cluster add one tile");

// Where a thread has few results, the kernel takes fewer registers, so that its blocks can begin beside those of the
// kernel ahead, or beside another of its own.
constexpr bool LEAN = RESIDENT == 1 && STEPS_M * GROUP_COLUMNS <= 160;
constexpr int MOST_THREADS = LEAN ? 512 : RESIDENT * THREADS, COPY_REGISTERS = LEAN ? 56 : 24;
constexpr int PRODUCT_REGISTERS = RESIDENT == 2 ? 104 : LEAN ? 160 : 240;
static_assert(RESIDENT == 1 || STEPS_M * GROUP_COLUMNS <= 96, "what half of the registers hold");

// Where the results of a warpgroup begin in a tile.
__device__ __forceinline__ int group_row(int group) { return TURNS || SHARED_COLUMNS ? 0 : group * GROUP_ROWS; }
__device__ __forceinline__ int group_col(int group) { return SHARED_COLUMNS ? group * GROUP_COLUMNS : 0; }

// The operands in shared memory.
struct Ring : StageBarriers<STAGES * STAGE_BYTES> {
    __device__ __forceinline__ uint a(int stage) const { return base + stage * STAGE_BYTES; }
    __device__ __forceinline__ uint b(int stage) const { return a(stage) + A_BYTES; }
};

// A block's share of the work: a tile, and the steps along k. Tiles are in panels of PANEL rows of them, inside of
// which rows come first: blocks then share what they read of both operands.
struct Work {
    int row, col, first, count;

    __device__ __forceinline__ Work(int tile, const Params& p)
    {
        int panel = tile / (PANEL * p.tiles_n), inside = tile % (PANEL * p.tiles_n);
        int height = min(p.tiles_m - panel * PANEL, PANEL);
        row = (panel * PANEL + inside % height) * TILE_M;
        col = inside / height * TILE_N;
        int steps = (p.k + 63) / 64, split = int(blockIdx.y);
        first = steps * split / SPLITS;
        count = steps * (split + 1) / SPLITS - first;
    }
};

__device__ __forceinline__ void copy_a(const Ring& ring, int stage, const TensorMap& map, const Work& work, int step)
{
    copy_lines(ring.a(stage), map, ring.full(stage), (work.first + step) * 64, work.row);
}

__device__ __forceinline__ void copy_b(const Ring& ring, int stage, const TensorMap& map, const Work& work, int step)
{
    copy_groups(ring.b(stage), map, ring.full(stage), (work.first + step) * 64, work.col / 32);
}

// A warpgroup's results: blocks of 16 x 8 a warp.
struct Sums {
    float at[STEPS_M][GROUP_COLUMNS / 8][4];
};

// Lets the other warpgroup begin with its tile. Until then that must not wait at barriers of the ring, which only tell
// a phase from the one before and the one after.
__device__ __forceinline__ void pass_turn(int group) { arrive_at(2 - group, 256); }
__device__ __forceinline__ void wait_for_turn(int group) { synchronize(1 + group, 256); }

// Multiplies the steps of one share of the work.
__device__ __forceinline__ void multiply_steps(
    Sums& sums, const Ring& ring, Turn& turn, int group, int count)
{
    if (TURNS) {
        wait_for_turn(group);
    }
    uint64 a = matrix_descriptor(ring.a(0) + group_row(group) * 128);
    uint64 b = matrix_descriptor(ring.b(0) + group_col(group) * 128);
    int before = 0;
    for (int step = 0; step < count; ++step) {
        wait_for_phase(ring.full(turn.stage), turn.parity);
        uint64 at = uint64(turn.stage * (STAGE_BYTES >> 4));
        begin_products();
        #pragma unroll
        for (int k = 0; k < 4; ++k) {
            #pragma unroll
            for (int m = 0; m < STEPS_M; ++m) {
                multiply_64_rows(sums.at[m], a + at + m * (64 * 128 >> 4) + k * 2, b + at + k * 2, step + k > 0);
            }
        }
        commit_products();
        if (TURNS && step + 1 == count) {
            pass_turn(group);
        }
        wait_for_products<1>();
        if (step > 0) {
            arrive_by_warp(ring.empty(before));
        }
        before = turn.stage;
        turn.next();
    }
    wait_for_products<0>();
    arrive_by_warp(ring.empty(before));
}
