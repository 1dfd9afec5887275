// Draws a token of each row by probability: a block a row, or a cluster of PARTS blocks. An entry orders tokens: its upper bits are the logit,
// inverted, and its lower bits the token's number. Weights are integers, in units of 2^-40, so that their sums do not
// depend on the order.
//
// The tokens are counted and weighed in bins along the order. What is looked for, a number of tokens or a weight, lies
// in one bin: its tokens are put in order, or, where they are too many, are divided among bins in turn.
// Blocks of a cluster walk over tokens of their own, tell each other what they found, and then all know the same.
// Grid: PARTS for each row in x. Block: THREADS.

// Gathers what the blocks of the row have listed; returns how many tokens that is.
__device__ __forceinline__ int gather_list(Memory& memory)
{
#if PARTS > 1
    int ends[PARTS], taken = 0;
    __syncthreads();
    exchange(memory.taken, 0ull, memory, [&](int rank, const Pair& of_block) {
        taken += int(of_block.first);
        ends[rank] = taken;
    });
    for (int at = int(threadIdx.x); at < taken; at += THREADS) {
        int rank = 0, begin = 0;
        #pragma unroll
        for (int other = 0; other + 1 < PARTS; ++other) {
            bool is_behind = at >= ends[other];
            rank += is_behind;
            begin = is_behind ? ends[other] : begin;
        }
        Pair entries;
        load_of_block(memory.own + (at - begin) / 2 * 2, rank, entries);
        memory.list[at] = (at - begin) % 2 == 0 ? entries.first : entries.second;
    }
    synchronize_row();
    return taken;
#else
    __syncthreads();
    return int(memory.taken);
#endif
}

// Puts the tokens of bins `first` to `last` in order; there are no more of them than the list holds.
__device__ __noinline__ Window list_bins(int first, int last, const Range& range, const Row& row, Memory& memory)
{
    __syncthreads();
    Entry* own = PARTS > 1 ? memory.own : memory.list;
    if (threadIdx.x == 0) {
        memory.taken = 0u;
    }
    __syncthreads();
    if (range.shift < 0) {
        float begin = float(first), end = float(last + 1);
        walk(row, [&](float value, int token) {
            float distance = distance_of(value, row);
            if (distance >= begin && distance < end) {
                own[atomicAdd(&memory.taken, 1u)] = entry_of(value, token);
            }
        });
    } else {
        walk(row, [&](float value, int token) {
            int bin = bin_of(value, token, range, row);
            if (bin >= first && bin <= last) {
                own[atomicAdd(&memory.taken, 1u)] = entry_of(value, token);
            }
        });
    }
    int taken = gather_list(memory), total = 2;
    while (total < taken) {
        total *= 2;
    }
    for (int at = taken + int(threadIdx.x); at < total; at += THREADS) {
        memory.list[at] = ~0ull;
    }
    __syncthreads();
    sort_runs(memory.list, total, total);
    return {mass_at(first - 1, memory), mass_at(last, memory), count_at(first - 1, memory), count_at(last, memory)};
}

// The token of the window at `target`.
__device__ __noinline__ Found find_in(
    const Window& window, uint64 target, bool by_count, const Row& row, Memory& memory)
{
    int taken = int(window.count_end - window.count_before);
    int first = int(threadIdx.x) * OWN_ENTRIES, end = min(first + OWN_ENTRIES, taken);
    uint64 mass = 0ull;
    uint number = 0u;
    for (int at = first; at < end; ++at) {
        mass += weight_of(distance_of(value_of(memory.list[at]), row));
    }
    sum_before(mass, number, memory);
    uint64 reached = window.mass_before + mass;
    for (int at = first; at < end; ++at) {
        uint64 begin = reached;
        reached += weight_of(distance_of(value_of(memory.list[at]), row));
        if (by_count ? uint64(window.count_before) + uint64(at) == target : begin <= target && target < reached) {
            memory.entry = memory.list[at];
            memory.mass = reached;
        }
    }
    __syncthreads();
    return {memory.entry, memory.mass, true};
}

// The token at `target`, which lies in a bin of too many tokens; the bins are divided in turn.
__device__ __noinline__ Found find_deep(
    int bin, uint64 target, bool by_count, Range range, const Row& row, Memory& memory)
{
    uint64 mass = 0ull, likely;
    while (count_at(bin, memory) - count_at(bin - 1, memory) > uint(CAPACITY)) {
        uint64 mass_before = mass_at(bin - 1, memory);
        mass += mass_before;
        target -= by_count ? uint64(count_at(bin - 1, memory)) : mass_before;
        Entry first = ~0ull, behind = ~0ull; // the last one, turned around
        walk(row, [&](float value, int token) {
            if (bin_of(value, token, range, row) == bin) {
                Entry entry = entry_of(value, token);
                first = min(first, entry);
                behind = min(behind, ~entry);
            }
        });
        range = {least_of(first, memory), ~least_of(behind, memory), 0, BINS};
        while (((range.last - range.first) >> range.shift) >= uint64(BINS)) {
            ++range.shift;
        }
        fill_bins(likely, true, range, row, memory);
        bin = bin_with(target, by_count, memory);
    }
    Window window = list_bins(bin, bin, range, row, memory);
    Found found = find_in(window, target, by_count, row, memory);
    found.mass += mass;
    return found;
}

// The token that has `target` tokens before it, or before whose end a weight of `target` lies. Keeps the window for
// later.
__device__ __noinline__ Found find(
    uint64 target, bool by_count, Range& range, Window& window, const Row& row, Memory& memory)
{
    uint64 begin = by_count ? uint64(window.count_before) : window.mass_before;
    uint64 end = by_count ? uint64(window.count_end) : window.mass_end;
    if (begin <= target && target < end) {
        return find_in(window, target, by_count, row, memory);
    }
    uint64 likely;
    int bin = bin_with(target, by_count, memory);
    if (bin == BINS && range.bins < BINS) {
        range.bins = BINS;
        fill_bins(likely, true, range, row, memory);
        bin = bin_with(target, by_count, memory);
    }
    if (bin == BINS) {
        return {0ull, 0ull, false};
    }
    if (count_at(bin, memory) - count_at(bin - 1, memory) > uint(CAPACITY)) {
        Found found = find_deep(bin, target, by_count, range, row, memory);
        fill_bins(likely, true, range, row, memory);
        window = {0ull, 0ull, 0u, 0u}; // the list has others now
        return found;
    }
    int first = count_at(bin, memory) <= uint(CAPACITY) ? 0 : bin;
    int last = bin_with(uint64(count_at(first - 1, memory)) + uint64(CAPACITY), true, memory);
    window = list_bins(first, max(bin, min(last, range.bins) - 1), range, row, memory);
    return find_in(window, target, by_count, row, memory);
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

// The highest logit of the row, NaN where there is one.
__device__ float highest_of(float own, Memory& memory)
{
    float* shared = reinterpret_cast<float*>(memory.numbers);
    own = warp_max<32>(own);
    if (threadIdx.x % 32 == 0) {
        shared[threadIdx.x / 32] = own;
    }
    __syncthreads();
    own = warp_max<32>(threadIdx.x % 32 < WARPS ? shared[threadIdx.x % 32] : own);
    exchange(__float_as_uint(own), 0ull, memory, [&](int, const Pair& of_block) {
        own = combine_max(own, __uint_as_float(uint(of_block.first)));
    });
    return own;
}

__device__ __forceinline__ int64 drawn(
    Row& row, float scale, float top_p, float min_p, int64 top_k, uint high, uint low, Memory& memory)
{
    float own = -__uint_as_float(0x7f800000u);
    walk(row, [&](float value, int) { own = combine_max(own, value); });
    row.highest = highest_of(own, memory);
    if (!(row.highest - row.highest == 0.0f)) {
        return -1;
    }
    if (scale == 0.0f) {
        Entry first = ~0ull;
        walk(row, [&](float value, int token) {
            first = value == row.highest && first == ~0ull ? Entry(token) : first;
        });
        return int64(least_of(first, memory));
    }
    row.bins = min(scale * PER_UNIT, 3.4028234e38f);
    row.least = min_p > 0.0f ? uint64(min(min_p, 1.0f) * ONE) : 0ull;
    Range range = {0ull, 0ull, -1, NEAR};
    Window window = {0ull, 0ull, 0u, 0u};
    if (top_k > 0) {
        // so many of the threads' best tokens are in the first bins, and with them all that are likelier
        clear_bins(memory);
        float distance = distance_of(own, row);
        if (distance < float(BINS)) {
            add(int(distance), 0ull, memory);
        }
        add_up_bins(0ull, 0ull, memory);
        range.bins = min(BINS, bin_with(uint64(top_k - 1), true, memory) + 1);
    }
    uint64 likely, mass = fill_bins(likely, top_k <= 0, range, row, memory);
    if (top_k > 0) {
        Found last = find(uint64(top_k - 1), true, range, window, row, memory);
        mass = last.is_there ? last.mass : mass;
    }
    if (top_p < 1.0f) {
        uint64 wanted = max(share_of(mass, uint(top_p * 4294967296.0f)), 1ull);
        mass = find(wanted - 1, false, range, window, row, memory).mass;
    }
    mass = min(mass, likely);
    return int64(find(share_of(mass, high, low), false, range, window, row, memory).entry & ALL_LANES);
}

extern "C" __global__ void __launch_bounds__(THREADS) draw(
    const a_t* logits, const float* limits, const int64* top_k, const int64* words, OUT_T* out,
    EPILOGUE_PARAMETERS const Params p)
{
    extern __shared__ __align__(16) unsigned char dynamic_shared[];
    Memory& memory = *reinterpret_cast<Memory*>(dynamic_shared);
    wait_for_previous_grid();
    int part = int(blockIdx.x) % PARTS;
    long long at = int(blockIdx.x) / PARTS;
    const float* limit = limits + at * p.limits_row;
    const int64* word = words + at * p.words_row;
    int first = (part * THREADS + int(threadIdx.x)) * CHUNK;
    Row row = {logits + at * p.logits_row, p.length, p.logits_column, first, 0.0f, 0.0f, 0ull};
    int64 value[1] = {drawn(
        row, limit[0], limit[p.limits_column], limit[2 * p.limits_column], top_k[at * p.top_k_row], uint(word[0]),
        uint(word[p.words_column]), memory)};
    if (part == 0 && threadIdx.x == 0) {
        finish(value, 0, 0, int(at), out, EPILOGUE_ARGUMENTS p);
    }
}
