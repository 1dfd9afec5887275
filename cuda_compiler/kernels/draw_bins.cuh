// Tokens of a row, counted and weighed in bins along their order (see `draw`).

// A bin, how many tokens it has, and what they weigh.
struct Bin {
    int at; // BINS: none
    uint count, before;
    uint64 mass, mass_before;
};

// Which tokens are in bins: those by their depth, the first `bins` of them, or those of a part of the order, its
// entries divided by 2^shift.
struct Range {
    Entry first, last;
    int shift; // -1: by depth
    int bins;
};

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

// What this block sums up.
#if PARTS > 1
__device__ __forceinline__ Bins<SHARED_BINS>& sums_of(Memory& memory) { return memory.sums; }
#else
__device__ __forceinline__ Bins<BINS>& sums_of(Memory& memory) { return memory.bins; }
#endif

// The weight of these bins up to one of them.
__device__ __forceinline__ uint64 mass_up_to(int bin, const Bins<SHARED_BINS>& bins)
{
    return (uint64(bins.highs[bin]) << 32) + bins.lows[bin];
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

__device__ __forceinline__ void clear_bins(Memory& memory)
{
    __syncthreads();
    #pragma unroll 1
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
    int rank = int(blockIdx.x) % PARTS, share = int(threadIdx.x) % SHARERS;
    int first = int(threadIdx.x) / SHARERS * OWN_BINS;
    uint count[OWN_BINS] = {}, number = 0u;
    uint64 mass[OWN_BINS] = {}, weight = 0ull;
    if (first < SHARED_BINS) {
        #pragma unroll
        for (int other = share; other < PARTS; other += SHARERS) {
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
            #pragma unroll
            for (int distance = 1; distance < SHARERS; distance *= 2) {
                count[u] += __shfl_xor_sync(ALL_LANES, count[u], distance);
                mass[u] += __shfl_xor_sync(ALL_LANES, mass[u], distance);
            }
            number += share == 0 ? count[u] : 0u;
            weight += share == 0 ? mass[u] : 0ull;
        }
    }
    Pair all = sum_before(weight, number, memory);
    if (first < SHARED_BINS && share == 0) {
        #pragma unroll
        for (int u = 0; u < OWN_BINS; ++u) {
            number += count[u];
            weight += mass[u];
            put(first + u, number, weight, sums_of(memory));
        }
    }
    tell(OF_BINS, all, memory);
}

// What all bins weigh together.
__device__ __forceinline__ uint64 mass_of_bins(const Memory& memory)
{
    uint64 mass = 0ull;
    #pragma unroll
    for (int rank = 0; rank < PARTS; ++rank) {
        mass += memory.told[OF_BINS][rank].first;
    }
    return mass;
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
    Pair ahead = {0ull, 0ull}, sum = {0ull, 0ull};
    #pragma unroll
    for (int rank = 0; rank < PARTS; ++rank) {
        Pair end = {sum.first + memory.told[OF_BINS][rank].first, sum.second + memory.told[OF_BINS][rank].second};
        if (owner == PARTS && target < (by_count ? end.second : end.first)) {
            owner = rank;
            ahead = sum;
        }
        sum = end;
    }
    if (owner == PARTS) {
        return {BINS, 0u, 0u, 0ull, 0ull};
    }
    if (owner == int(blockIdx.x) % PARTS) {
        const Bins<SHARED_BINS>& sums = sums_of(memory);
        #pragma unroll 1
        for (int bin = int(threadIdx.x); bin < SHARED_BINS; bin += THREADS) {
            uint before = uint(ahead.second) + (bin > 0 ? sums.counts[bin - 1] : 0u);
            uint end = uint(ahead.second) + sums.counts[bin];
            uint64 mass_before = ahead.first + (bin > 0 ? mass_up_to(bin - 1, sums) : 0ull);
            uint64 mass_end = ahead.first + mass_up_to(bin, sums);
            bool is_found = by_count ? before <= target && target < end : mass_before <= target && target < mass_end;
            uint lanes = __ballot_sync(ALL_LANES, is_found);
            if (lanes != 0u) {
                int lane = __ffs(int(lanes)) - 1, rank = int(threadIdx.x) % 32;
                uint64 bin_of_all = uint64(owner * SHARED_BINS + bin), count = (uint64(before) << 32) + (end - before);
                Pair numbers = {__shfl_sync(ALL_LANES, bin_of_all, lane), __shfl_sync(ALL_LANES, count, lane)};
                Pair weights = {__shfl_sync(ALL_LANES, mass_before, lane),
                                __shfl_sync(ALL_LANES, mass_end - mass_before, lane)};
                if (rank < PARTS) {
                    store_of_block(memory.found[by_count][0], rank, numbers);
                    store_of_block(memory.found[by_count][1], rank, weights);
                }
            }
        }
    }
    synchronize_row();
    Pair numbers = memory.found[by_count][0], weights = memory.found[by_count][1];
    return {int(numbers.first), uint(numbers.second), uint(numbers.second >> 32), weights.second, weights.first};
}
