// Tokens of a row, counted and weighed in bins along their order (see `draw`).
constexpr float OCTAVES = 40.0f; // how far behind the highest weights end
constexpr float NEAR = 13.0f; // octaves that most of the weight lies in
constexpr int REST = BINS - 1; // the bin of what lies behind the last one that is filled
constexpr int OWN_BINS = 4, OWN_ENTRIES = CAPACITY / THREADS, SHARED_BINS = BINS / PARTS;
constexpr int WARPS = THREADS / 32;
constexpr int FEW = 256; // tokens of a list whose places are counted
constexpr int AHEAD = 4; // chunks that a thread loads at a time
constexpr float ONE = 1099511627776.0f; // the greatest weight, two to the power of OCTAVES
constexpr uint ALL_LANES = 0xffffffffu;
static_assert(SHARED_BINS * PARTS == BINS && SHARED_BINS % OWN_BINS == 0, "blocks share the bins");
static_assert(SHARED_BINS <= THREADS * OWN_BINS && OWN_ENTRIES == ITEMS && RUN == CAPACITY, "threads have all of them");

// What is read of another block at a time; a number that the blocks of a row tell each other is the first.
struct __align__(16) Pair {
    uint64 first, second;
};

template <int COUNT>
struct __align__(16) Bins {
    uint counts[COUNT], lows[COUNT], highs[COUNT];
};

// A bin, how many tokens it has, and what they weigh.
struct __align__(16) Bin {
    int at; // BINS: none
    uint count, before, unused;
    uint64 mass, mass_before;
};

struct Memory {
    Bins<BINS> bins; // of the tokens of this block
    Bins<SHARED_BINS> sums; // of all blocks, up to each of the bins that this block sums up
    __align__(16) Entry list[CAPACITY];
    __align__(16) Entry own[PARTS > 1 ? CAPACITY : 2]; // of this block
    uint64 weights[FEW]; // of the list
    Pair told[3];
    Pair ahead[PARTS + 1]; // weight and number of what is ahead of the bins of each block
    Bin found[2];
    uint64 masses[WARPS];
    uint numbers[WARPS];
    uint taken;
    int place;
    Entry entry;
    uint64 mass;
};
static_assert(sizeof(Memory) <= SHARED_BYTES, "as much as is asked for");
constexpr int OF_ENDS = 0, OF_BINS = 1, OF_ALL = 2; // places of what blocks tell each other

struct Row {
    const a_t* logits;
    int length, column;
    int step, begin, end; // chunks of a warp, and which this one has
    float highest, octaves; // of a difference of 1 from the highest logit
    float bins;             // of an octave
};

// Which tokens are in bins: those by their depth, the first `bins` of them, or those of a part of the order, its
// entries divided by 2^shift.
struct Range {
    Entry first, last;
    int shift; // -1: by depth
    int bins;
};

// The tokens that are in the list, in order, and what lies ahead of them; none where none are taken.
struct Window {
    int taken;
    uint before;
    uint64 mass_before, mass;
};

struct Found {
    Entry entry;
    uint64 mass; // up to the end of it
    int place;   // in the list; CAPACITY where that does not begin with the first token
    bool is_there;
};

typedef Pack<a_t, CHUNK> Chunk;

// Calls `visit` for this thread's logits of the row, in chunks that `has` finds worth it.
template <typename Has, typename Visit>
__device__ __forceinline__ void walk(const Row& row, Has has, Visit visit)
{
    for (int chunk = row.begin + int(threadIdx.x) % 32; chunk < row.end; chunk += 32 * AHEAD) {
        Chunk packs[AHEAD];
        #pragma unroll
        for (int a = 0; a < AHEAD; ++a) {
            int place = min(chunk + a * 32, row.end - 1) * CHUNK;
            packs[a] = load_pack<CHUNK>(row.logits + (long long)place * row.column);
        }
        #pragma unroll
        for (int a = 0; a < AHEAD; ++a) {
            if (chunk + a * 32 < row.end && has(packs[a])) {
                #pragma unroll
                for (int u = 0; u < CHUNK; ++u) {
                    visit(float(packs[a][u]), (chunk + a * 32) * CHUNK + u);
                }
            }
        }
    }
}

template <typename Visit>
__device__ __forceinline__ void walk(const Row& row, Visit visit)
{
    walk(row, [](const Chunk&) { return true; }, visit);
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

// The bin at a depth of no more than OCTAVES, nor than the lowest logit's.
__device__ __forceinline__ int bin_at(float depth, const Row& row)
{
    return min(int(whole_of(rounded_down(depth * row.bins))), BINS - 1);
}

__device__ __forceinline__ int bin_of(float value, int token, const Range& range, const Row& row)
{
    float depth = depth_of(value, row);
    if (!(depth <= OCTAVES)) {
        return BINS;
    }
    if (range.shift < 0) {
        return bin_at(depth, row);
    }
    Entry entry = entry_of(value, token);
    return entry >= range.first && entry <= range.last ? int((entry - range.first) >> range.shift) : BINS;
}

template <int COUNT>
__device__ __forceinline__ void put(int bin, uint count, uint64 mass, Bins<COUNT>& bins)
{
    bins.counts[bin] = count;
    bins.lows[bin] = uint(mass);
    bins.highs[bin] = uint(mass >> 32);
}

// The weight of the bins that this block sums up, up to one of them.
__device__ __forceinline__ uint64 mass_up_to(int bin, const Memory& memory)
{
    return (uint64(memory.sums.highs[bin]) << 32) + memory.sums.lows[bin];
}

__device__ __forceinline__ void add_weight(int bin, uint64 mass, Memory& memory)
{
    uint low = uint(mass);
    uint before = atomicAdd(&memory.bins.lows[bin], low);
    uint high = uint(mass >> 32) + (before + low < low ? 1u : 0u);
    if (high != 0u) {
        atomicAdd(&memory.bins.highs[bin], high);
    }
}

__device__ __forceinline__ void add(int bin, uint64 mass, Memory& memory)
{
    atomicAdd(&memory.bins.counts[bin], 1u);
    add_weight(bin, mass, memory);
}

// Adds what the lanes before this one have.
__device__ __forceinline__ void add_lanes_before(uint64& mass, uint& number)
{
    int lane = int(threadIdx.x) % 32;
    #pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        uint64 mass_before = __shfl_up_sync(ALL_LANES, mass, distance);
        uint number_before = __shfl_up_sync(ALL_LANES, number, distance);
        mass += lane >= distance ? mass_before : 0ull;
        number += lane >= distance ? number_before : 0u;
    }
}

// Replaces a thread's weight and number by the sums of the threads before it; returns those of all. It synchronizes the
// block, before and after.
__device__ Pair sum_before(uint64& mass, uint& number, Memory& memory)
{
    int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
    uint64 own_mass = mass;
    uint own_number = number;
    add_lanes_before(mass, number);
    __syncthreads();
    if (lane == 31) {
        memory.masses[warp] = mass;
        memory.numbers[warp] = number;
    }
    __syncthreads();
    uint64 warp_mass = lane < WARPS ? memory.masses[lane] : 0ull;
    uint warp_number = lane < WARPS ? memory.numbers[lane] : 0u;
    add_lanes_before(warp_mass, warp_number);
    uint64 before = __shfl_sync(ALL_LANES, warp_mass, warp > 0 ? warp - 1 : 0);
    uint count_before = __shfl_sync(ALL_LANES, warp_number, warp > 0 ? warp - 1 : 0);
    mass += (warp > 0 ? before : 0ull) - own_mass;
    number += (warp > 0 ? count_before : 0u) - own_number;
    return {__shfl_sync(ALL_LANES, warp_mass, 31), __shfl_sync(ALL_LANES, warp_number, 31)};
}

// Waits for all threads of the row: what they wrote in shared memory can be read behind it.
__device__ __forceinline__ void synchronize_row()
{
#if PARTS > 1
    synchronize_cluster();
#else
    __syncthreads();
#endif
}

// Sixteen bytes of shared memory, of a block of the row.
template <typename T>
__device__ __forceinline__ void load_of_block(const void* place, int rank, T& value)
{
    static_assert(sizeof(T) == 16, "what is read at a time");
#if PARTS > 1
    float4 found = load_from_cluster(shared_address(place), rank);
    memcpy(&value, &found, 16);
#else
    memcpy(&value, place, 16);
#endif
}

// Tells all blocks of the row a number, waits for all threads, and combines what they tell. Behind another wait a place
// is free again.
template <typename Combine>
__device__ __forceinline__ void exchange(int place, uint64 number, Memory& memory, Combine combine)
{
    if (threadIdx.x == 0) {
        memory.told[place].first = number;
    }
    synchronize_row();
    Pair found;
    load_of_block(&memory.told[place], int(threadIdx.x) % PARTS, found);
    #pragma unroll
    for (int rank = 0; rank < PARTS; ++rank) {
        combine(rank, __shfl_sync(ALL_LANES, found.first, rank));
    }
}

// Of the row.
__device__ Entry least_of(Entry entry, Memory& memory)
{
    int lane = int(threadIdx.x) % 32;
    #pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        entry = min(entry, Entry(__shfl_xor_sync(ALL_LANES, entry, distance)));
    }
    __syncthreads();
    if (lane == 0) {
        memory.masses[threadIdx.x / 32] = entry;
    }
    __syncthreads();
    entry = lane < WARPS ? memory.masses[lane] : ~0ull;
    #pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        entry = min(entry, Entry(__shfl_xor_sync(ALL_LANES, entry, distance)));
    }
    exchange(OF_BINS, entry, memory, [&](int, uint64 of_block) { entry = min(entry, Entry(of_block)); });
    synchronize_row();
    return entry;
}

__device__ __forceinline__ void clear_bins(Memory& memory)
{
    __syncthreads();
    for (int bin = int(threadIdx.x); bin < BINS; bin += THREADS) {
        put(bin, 0u, 0ull, memory.bins);
    }
    __syncthreads();
}

// Adds up the bins of all blocks: each block does so for its part of them. They are not to be filled again before all
// blocks have waited for each other.
__device__ __noinline__ void sum_bins(Memory& memory)
{
    synchronize_row();
    int rank = int(blockIdx.x) % PARTS, first = int(threadIdx.x) * OWN_BINS;
    uint count[OWN_BINS] = {}, number = 0u;
    uint64 mass[OWN_BINS] = {}, weight = 0ull;
    if (first < SHARED_BINS) {
        #pragma unroll 4
        for (int other = 0; other < PARTS; ++other) {
            uint counts[4], lows[4], highs[4];
            load_of_block(memory.bins.counts + rank * SHARED_BINS + first, other, counts);
            load_of_block(memory.bins.lows + rank * SHARED_BINS + first, other, lows);
            load_of_block(memory.bins.highs + rank * SHARED_BINS + first, other, highs);
            #pragma unroll
            for (int u = 0; u < OWN_BINS; ++u) {
                count[u] += counts[u];
                mass[u] += (uint64(highs[u]) << 32) + lows[u];
            }
        }
        #pragma unroll
        for (int u = 0; u < OWN_BINS; ++u) {
            number += count[u];
            weight += mass[u];
        }
    }
    Pair all = sum_before(weight, number, memory);
    if (first < SHARED_BINS) {
        #pragma unroll
        for (int u = 0; u < OWN_BINS; ++u) {
            number += count[u];
            weight += mass[u];
            put(first + u, number, weight, memory.sums);
        }
    }
    if (threadIdx.x == 0) {
        memory.told[OF_BINS] = all;
    }
    synchronize_row();
    if (threadIdx.x < 32) {
        Pair of_block, ahead = {0ull, 0ull};
        load_of_block(&memory.told[OF_BINS], int(threadIdx.x) % PARTS, of_block);
        #pragma unroll
        for (int other = 0; other <= PARTS; ++other) {
            if (int(threadIdx.x) == other) {
                memory.ahead[other] = ahead;
            }
            ahead.first += __shfl_sync(ALL_LANES, of_block.first, other % PARTS);
            ahead.second += __shfl_sync(ALL_LANES, of_block.second, other % PARTS);
        }
    }
    __syncthreads();
}

// Fills the bins with the tokens of a range; by depth those behind the last one are weighed together.
__device__ __noinline__ void fill_bins(const Range& range, const Row& row, Memory& memory)
{
    clear_bins(memory);
    if (range.shift < 0) {
        uint64 rest = 0ull;
        walk(row, [&](float value, int) {
            float depth = depth_of(value, row);
            if (depth <= OCTAVES) {
                uint64 weight = weight_of(depth);
                int bin = bin_at(depth, row);
                if (bin < range.bins) {
                    add(bin, weight, memory);
                } else {
                    rest += weight;
                }
            }
        });
        uint number = 0u;
        add_lanes_before(rest, number);
        if (threadIdx.x % 32 == 31 && rest > 0ull) {
            add_weight(REST, rest, memory);
        }
    } else {
        walk(row, [&](float value, int token) {
            int bin = bin_of(value, token, range, row);
            if (bin < BINS) {
                add(bin, weight_of(depth_of(value, row)), memory);
            }
        });
    }
    sum_bins(memory);
}

// The bin in which `target` lies, as a number of tokens or as a weight ahead of it.
__device__ __noinline__ Bin bin_with(uint64 target, bool by_count, Memory& memory)
{
    int owner = PARTS;
    #pragma unroll
    for (int rank = PARTS - 1; rank >= 0; --rank) {
        const Pair& end = memory.ahead[rank + 1];
        owner = target < (by_count ? end.second : end.first) ? rank : owner;
    }
    Bin found = {BINS, 0u, 0u, 0u, 0ull, 0ull};
    if (owner == PARTS) {
        return found;
    }
    if (owner == int(blockIdx.x) % PARTS) {
        Pair ahead = memory.ahead[owner];
        for (int bin = int(threadIdx.x); bin < SHARED_BINS; bin += THREADS) {
            uint before = uint(ahead.second), end = uint(ahead.second) + memory.sums.counts[bin];
            uint64 mass_before = ahead.first, mass_end = ahead.first + mass_up_to(bin, memory);
            if (bin > 0) {
                before += memory.sums.counts[bin - 1];
                mass_before += mass_up_to(bin - 1, memory);
            }
            if (by_count ? before <= target && target < end : mass_before <= target && target < mass_end) {
                memory.found[by_count] = {
                    owner * SHARED_BINS + bin, end - before, before, 0u, mass_end - mass_before, mass_before};
            }
        }
    }
    synchronize_row();
    const Bin* place = &memory.found[by_count];
    Pair words[2];
    load_of_block(place, owner, words[0]);
    load_of_block(&place->mass, owner, words[1]);
    memcpy(&found, words, sizeof(Bin));
    return found;
}
