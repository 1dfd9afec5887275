// Tokens of a row, counted and weighed in bins along their order (see `draw`).
constexpr float PER_UNIT = 48.0f; // bins of an exponent of 1: behind BINS of them nothing has a weight
constexpr float PER_BIN = -1.44269504f / PER_UNIT; // of the binary exponent
constexpr int NEAR = 432; // bins that most of the weight lies in; the weight of a token behind them has 32 bits
constexpr float ONE = 1099511627776.0f; // the greatest weight
constexpr int OWN_BINS = 4;
constexpr int OWN_ENTRIES = CAPACITY / THREADS;
constexpr int WARPS = THREADS / 32;
constexpr int AHEAD = 4; // chunks that a thread loads at a time
constexpr int STEP = PARTS * THREADS * CHUNK; // tokens of all blocks of a row
constexpr uint ALL_LANES = 0xffffffffu;
static_assert(BINS % OWN_BINS == 0 && BINS <= THREADS * OWN_BINS, "threads have all bins");

// Two numbers that the blocks of a row tell each other.
struct __align__(16) Pair {
    uint64 first, second;
};

struct Memory {
    __align__(16) uint counts[BINS], lows[BINS], highs[BINS];
    __align__(16) Entry list[CAPACITY];
    __align__(16) Entry own[PARTS > 1 ? CAPACITY : 2]; // of this block
    Pair told;
    uint64 masses[WARPS];
    uint numbers[WARPS];
    uint taken;
    int place;
    Entry entry;
    uint64 mass;
};
static_assert(sizeof(Memory) <= SHARED_BYTES, "as much as is asked for");

struct Row {
    const a_t* logits;
    int length, column;
    int first; // token of this thread
    float highest, bins; // of a difference of 1 from the highest logit
    uint64 least; // weight that is not below the share of the likeliest
};

// Which tokens are in bins: those by their exponent, or those of a part of the order, its entries divided by 2^shift.
struct Range {
    Entry first, last;
    int shift; // -1: by exponent
    int bins;
};

// Tokens in order in the list, and what lies before and up to the end of them.
struct Window {
    uint64 mass_before, mass_end;
    uint count_before, count_end;
};

struct Found {
    Entry entry;
    uint64 mass; // up to the end of it
    bool is_there;
};

// Calls `visit` for this thread's logits of the row, in the order of tokens.
template <typename Visit>
__device__ __forceinline__ void walk(const Row& row, Visit visit)
{
    for (int first = row.first; first < row.length; first += AHEAD * STEP) {
        Pack<a_t, CHUNK> packs[AHEAD];
        #pragma unroll
        for (int a = 0; a < AHEAD; ++a) {
            int place = min(first + a * STEP, row.length - CHUNK);
            packs[a] = load_pack<CHUNK>(row.logits + (long long)place * row.column);
        }
        #pragma unroll
        for (int a = 0; a < AHEAD; ++a) {
            if (first + a * STEP < row.length) {
                #pragma unroll
                for (int u = 0; u < CHUNK; ++u) {
                    visit(float(packs[a][u]), first + a * STEP + u);
                }
            }
        }
    }
}

// How far a logit is behind the highest, in bins.
__device__ __forceinline__ float distance_of(float value, const Row& row) { return (row.highest - value) * row.bins; }

// The weight at a distance, not rounded down yet.
__device__ __forceinline__ float scaled_weight(float distance)
{
    return power_of_two(distance * PER_BIN) * ONE;
}

__device__ __forceinline__ uint64 weight_of(float distance) { return uint64(scaled_weight(distance)); }

__device__ __forceinline__ int bin_of(float value, int token, const Range& range, const Row& row)
{
    float distance = distance_of(value, row);
    if (!(distance < float(BINS))) {
        return BINS;
    }
    if (range.shift < 0) {
        return int(distance);
    }
    Entry entry = entry_of(value, token);
    return entry >= range.first && entry <= range.last ? int((entry - range.first) >> range.shift) : BINS;
}

__device__ __forceinline__ uint count_at(int bin, const Memory& memory) { return bin < 0 ? 0u : memory.counts[bin]; }

__device__ __forceinline__ uint64 mass_at(int bin, const Memory& memory)
{
    return bin < 0 ? 0ull : (uint64(memory.highs[bin]) << 32) + memory.lows[bin];
}

__device__ __forceinline__ void put(int bin, uint count, uint64 mass, Memory& memory)
{
    memory.counts[bin] = count;
    memory.lows[bin] = uint(mass);
    memory.highs[bin] = uint(mass >> 32);
}

__device__ __forceinline__ void add(int bin, uint64 mass, Memory& memory)
{
    uint low = uint(mass);
    atomicAdd(&memory.counts[bin], 1u);
    uint before = atomicAdd(&memory.lows[bin], low);
    uint high = uint(mass >> 32) + (before + low < low ? 1u : 0u);
    if (high != 0u) {
        atomicAdd(&memory.highs[bin], high);
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

// Of the block.
__device__ __forceinline__ uint64 sum_of(uint64 mass, Memory& memory)
{
    uint number = 0u;
    return sum_before(mass, number, memory);
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

// Tells all blocks of the row a pair of numbers, and combines what they tell; the others' memory is as it was before.
template <typename Combine>
__device__ __forceinline__ void exchange(uint64 first, uint64 second, Memory& memory, Combine combine)
{
    if (threadIdx.x == 0) {
        memory.told = {first, second};
    }
    synchronize_row();
    Pair found;
    load_of_block(&memory.told, int(threadIdx.x) % PARTS, found);
    #pragma unroll
    for (int rank = 0; rank < PARTS; ++rank) {
        combine(rank, {__shfl_sync(ALL_LANES, found.first, rank), __shfl_sync(ALL_LANES, found.second, rank)});
    }
    synchronize_row();
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
    exchange(entry, 0ull, memory, [&](int, const Pair& of_block) { entry = min(entry, Entry(of_block.first)); });
    return entry;
}

__device__ __forceinline__ void clear_bins(Memory& memory)
{
    __syncthreads();
    for (int bin = int(threadIdx.x); bin < BINS; bin += THREADS) {
        put(bin, 0u, 0ull, memory);
    }
    __syncthreads();
}

// Replaces counts and weights of bins, of all blocks, by the sums up to each bin. Gives the sums of two weights of the
// blocks.
__device__ Pair add_up_bins(uint64 first_weight, uint64 second_weight, Memory& memory)
{
    int first = int(threadIdx.x) * OWN_BINS;
    uint64 mass = 0ull, masses[OWN_BINS] = {};
    uint count = 0u, counts[OWN_BINS] = {};
    Pair sums = {};
    exchange(first_weight, second_weight, memory, [&](int, const Pair& of_block) {
        sums.first += of_block.first;
        sums.second += of_block.second;
    });
    if (first < BINS) {
        #pragma unroll 2
        for (int rank = 0; rank < PARTS; ++rank) {
            uint number[4], low[4], high[4];
            load_of_block(memory.counts + first, rank, number);
            load_of_block(memory.lows + first, rank, low);
            load_of_block(memory.highs + first, rank, high);
            #pragma unroll
            for (int u = 0; u < OWN_BINS; ++u) {
                counts[u] += number[u];
                masses[u] += (uint64(high[u]) << 32) + low[u];
            }
        }
    }
    synchronize_row();
    #pragma unroll
    for (int u = 0; u < OWN_BINS; ++u) {
        mass += masses[u];
        count += counts[u];
    }
    sum_before(mass, count, memory);
    #pragma unroll
    for (int u = 0; u < OWN_BINS; ++u) {
        mass += masses[u];
        count += counts[u];
        if (first < BINS) {
            put(first + u, count, mass, memory);
        }
    }
    __syncthreads();
    return sums;
}

// Fills the bins with the tokens of a range; those behind its last bin are weighed together, if at all. Gives what all
// of them weigh, and those that are no less likely than a share of the likeliest.
__device__ __noinline__ uint64 fill_bins(
    uint64& likely, bool weighs_rest, const Range& range, const Row& row, Memory& memory)
{
    clear_bins(memory);
    uint64 all = 0ull, enough = 0ull;
    if (range.shift < 0) {
        float end = float(range.bins), last = weighs_rest ? float(BINS) : end;
        bool has_least = row.least > 0;
        walk(row, [&](float value, int) {
            float distance = distance_of(value, row);
            if (distance < last) {
                float scaled = scaled_weight(distance);
                uint64 weight;
                if (distance < end) {
                    weight = uint64(scaled);
                    add(int(distance), weight, memory);
                } else {
                    weight = distance < float(NEAR) ? uint64(scaled) : uint64(uint(scaled));
                }
                all += weight;
                enough += has_least && weight >= row.least ? weight : 0ull;
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
    all = sum_of(all, memory);
    Pair sums = add_up_bins(all, row.least > 0 ? sum_of(enough, memory) : all, memory);
    likely = sums.second;
    return sums.first;
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
