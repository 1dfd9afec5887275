// A row of logits, of which each block has a part, and what a block has in shared memory (see `draw`).
constexpr float OCTAVES = 40.0f; // how far behind the highest weights end
constexpr float NEAR = 13.0f; // octaves that most of the weight lies in
constexpr int REST = BINS - 1; // the bin of what lies behind the last one that is filled
constexpr int OWN_BINS = 4, OWN_ENTRIES = CAPACITY / THREADS, SHARED_BINS = BINS / PARTS;
constexpr int WARPS = THREADS / 32;
constexpr int FEW = 256; // tokens of a list whose places are counted
constexpr int AHEAD = 4; // what a thread loads: so many chunks or, later, logits, of which so many are neighbours
constexpr int NEIGHBOURS = CHUNK > 1 ? (HELD > 0 ? 4 : 8) / int(sizeof(a_t)) : 1;
constexpr int SHARERS = PARTS < 4 ? PARTS : 4; // lanes that add up bins together
constexpr float ONE = 1099511627776.0f; // the greatest weight, two to the power of OCTAVES
constexpr uint ALL_LANES = 0xffffffffu;
static_assert(SHARED_BINS * PARTS == BINS && SHARED_BINS % OWN_BINS == 0, "blocks share the bins");
static_assert(SHARED_BINS % 32 == 0 && SHARED_BINS * SHARERS <= THREADS * OWN_BINS, "and the threads of a block");
static_assert(OWN_ENTRIES == ITEMS && RUN == CAPACITY, "threads have the list");

// What blocks tell each other.
struct __align__(16) Pair {
    uint64 first, second;
};

template <int COUNT>
struct __align__(16) Bins {
    uint counts[COUNT], lows[COUNT], highs[COUNT];
};

struct Memory {
    Bins<BINS> bins; // of the tokens of this block
    Bins<(PARTS > 1 ? SHARED_BINS : 4)> sums; // of all blocks, up to each of the bins that this block sums up
    __align__(16) Entry list[CAPACITY];
    __align__(16) uint64 reached[CAPACITY]; // what the list weighs up to each of its tokens; before, what this block lists
    Pair told[4][PARTS];
    Pair found[2][2]; // bins, by weight and by number
    uint64 masses[WARPS];
    uint numbers[WARPS];
    uint taken;
    int place;
    uint64 mass;
    __align__(16) a_t held[HELD > 0 ? HELD : 8]; // the logits that this block has, where there is room for them
};
static_assert(sizeof(Memory) <= SHARED_BYTES, "as much as is asked for");
constexpr int OF_ENDS = 0, OF_BINS = 1, OF_LISTS = 2, OF_ALL = 3; // places of what blocks tell each other

struct Row {
    const a_t* logits;
    const a_t* held; // the same, where they are held
    int length, column;
    int step, begin, end;   // tokens of a warp, and which this one has
    float highest, octaves; // of a difference of 1 from the highest logit
    float bins;             // of an octave

    template <int COUNT>
    __device__ __forceinline__ Pack<a_t, COUNT> pack(int token) const
    {
        return load_pack<COUNT>(HELD > 0 ? held + token : logits + (long long)token * column);
    }
};

typedef Pack<a_t, CHUNK> Chunk;

// Calls `visit` for this thread's logits of the row, COUNT neighbours at a time, of which so many are loaded ahead. What a
// block runs once is fetched once: few copies of it are quicker than many.
template <int COUNT, int LOADED, typename Load, typename Visit>
__device__ __forceinline__ void walk(const Row& row, Load load, Visit visit)
{
    #pragma unroll 1
    for (int at = row.begin + int(threadIdx.x) % 32 * COUNT; at < row.end; at += 32 * COUNT * LOADED) {
        Pack<a_t, COUNT> packs[LOADED];
        #pragma unroll
        for (int each = 0; each < LOADED; ++each) {
            packs[each] = load(min(at + each * 32 * COUNT, row.end - COUNT));
        }
        #pragma unroll
        for (int each = 0; each < LOADED; ++each) {
            if (at + each * 32 * COUNT < row.end) {
                #pragma unroll
                for (int u = 0; u < COUNT; ++u) {
                    visit(float(packs[each][u]), at + each * 32 * COUNT + u);
                }
            }
        }
    }
}

template <typename Visit>
__device__ __forceinline__ void walk(const Row& row, Visit visit)
{
    walk<NEIGHBOURS, AHEAD / NEIGHBOURS>(row, [&](int token) { return row.pack<NEIGHBOURS>(token); }, visit);
}

// How far a logit is behind the highest, in octaves of its weight.
__device__ __forceinline__ float depth_of(float value, const Row& row) { return (row.highest - value) * row.octaves; }

// The weight at a depth, not rounded down yet.
__device__ __forceinline__ float scaled_weight(float depth) { return power_of_two(-depth) * ONE; }

// A number from 0 to below 2^22, rounded down, in the last bits of a float: conversions take four times as long as sums.
constexpr float WHOLE = 8388608.0f;
__device__ __forceinline__ float rounded_down(float number) { return __fadd_rd(number, WHOLE); }
__device__ __forceinline__ uint whole_of(float rounded) { return __float_as_uint(rounded) - __float_as_uint(WHOLE); }

// A weight, rounded down.
__device__ __forceinline__ uint64 whole_weight(float scaled)
{
    float high = rounded_down(scaled * (1.0f / 1048576.0f)); // in units of 2^20
    float low = rounded_down(scaled - (high - WHOLE) * 1048576.0f);
    return (uint64(whole_of(high)) << 20) + whole_of(low);
}

__device__ __forceinline__ uint64 weight_of(float depth) { return whole_weight(scaled_weight(depth)); }
