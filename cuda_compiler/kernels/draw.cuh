// Draws a token of each row by probability: a block a row, or a cluster of PARTS blocks. An entry orders tokens: its
// upper bits are the logit, inverted, and its lower bits the token's number. Weights are integers, in units of 2^-40,
// so that their sums do not depend on the order.
//
// For the last token that the limits keep the tokens are counted and weighed in bins along the order. What is looked
// for, a number of tokens or a weight, lies in one bin: its tokens are put in order, or, where they are too many, are
// divided among bins in turn. What is kept is then weighed along the tokens' numbers.
//
// Blocks of a cluster walk over tokens of their own, tell each other what they found, and then all know the same.
// Grid: PARTS for each row in x. Block: THREADS.
constexpr int FEW_EACH = 40; // tokens of a thread that are sooner put into bins than it is known which

// The token of the window that has `target` tokens before it, or before whose end a weight of `target` lies.
__device__ __noinline__ Found find_in(
    const Window& window, uint64 target, bool by_count, const Row& row, Memory& memory)
{
    int first = int(threadIdx.x) * OWN_ENTRIES, end = min(first + OWN_ENTRIES, window.taken);
    uint64 mass = 0ull, count_before = count_at(window.first - 1, memory);
    uint number = 0u;
    for (int at = first; at < end; ++at) {
        mass += weight_of(distance_of(value_of(memory.list[at]), row));
    }
    sum_before(mass, number, memory);
    uint64 reached = mass_at(window.first - 1, memory) + mass;
    for (int at = first; at < end; ++at) {
        uint64 begin = reached;
        reached += weight_of(distance_of(value_of(memory.list[at]), row));
        if (by_count ? count_before + uint64(at) == target : begin <= target && target < reached) {
            memory.entry = memory.list[at];
            memory.mass = reached;
        }
    }
    __syncthreads();
    return {memory.entry, memory.mass, true};
}

// The same of a bin that has too many tokens; the bins are divided in turn.
__device__ __noinline__ Found find_deep(
    int bin, uint64 target, bool by_count, Range range, const Row& row, Memory& memory)
{
    uint64 mass = 0ull;
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
        fill_bins(true, range, row, memory);
        bin = bin_with(target, by_count, memory);
    }
    Found found = find_in(list_bins(bin, bin, range, row, memory), target, by_count, row, memory);
    found.mass += mass;
    return found;
}

// The token that has `target` tokens before it, or before whose end a weight of `target` lies. Where that is looked for
// by number all likelier ones are listed too, if there is room: what is looked for next is mostly among them.
__device__ __noinline__ Found find(
    uint64 target, bool by_count, Range& range, Window& window, const Row& row, Memory& memory)
{
    int bin = bin_with(target, by_count, memory);
    if (bin == BINS && range.bins < BINS) {
        range.bins = BINS;
        fill_bins(true, range, row, memory);
        bin = bin_with(target, by_count, memory);
    }
    if (bin == BINS) {
        return {~0ull, 0ull, false};
    }
    if (count_at(bin, memory) - count_at(bin - 1, memory) > uint(CAPACITY)) {
        Found found = find_deep(bin, target, by_count, range, row, memory);
        fill_bins(true, range, row, memory);
        return found;
    }
    if (bin < window.first || bin > window.last) {
        int first = by_count && count_at(bin, memory) <= uint(CAPACITY) ? 0 : bin;
        window = list_bins(first, bin, range, row, memory);
    }
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
    exchange(OF_HIGHEST, __float_as_uint(own), memory, [&](int, uint64 of_block) {
        own = combine_max(own, __uint_as_float(uint(of_block)));
    });
    return own;
}

// The last token that is kept, of all in order.
__device__ __noinline__ Entry last_kept(float own, float top_p, int64 top_k, const Row& row, Memory& memory)
{
    Range range = {0ull, 0ull, -1, NEAR};
    bool is_narrow = top_k > 0 && row.length > FEW_EACH * PARTS * THREADS;
    if (is_narrow) {
        // so many of the threads' best tokens are in the first bins, and with them all that are likelier
        clear_bins(memory);
        float distance = distance_of(own, row);
        if (distance < float(BINS)) {
            add(int(distance), 0ull, memory);
        }
        add_up_bins(0ull, memory);
        range.bins = min(BINS, bin_with(uint64(top_k - 1), true, memory) + 1);
    }
    uint64 mass = fill_bins(!is_narrow, range, row, memory);
    Entry last = ~0ull;
    Window window = {0, -1, 0};
    if (top_k > 0) {
        Found found = find(uint64(top_k - 1), true, range, window, row, memory);
        mass = found.is_there ? found.mass : mass;
        last = found.entry;
    }
    if (top_p < 1.0f) {
        uint64 wanted = max(share_of(mass, uint(top_p * 4294967296.0f)), 1ull);
        last = find(wanted - 1, false, range, window, row, memory).entry;
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
        float distance = distance_of(found, row);
        bool is_kept = distance < float(BINS) && (found > value || (found == value && at <= token));
        float scaled = is_kept ? scaled_weight(distance) : 0.0f;
        return whole_weight(scaled >= least ? scaled : 0.0f);
    }
};

// The token at a random share of what the kept ones weigh, for the one thread that has it; -1 for the others.
__device__ __forceinline__ int64 at_share(const Kept& kept, uint high, uint low, const Row& row, Memory& memory)
{
    int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
    uint64 mass = 0ull, all = 0ull, before = 0ull;
    uint number = 0u;
    auto may_keep = [&](const Chunk& chunk) {
        bool any = false;
        #pragma unroll
        for (int u = 0; u < CHUNK; ++u) {
            any |= float(chunk[u]) >= kept.value;
        }
        return any;
    };
    walk(row, may_keep, [&](float value, int token) { mass += kept.weight(value, token, row); });
    uint64 own = mass;
    uint64 of_block = sum_before(mass, number, memory);
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
    int first = row.begin + (memory.place - warp) * row.step, last = min(first + row.step, row.length / CHUNK);
    int64 found = -1;
    for (int chunk = first + int(threadIdx.x); chunk - int(threadIdx.x) < last; chunk += THREADS) {
        uint64 weights[CHUNK], sum = 0ull;
        int place = min(chunk, last - 1) * CHUNK;
        Chunk pack = load_pack<CHUNK>(row.logits + (long long)place * row.column);
        #pragma unroll
        for (int u = 0; u < CHUNK; ++u) {
            weights[u] = chunk < last ? kept.weight(float(pack[u]), place + u, row) : 0ull;
            sum += weights[u];
        }
        uint64 reached = sum;
        uint64 whole = sum_before(reached, number, memory);
        #pragma unroll
        for (int u = 0; u < CHUNK; ++u) {
            found = reached <= target && target < reached + weights[u] ? place + u : found;
            reached += weights[u];
        }
        target -= whole; // behind all others it is larger than any sum
    }
    return found;
}

extern "C" __global__ void __launch_bounds__(THREADS) draw(
    const a_t* logits, const float* limits, const int64* top_k, const int64* words, OUT_T* out,
    EPILOGUE_PARAMETERS const Params p)
{
    extern __shared__ __align__(16) unsigned char dynamic_shared[];
    Memory& memory = *reinterpret_cast<Memory*>(dynamic_shared);
    wait_for_previous_grid();
    int part = int(blockIdx.x) % PARTS, chunks = p.length / CHUNK;
    int own_chunks = (chunks + PARTS * WARPS - 1) / (PARTS * WARPS);
    long long at = int(blockIdx.x) / PARTS;
    const float* limit = limits + at * p.limits_row;
    const int64* word = words + at * p.words_row;
    int begin = (part * WARPS + int(threadIdx.x) / 32) * own_chunks, end = min(begin + own_chunks, chunks);
    Row row = {logits + at * p.logits_row, p.length, p.logits_column, own_chunks, begin, end, 0.0f, 0.0f};

    float own = -__uint_as_float(0x7f800000u), scale = limit[0] > 0.0f ? limit[0] : 0.0f; // no bin is ahead of the first
    walk(row, [&](float value, int) { own = combine_max(own, value); });
    row.highest = highest_of(own, memory);
    int64 value[1] = {-1};
    bool is_mine = part == 0 && threadIdx.x == 0;
    if (row.highest - row.highest == 0.0f && scale == 0.0f) {
        Entry first = ~0ull;
        walk(row, [&](float found, int token) { first = found == row.highest ? min(first, Entry(token)) : first; });
        value[0] = int64(least_of(first, memory));
    } else if (row.highest - row.highest == 0.0f) {
        row.bins = min(scale * PER_UNIT, 3.4028234e38f);
        float top_p = limit[p.limits_column], min_p = limit[2 * p.limits_column];
        int64 most = top_k[at * p.top_k_row];
        Kept kept = {-__uint_as_float(0x7f800000u), 0, min_p > 0.0f ? floorf(min(min_p, 1.0f) * ONE) : 0.0f};
        if (most > 0 || top_p < 1.0f) {
            Entry last = last_kept(own, top_p, most, row, memory);
            if (last != ~0ull) {
                kept.value = value_of(last), kept.token = int(last & ALL_LANES);
            }
        }
        value[0] = at_share(kept, uint(word[0]), uint(word[p.words_column]), row, memory);
        is_mine = value[0] >= 0;
    }
    if (is_mine) {
        finish(value, 0, 0, int(at), out, EPILOGUE_ARGUMENTS p);
    }
    synchronize_row(); // what others still read is there until then
}
