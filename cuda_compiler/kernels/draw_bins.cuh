// Tokens of a row, counted and weighed in bins along their order (see `draw`).
constexpr int BINS = 1344;
constexpr float PER_UNIT = 48.0f; // bins of an exponent of 1: behind the last bin nothing has a weight
constexpr float PER_BIN = -1.44269504f / PER_UNIT; // of the binary exponent
constexpr int NEAR = 432; // bins that most of the weight lies in; the weight of a token behind them has 32 bits
constexpr float ONE = 1099511627776.0f; // the greatest weight
constexpr int OWN_BINS = (BINS + THREADS - 1) / THREADS;
constexpr int OWN_ENTRIES = CAPACITY / THREADS;
constexpr int WARPS = THREADS / 32;
constexpr int AHEAD = 4; // chunks that a thread loads at a time
constexpr uint ALL_LANES = 0xffffffffu;

struct Memory {
    uint counts[BINS], lows[BINS], highs[BINS];
    Entry list[CAPACITY];
    uint64 masses[WARPS];
    uint numbers[WARPS];
    uint taken;
    int place;
    Entry entry;
    uint64 mass;
};

struct Row {
    const a_t* logits;
    int length, column;
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
    constexpr int STEP = THREADS * CHUNK;
    int first = int(threadIdx.x) * CHUNK;
    for (; first + (AHEAD - 1) * STEP < row.length; first += AHEAD * STEP) {
        Pack<a_t, CHUNK> packs[AHEAD];
        #pragma unroll
        for (int a = 0; a < AHEAD; ++a) {
            packs[a] = load_pack<CHUNK>(row.logits + (long long)(first + a * STEP) * row.column);
        }
        #pragma unroll
        for (int a = 0; a < AHEAD; ++a) {
            #pragma unroll
            for (int u = 0; u < CHUNK; ++u) {
                visit(float(packs[a][u]), first + a * STEP + u);
            }
        }
    }
    for (; first < row.length; first += STEP) {
        Pack<a_t, CHUNK> pack = load_pack<CHUNK>(row.logits + (long long)first * row.column);
        #pragma unroll
        for (int u = 0; u < CHUNK; ++u) {
            visit(float(pack[u]), first + u);
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

__device__ __forceinline__ uint64 sum_of(uint64 mass, Memory& memory)
{
    uint number = 0u;
    return sum_before(mass, number, memory);
}

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

// Replaces counts and weights of bins by the sums up to each bin.
__device__ void add_up_bins(Memory& memory)
{
    __syncthreads();
    int first = int(threadIdx.x) * OWN_BINS, end = min(first + OWN_BINS, BINS);
    uint64 mass = 0ull;
    uint count = 0u;
    for (int bin = first; bin < end; ++bin) {
        mass += mass_at(bin, memory);
        count += count_at(bin, memory);
    }
    sum_before(mass, count, memory);
    for (int bin = first; bin < end; ++bin) {
        mass += mass_at(bin, memory);
        count += count_at(bin, memory);
        put(bin, count, mass, memory);
    }
    __syncthreads();
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
    add_up_bins(memory);
    all = sum_of(all, memory);
    likely = row.least > 0 ? sum_of(enough, memory) : all;
    return all;
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
