// Tokens of a row, counted and weighed in bins along their order (see `draw`).
constexpr float PER_UNIT = 48.0f; // bins of an exponent of 1: behind BINS of them nothing has a weight
constexpr float PER_BIN = -1.44269504f / PER_UNIT; // of the binary exponent
constexpr int NEAR = 432; // bins that most of the weight lies in
constexpr int OWN_BINS = 4, OWN_ENTRIES = CAPACITY / THREADS, SHARED_BINS = BINS / PARTS;
constexpr int WARPS = THREADS / 32;
constexpr int AHEAD = 4; // chunks that a thread loads at a time
constexpr float ONE = 1099511627776.0f; // the greatest weight
constexpr uint ALL_LANES = 0xffffffffu;
static_assert(SHARED_BINS * PARTS == BINS && SHARED_BINS % OWN_BINS == 0, "blocks share the bins");
static_assert(BINS <= THREADS * OWN_BINS && OWN_ENTRIES == ITEMS && RUN == CAPACITY, "threads have all of them");

// What is read of another block at a time; a number that the blocks of a row tell each other is the first.
struct __align__(16) Pair {
    uint64 first, second;
};

template <int COUNT>
struct __align__(16) Bins {
    uint counts[COUNT], lows[COUNT], highs[COUNT];
};

struct Memory {
    Bins<BINS> bins;
    Bins<SHARED_BINS> summed; // those of all blocks that this one sums up
    __align__(16) Entry list[CAPACITY];
    __align__(16) Entry own[PARTS > 1 ? CAPACITY : 2]; // of this block
    Pair told[3];
    uint64 masses[WARPS];
    uint numbers[WARPS];
    uint taken;
    int place;
    Entry entry;
    uint64 mass;
};
static_assert(sizeof(Memory) <= SHARED_BYTES, "as much as is asked for");
constexpr int OF_HIGHEST = 0, OF_BINS = 1, OF_ALL = 2; // places of what blocks tell each other

struct Row {
    const a_t* logits;
    int length, column;
    int step, begin, end; // chunks of a warp, and which this one has
    float highest, bins;  // of a difference of 1 from the highest logit
};

// Which tokens are in bins: those by their exponent, or those of a part of the order, its entries divided by 2^shift.
struct Range {
    Entry first, last;
    int shift; // -1: by exponent
    int bins;
};

// Bins whose tokens are in the list, in order; none where the last one is ahead of the first.
struct Window {
    int first, last, taken;
};

struct Found {
    Entry entry;
    uint64 mass; // up to the end of it
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

// How far a logit is behind the highest, in bins.
__device__ __forceinline__ float distance_of(float value, const Row& row) { return (row.highest - value) * row.bins; }

// The weight at a distance, not rounded down yet.
__device__ __forceinline__ float scaled_weight(float distance)
{
    return power_of_two(distance * PER_BIN) * ONE;
}

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

__device__ __forceinline__ uint64 weight_of(float distance) { return whole_weight(scaled_weight(distance)); }

__device__ __forceinline__ int bin_of(float value, int token, const Range& range, const Row& row)
{
    float distance = distance_of(value, row);
    if (!(distance < float(BINS))) {
        return BINS;
    }
    if (range.shift < 0) {
        return int(whole_of(rounded_down(distance)));
    }
    Entry entry = entry_of(value, token);
    return entry >= range.first && entry <= range.last ? int((entry - range.first) >> range.shift) : BINS;
}

__device__ __forceinline__ uint count_at(int bin, const Memory& memory)
{
    return bin < 0 ? 0u : memory.bins.counts[bin];
}

__device__ __forceinline__ uint64 mass_at(int bin, const Memory& memory)
{
    return bin < 0 ? 0ull : (uint64(memory.bins.highs[bin]) << 32) + memory.bins.lows[bin];
}

template <int COUNT>
__device__ __forceinline__ void put(int bin, uint count, uint64 mass, Bins<COUNT>& bins)
{
    bins.counts[bin] = count;
    bins.lows[bin] = uint(mass);
    bins.highs[bin] = uint(mass >> 32);
}

__device__ __forceinline__ void add(int bin, uint64 mass, Memory& memory)
{
    uint low = uint(mass);
    atomicAdd(&memory.bins.counts[bin], 1u);
    uint before = atomicAdd(&memory.bins.lows[bin], low);
    uint high = uint(mass >> 32) + (before + low < low ? 1u : 0u);
    if (high != 0u) {
        atomicAdd(&memory.bins.highs[bin], high);
    }
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

// Replaces a thread's weight and number by the sums of the threads before it; returns the weight of all. It
// synchronizes the block, before and after.
__device__ uint64 sum_before(uint64& mass, uint& number, Memory& memory)
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
    return __shfl_sync(ALL_LANES, warp_mass, 31);
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

// Replaces counts and weights of bins by those of all blocks: each block sums up some, which the others then read.
__device__ __forceinline__ void combine_bins(Memory& memory)
{
#if PARTS > 1
    int rank = int(blockIdx.x) % PARTS, first = int(threadIdx.x) * OWN_BINS;
    if (first < SHARED_BINS) {
        uint count[OWN_BINS] = {};
        uint64 mass[OWN_BINS] = {};
        #pragma unroll 4
        for (int other = 0; other < PARTS; ++other) {
            uint number[4], low[4], high[4];
            load_of_block(memory.bins.counts + rank * SHARED_BINS + first, other, number);
            load_of_block(memory.bins.lows + rank * SHARED_BINS + first, other, low);
            load_of_block(memory.bins.highs + rank * SHARED_BINS + first, other, high);
            #pragma unroll
            for (int u = 0; u < OWN_BINS; ++u) {
                count[u] += number[u];
                mass[u] += (uint64(high[u]) << 32) + low[u];
            }
        }
        #pragma unroll
        for (int u = 0; u < OWN_BINS; ++u) {
            put(first + u, count[u], mass[u], memory.summed);
        }
    }
    synchronize_row();
    constexpr int QUARTETS = SHARED_BINS / 4;
    const uint* summed = memory.summed.counts;
    uint* all = memory.bins.counts; // lows and highs lie behind counts
    for (int quartet = int(threadIdx.x); quartet < 3 * BINS / 4; quartet += THREADS) {
        int part = quartet / (BINS / 4), at = quartet % (BINS / 4); // of counts, lows or highs
        uint word[4];
        load_of_block(summed + (part * QUARTETS + at % QUARTETS) * 4, at / QUARTETS, word);
        memcpy(all + quartet * 4, word, 16);
    }
    __syncthreads();
#endif
}

// Replaces counts and weights of bins by the sums of all blocks up to each bin; gives the sum of a weight of each block.
__device__ uint64 add_up_bins(uint64 weight, Memory& memory)
{
    uint64 sum = 0ull;
    exchange(OF_BINS, weight, memory, [&](int, uint64 of_block) { sum += of_block; });
    combine_bins(memory);
    int first = int(threadIdx.x) * OWN_BINS;
    uint64 mass = 0ull;
    uint count = 0u;
    for (int bin = first; bin < min(first + OWN_BINS, BINS); ++bin) {
        mass += mass_at(bin, memory);
        count += count_at(bin, memory);
    }
    sum_before(mass, count, memory);
    for (int bin = first; bin < min(first + OWN_BINS, BINS); ++bin) {
        mass += mass_at(bin, memory);
        count += count_at(bin, memory);
        put(bin, count, mass, memory.bins);
    }
    __syncthreads();
    return sum;
}

// Fills the bins with the tokens of a range; those behind its last bin are weighed together, if at all. Gives what all
// of them weigh.
__device__ __noinline__ uint64 fill_bins(bool weighs_rest, const Range& range, const Row& row, Memory& memory)
{
    clear_bins(memory);
    uint64 all = 0ull;
    uint number = 0u;
    if (range.shift < 0) {
        float end = float(range.bins), last = weighs_rest ? float(BINS) : end;
        walk(row, [&](float value, int) {
            float distance = distance_of(value, row);
            if (distance < last) {
                uint64 weight = weight_of(distance);
                if (distance < end) {
                    add(int(whole_of(rounded_down(distance))), weight, memory);
                }
                all += weight;
            }
        });
    } else {
        walk(row, [&](float value, int token) {
            int bin = bin_of(value, token, range, row);
            if (bin < BINS) {
                add(bin, weight_of(distance_of(value, row)), memory);
            }
        });
    }
    return add_up_bins(sum_before(all, number, memory), memory);
}

__device__ __forceinline__ bool is_behind(int bin, uint64 target, bool by_count, const Memory& memory)
{
    return (by_count ? uint64(count_at(bin, memory)) : mass_at(bin, memory)) > target;
}

// The first bin that ends behind `target`; BINS where there is none.
__device__ int bin_with(uint64 target, bool by_count, Memory& memory)
{
    __syncthreads();
    if (threadIdx.x == 0) {
        memory.place = BINS;
    }
    __syncthreads();
    for (int bin = int(threadIdx.x); bin < BINS; bin += THREADS) {
        if (is_behind(bin, target, by_count, memory) && (bin == 0 || !is_behind(bin - 1, target, by_count, memory))) {
            memory.place = bin;
        }
    }
    __syncthreads();
    return memory.place;
}
