// A tile of a matrix product whose operands the copy engine brings: TILE_M x TILE_N results, 64 of the common dimension at a
// time, A_STAGES and B_STAGES of them on their way into shared memory. Two warpgroups multiply; with TURNS each has tiles of its own, else
// they share the rows of one, or the columns where there are no more rows than one multiplies.
constexpr bool SHARED_COLUMNS = TILE_M == 64 && !TURNS;
constexpr int GROUP_ROWS = TURNS || SHARED_COLUMNS ? TILE_M : TILE_M / 2, GROUP_COLUMNS = SHARED_COLUMNS ? TILE_N / 2 : TILE_N;
constexpr int THREADS = 384, STEPS_M = GROUP_ROWS / 64, GROUPS = GROUP_COLUMNS / 32;
constexpr int A_BYTES = TILE_M * 128, B_BYTES = TILE_N * 128, RING_BYTES = A_STAGES * A_BYTES + B_STAGES * B_BYTES;
constexpr int A_COPIED = COPIED_ROWS * 128; // of a matrix of fewer rows than a tile; sums of other rows are stored nowhere
static_assert(GROUP_COLUMNS % 32 == 0 && GROUP_ROWS % 64 == 0, "whole groups of lines");
static_assert(SPLITS == 1 || !TURNS, "blocks of a cluster add one tile");

// Where the results of a warpgroup begin in a tile.
__device__ __forceinline__ int group_row(int group) { return TURNS || SHARED_COLUMNS ? 0 : group * GROUP_ROWS; }
__device__ __forceinline__ int group_col(int group) { return SHARED_COLUMNS ? group * GROUP_COLUMNS : 0; }

// One operand's steps in shared memory, with barriers that say when they are there, and when they are no longer needed.
template <int STAGES, int BYTES>
struct Ring {
    uint base, barriers;
    __device__ __forceinline__ uint at(int stage) const { return base + stage * BYTES; }
    __device__ __forceinline__ uint full(int stage) const { return barriers + stage * 16; }
    __device__ __forceinline__ uint empty(int stage) const { return full(stage) + 8; }
    __device__ void make() const
    {
        for (int stage = 0; stage < STAGES; ++stage) {
            make_barrier(full(stage), 1);
            make_barrier(empty(stage), TURNS ? 4 : 8); // warps
        }
    }
};

// The rings of both operands: the one that comes from memory has more on its way than the one that lies in the cache.
struct Rings {
    Ring<A_STAGES, A_BYTES> a;
    Ring<B_STAGES, B_BYTES> b;
    __device__ __forceinline__ explicit Rings(uint base)
        : a{base, base + RING_BYTES}, b{base + A_STAGES * A_BYTES, base + RING_BYTES + A_STAGES * 16}
    {
    }
};

// A stage of a ring, and the parity of its barriers' phase.
template <int STAGES>
struct Turn {
    int stage = 0, parity = 0;
    __device__ __forceinline__ void next()
    {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
    __device__ __forceinline__ void skip(int count)
    {
        int turns = stage + count;
        stage = turns % STAGES;
        parity ^= turns / STAGES & 1;
    }
};
struct Turns {
    Turn<A_STAGES> a;
    Turn<B_STAGES> b;
};

// A block's share of the work: a tile, and the steps along k. Tiles are in panels of PANEL rows of them, inside of which rows
// come first: blocks then share what they read of both operands.
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

// A warpgroup's results: blocks of 16 x 8 a warp.
struct Sums {
    float at[STEPS_M][GROUP_COLUMNS / 8][4];
};

// Lets the other warpgroup begin with its tile. Until then it must not look at the ring: its barriers tell phases only from
// those right before and after them.
__device__ __forceinline__ void pass_turn(int group) { arrive_at(2 - group, 256); }
__device__ __forceinline__ void wait_for_turn(int group) { synchronize(1 + group, 256); }

// Multiplies the steps of one share of the work.
__device__ __forceinline__ void multiply_steps(Sums& sums, const Rings& rings, Turns& turns, int group, int count)
{
    if (TURNS) {
        wait_for_turn(group);
    }
    uint64 a = matrix_descriptor(rings.a.at(0) + group_row(group) * 128);
    uint64 b = matrix_descriptor(rings.b.at(0) + group_col(group) * 128);
    Turns before;
    for (int step = 0; step < count; ++step) {
        wait_for_phase(rings.b.full(turns.b.stage), turns.b.parity);
        wait_for_phase(rings.a.full(turns.a.stage), turns.a.parity);
        uint64 a_at = a + uint64(turns.a.stage * (A_BYTES >> 4)), b_at = b + uint64(turns.b.stage * (B_BYTES >> 4));
        begin_products();
        #pragma unroll
        for (int k = 0; k < 4; ++k) {
            #pragma unroll
            for (int m = 0; m < STEPS_M; ++m) {
                multiply_64_rows(sums.at[m], a_at + m * (64 * 128 >> 4) + k * 2, b_at + k * 2, step + k > 0);
            }
        }
        commit_products();
        if (TURNS && step + 1 == count) {
            pass_turn(group);
        }
        wait_for_products<1>();
        if (step > 0) {
            arrive_by_warp(rings.a.empty(before.a.stage));
            arrive_by_warp(rings.b.empty(before.b.stage));
        }
        before = turns;
        turns.a.next();
        turns.b.next();
    }
    wait_for_products<0>();
    arrive_by_warp(rings.a.empty(before.a.stage));
    arrive_by_warp(rings.b.empty(before.b.stage));
}
