// Draws a token of each row by probability: a block a row, or a cluster of PARTS blocks. An entry orders tokens: its
// upper bits are the logit, inverted, and its lower bits the token's number. Weights are integers, in units of 2^-40,
// so that their sums do not depend on the order.
//
// For the last token that the limits keep the tokens are counted and weighed in bins along the order. What is looked
// for, a number of tokens or a weight, lies in one bin: its tokens are put in order, or, where they are too many, are
// divided among bins in turn. What is kept is then weighed along the tokens' numbers. Where few are kept all of this is
// done with a list of them.
//
// Blocks of a cluster walk over tokens of their own, tell each other what they found, and then all know the same.
// Grid: PARTS for each row in x. Block: THREADS.
constexpr int MOST_LISTED = CAPACITY < PARTS * THREADS ? CAPACITY / 2 : PARTS * THREADS / 2; // without any bins

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

// The token of the list that has `target` tokens before it, or before whose end a weight of `target` lies.
__device__ __noinline__ Found find_in(const Window& window, uint64 target, bool by_count, Memory& memory)
{
    int first = int(threadIdx.x) * OWN_ENTRIES;
    #pragma unroll
    for (int at = first; at < first + OWN_ENTRIES; ++at) {
        uint64 begin = at > 0 ? memory.reached[at - 1] : window.mass_before;
        bool is_found = by_count ? window.before + uint64(at) == target : begin <= target && target < memory.reached[at];
        if (is_found && at < window.taken) {
            memory.place = at;
        }
    }
    __syncthreads();
    int place = memory.place;
    Found found = {memory.list[place], memory.reached[place], window.before == 0u ? place : CAPACITY, true};
    __syncthreads(); // all have read the place before the next one is written
    return found;
}

// The same of all tokens, in a bin that has too many; the bins are divided in turn.
__device__ __noinline__ Found find_deep(
    Bin bin, uint64 target, bool by_count, Range range, const Row& row, Memory& memory)
{
    uint64 mass = 0ull;
    while (bin.count > uint(CAPACITY)) {
        mass += bin.mass_before;
        target -= by_count ? uint64(bin.before) : bin.mass_before;
        Entry first = ~0ull, behind = ~0ull; // the last one, turned around
        walk(row, [&](float value, int token) {
            if (bin_of(value, token, range, row) == bin.at) {
                Entry entry = entry_of(value, token);
                first = min(first, entry);
                behind = min(behind, ~entry);
            }
        });
        range = {least_of(first, memory), ~least_of(behind, memory), 0, BINS};
        while (((range.last - range.first) >> range.shift) >= uint64(BINS)) {
            ++range.shift;
        }
        fill_bins(range, row, memory);
        bin = bin_with(target, by_count, memory);
    }
    int taken = list_bins(bin.at, bin.at, bin.mass_before, range, row, memory);
    Found found = find_in({taken, bin.before, bin.mass_before, bin.mass}, target, by_count, memory);
    found.mass += mass;
    found.place = CAPACITY;
    return found;
}

// The same of all tokens. All likelier ones are listed too where that is no more work, or where what is looked for next
// is mostly among them: by weight behind a number.
__device__ __noinline__ Found find(
    uint64 target, bool by_count, Range& range, Window& window, const Row& row, Memory& memory)
{
    if (by_count ? target - window.before < uint64(window.taken) : target - window.mass_before < window.mass) {
        return find_in(window, target, by_count, memory); // differences below 0 are large
    }
    Bin bin = bin_with(target, by_count, memory);
    if (bin.at >= range.bins && range.bins < BINS) {
        range.bins = BINS;
        fill_bins(range, row, memory);
        bin = bin_with(target, by_count, memory);
    }
    if (bin.at == BINS) {
        return {~0ull, 0ull, CAPACITY, false};
    }
    if (bin.count > uint(CAPACITY)) {
        Found found = find_deep(bin, target, by_count, range, row, memory);
        window = {0, 0u, 0ull, 0ull};
        fill_bins(range, row, memory);
        return found;
    }
    bool has_all = bin.before + bin.count <= uint(by_count ? CAPACITY : FEW);
    window = {0, has_all ? 0u : bin.before, has_all ? 0ull : bin.mass_before, bin.mass};
    window.mass += bin.mass_before - window.mass_before;
    window.taken = list_bins(has_all ? 0 : bin.at, bin.at, window.mass_before, range, row, memory);
    return find_in(window, target, by_count, memory);
}

// A weight times a word, over 2^32, rounded down.
__device__ __forceinline__ uint64 share_of(uint64 mass, uint word)
{
    return (mass >> 32) * word + (((mass & ALL_LANES) * word) >> 32);
}

// A weight times a number of two words, over 2^64, rounded down.
__device__ __forceinline__ uint64 share_of(uint64 mass, uint high, uint low)
{
    return (mass >> 32) * high + (((mass & ALL_LANES) * high + share_of(mass, low)) >> 32);
}

// The highest logit of the row, NaN where there is one, and the lowest.
__device__ void ends_of(float& highest, float& lowest, Memory& memory)
{
    float* shared = reinterpret_cast<float*>(memory.masses);
    highest = warp_max<32>(highest);
    lowest = -warp_max<32>(-lowest);
    if (threadIdx.x % 32 == 0) {
        shared[threadIdx.x / 32] = highest;
        shared[WARPS + threadIdx.x / 32] = lowest;
    }
    __syncthreads();
    highest = warp_max<32>(threadIdx.x % 32 < WARPS ? shared[threadIdx.x % 32] : highest);
    lowest = -warp_max<32>(-(threadIdx.x % 32 < WARPS ? shared[WARPS + threadIdx.x % 32] : lowest));
#if PARTS > 1
    wait_for_cluster(); // before that others may not be there to be told
#endif
    uint64 own = (uint64(__float_as_uint(highest)) << 32) | __float_as_uint(lowest);
    exchange(OF_ENDS, own, memory, [&](int, uint64 of_block) {
        highest = combine_max(highest, __uint_as_float(uint(of_block >> 32)));
        lowest = combine_min(lowest, __uint_as_float(uint(of_block)));
    });
}

// Lists the first `top_k` tokens, and some behind them, if there is room: so many of the threads' highest ones are in
// the first bins, and with them all that are likelier. Returns how many there are.
__device__ __noinline__ int list_likeliest(float own, int64 top_k, const Range& range, const Row& row, Memory& memory)
{
    clear_bins(memory);
    float depth = depth_of(own, row);
    if (depth <= OCTAVES) {
        atomicAdd(&memory.bins.counts[bin_at(depth, row)], 1u);
    }
    sum_bins(memory);
    Bin bin = bin_with(uint64(top_k - 1), true, memory);
    return bin.at < BINS ? list_bins(0, bin.at, 0ull, range, row, memory) : 0;
}

// The last token that is kept, of all in order.
__device__ __noinline__ Found last_kept(float own, float top_p, int64 top_k, const Row& row, Memory& memory)
{
    Range range = {0ull, 0ull, -1, NEAR * row.bins < float(REST) ? int(NEAR * row.bins) + 1 : BINS};
    Window window = {0, 0u, 0ull, 0ull};
    if (top_k > 0 && top_k <= MOST_LISTED) {
        window.taken = list_likeliest(own, top_k, range, row, memory);
        window.mass = window.taken > 0 ? ~0ull : 0ull; // all that is looked for
    }
    if (window.taken == 0) {
        fill_bins(range, row, memory);
    }
    Found last = {~0ull, 0ull, CAPACITY, false};
    if (top_k > 0) {
        last = find(uint64(top_k - 1), true, range, window, row, memory);
    }
    if (top_p < 1.0f) {
        uint64 mass = last.is_there ? last.mass : mass_of_bins(memory);
        uint64 wanted = max(share_of(mass, uint(top_p * 4294967296.0f)), 1ull);
        last = find(wanted - 1, false, range, window, row, memory);
    }
    return last;
}

// Which tokens are kept: up to the last one of all in order, and from a weight on.
struct Kept {
    float value;
    int token;
    float least;

    __device__ __forceinline__ uint64 weight(float found, int at, const Row& row) const
    {
        float depth = depth_of(found, row);
        bool is_kept = depth <= OCTAVES && (found > value || (found == value && at <= token));
        float scaled = is_kept ? scaled_weight(depth) : 0.0f;
        return whole_weight(scaled >= least ? scaled : 0.0f);
    }
};

// The token at a random share of what the kept ones weigh, for the one thread that has it; -1 for the others. Here of
// the first ones of the list, no more than FEW.
__device__ __noinline__ int64 at_share_of_list(
    const Kept& kept, int number, uint high, uint low, const Row& row, Memory& memory)
{
    int at = int(threadIdx.x) / COUNTERS, share = int(threadIdx.x) % COUNTERS;
    Entry entry = int(threadIdx.x) < number ? memory.list[threadIdx.x] : 0ull;
    uint64 weight = int(threadIdx.x) < number ? kept.weight(value_of(entry), int(entry & ALL_LANES), row) : 0ull;
    __syncthreads();
    if (threadIdx.x < FEW) {
        memory.reached[threadIdx.x] = weight;
    }
    __syncthreads();
    uint own = at < number ? uint(memory.list[at]) : 0u;
    uint64 before = 0ull, all = 0ull;
    #pragma unroll 2
    for (int other = share; other < number; other += COUNTERS) {
        weight = memory.reached[other];
        all += weight;
        before += uint(memory.list[other]) < own ? weight : 0ull;
    }
    #pragma unroll
    for (int distance = 1; distance < COUNTERS; distance *= 2) {
        before += __shfl_xor_sync(ALL_LANES, before, distance);
        all += __shfl_xor_sync(ALL_LANES, all, distance);
    }
    uint64 target = share_of(all, high, low);
    bool is_drawn = at < number && before <= target && target - before < memory.reached[at];
    return share == 0 && is_drawn ? int64(own) : -1;
}

// The same of all tokens.
__device__ __forceinline__ int64 at_share(const Kept& kept, uint high, uint low, const Row& row, Memory& memory)
{
    int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
    uint64 mass = 0ull, all = 0ull, before = 0ull;
    uint number = 0u;
    walk(row, [&](float value, int token) {
        if (value >= kept.value) {
            mass += kept.weight(value, token, row);
        }
    });
    uint64 own = mass;
    uint64 of_block = sum_before(mass, number, memory).first;
    exchange(OF_ALL, of_block, memory, [&](int rank, uint64 block) {
        before += rank < int(blockIdx.x) % PARTS ? block : 0ull;
        all += block;
    });
    uint64 target = share_of(all, high, low);
    if (target < before || target - before >= of_block) {
        return -1;
    }
    target -= before;
    uint64 end = __shfl_sync(ALL_LANES, mass + own, 31);
    if (lane == 0 && mass <= target && target < end) {
        memory.place = warp;
        memory.mass = mass;
    }
    __syncthreads();
    target -= memory.mass;
    int first = row.begin + (memory.place - warp) * row.step, each = (row.step + THREADS - 1) / THREADS;
    int begin = first + int(threadIdx.x) * each, last = min(begin + each, min(first + row.step, row.length));
    uint64 reached = 0ull;
    #pragma unroll 1
    for (int token = begin; token < last; ++token) {
        reached += kept.weight(float(row.pack<1>(token)[0]), token, row);
    }
    sum_before(reached, number, memory);
    int64 found = -1;
    #pragma unroll 1
    for (int token = begin; token < last; ++token) {
        uint64 weight = kept.weight(float(row.pack<1>(token)[0]), token, row);
        found = reached <= target && target < reached + weight ? token : found;
        reached += weight;
    }
    return found;
}

extern "C" __global__ void __launch_bounds__(THREADS) draw(
    const a_t* logits, const float* limits, const int64* top_k, const int64* words, OUT_T* out,
    EPILOGUE_PARAMETERS const Params p)
{
    extern __shared__ __align__(16) unsigned char dynamic_shared[];
    Memory& memory = *reinterpret_cast<Memory*>(dynamic_shared);
#if PARTS > 1
    announce_to_cluster();
#endif
    wait_for_previous_grid();
    int part = int(blockIdx.x) % PARTS, step = (p.length / CHUNK + PARTS * WARPS - 1) / (PARTS * WARPS) * CHUNK;
    long long at = int(blockIdx.x) / PARTS;
    const float* limit = limits + at * p.limits_row;
    const int64* word = words + at * p.words_row;
    float scale = limit[0], top_p = limit[p.limits_column], min_p = limit[2 * p.limits_column];
    int64 most = top_k[at * p.top_k_row];
    uint high = uint(word[0]), low = uint(word[p.words_column]);
    int begin = (part * WARPS + int(threadIdx.x) / 32) * step, end = min(begin + step, p.length);
    const a_t* held = memory.held - (HELD > 0 ? part * WARPS * step : 0);
    Row row = {logits + at * p.logits_row, held, p.length, p.logits_column, step, begin, end, 0.0f, 0.0f, 0.0f};

    float own = -__uint_as_float(0x7f800000u), lowest = -own;
    auto load = [&](int token) {
        Chunk chunk = load_pack<CHUNK>(row.logits + (long long)token * row.column);
        if (HELD > 0) {
            store_pack(memory.held + (token - part * WARPS * step), chunk);
        }
        return chunk;
    };
    walk<CHUNK, AHEAD>(row, load, [&](float value, int) {
        own = combine_max(own, value);
        lowest = min(lowest, value);
    });
    row.highest = own;
    ends_of(row.highest, lowest, memory);
    int64 value[1] = {-1};
    bool is_mine = part == 0 && threadIdx.x == 0;
    if (row.highest - row.highest == 0.0f && !(scale > 0.0f)) {
        Entry first = ~0ull;
        walk(row, [&](float found, int token) { first = found == row.highest ? min(first, Entry(token)) : first; });
        value[0] = int64(least_of(first, memory));
    } else if (row.highest - row.highest == 0.0f) {
        row.octaves = min(scale * 1.44269504f, 3.4028234e38f);
        row.bins = float(REST) / max(min(depth_of(lowest, row), OCTAVES), 1e-30f);
        Kept kept = {-__uint_as_float(0x7f800000u), 0, min_p > 0.0f ? floorf(min(min_p, 1.0f) * ONE) : 0.0f};
        Found last = {~0ull, 0ull, CAPACITY, false};
        if (most > 0 || top_p < 1.0f) {
            last = last_kept(own, top_p, most, row, memory);
        }
        if (last.entry != ~0ull) {
            kept.value = value_of(last.entry), kept.token = int(last.entry & ALL_LANES);
        }
        value[0] = last.place >= FEW ? at_share(kept, high, low, row, memory)
            : part == 0 ? at_share_of_list(kept, last.place + 1, high, low, row, memory) : -1;
        is_mine = value[0] >= 0;
    }
    if (is_mine) {
        finish(value, 0, 0, int(at), out, EPILOGUE_ARGUMENTS p);
    }
    synchronize_row(); // what others still read is there until then
}
