// Draws a token of each row by probability: a threadgroup a row. An entry orders tokens: its upper bits are the logit,
// inverted, and its lower bits the token's number. Weights are integers, in units of 2^-40, so that their sums do not
// depend on the order.
//
// For the last token that the limits keep the tokens are counted and weighed in bins along the order. What is looked
// for, a number of tokens or a weight, lies in one bin: its tokens are put in order, or, where they are too many, are
// divided among bins in turn. What is kept is then weighed along the tokens' numbers.
// Grid: rows in x. Block: THREADS.
METAL_FUNC void sort_list(int total, int thread_number, threadgroup Memory& memory)
{
    for (int size = 2; size <= total; size *= 2) {
        for (int stride = size / 2; stride > 0; stride /= 2) {
            for (int pair = thread_number; pair < total / 2; pair += THREADS) {
                int low = pair * 2 - (pair & (stride - 1));
                int high = stride * 2 == size ? (low | (size - 1)) - (low & (size - 1)) : low + stride;
                ulong a = memory.list[low];
                ulong b = memory.list[high];
                if (b < a) {
                    memory.list[low] = b;
                    memory.list[high] = a;
                }
            }
            threadgroup_barrier(mem_flags::mem_threadgroup);
        }
    }
}

// Puts the tokens of a bin in order; there are no more of them than the list holds. Returns how many there are.
METAL_FUNC int list_bin(
    int wanted, thread const Range& range, thread const Row& row, device const a_t* logits, threadgroup Memory& memory)
{
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (row.thread_number == 0) {
        atomic_store_explicit(&memory.taken, 0u, memory_order_relaxed);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int token = row.thread_number; token < row.length; token += THREADS) {
        float value = float(logits[token * row.column]);
        ulong entry = entry_of(value, token);
        if (bin_of(exponent_of(value, row), entry, range) == wanted) {
            memory.list[atomic_fetch_add_explicit(&memory.taken, 1u, memory_order_relaxed)] = entry;
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    int taken = int(atomic_load_explicit(&memory.taken, memory_order_relaxed));
    int total = 2;
    while (total < taken) {
        total *= 2;
    }
    for (int at = taken + row.thread_number; at < total; at += THREADS) {
        memory.list[at] = ~0ul;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    sort_list(total, row.thread_number, memory);
    return taken;
}

// The token of a bin that has `target` tokens before it, or before whose end a weight of `target` lies.
METAL_FUNC Found find_in(
    int bin, ulong target, bool by_count, thread const Range& range, thread const Row& row, device const a_t* logits,
    threadgroup Memory& memory)
{
    int taken = list_bin(bin, range, row, logits, memory);
    int first = row.thread_number * OWN_ENTRIES;
    ulong mass = 0ul;
    ulong count_before = ulong(count_at(bin - 1, memory));
    uint number = 0u;
    for (int at = first; at < min(first + OWN_ENTRIES, taken); ++at) {
        mass += weight_of(exponent_of(value_of(memory.list[at]), row));
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    sum_before(mass, number, row.thread_number, memory);
    ulong end = mass_at(bin - 1, memory) + mass;
    for (int at = first; at < min(first + OWN_ENTRIES, taken); ++at) {
        ulong begin = end;
        end += weight_of(exponent_of(value_of(memory.list[at]), row));
        if (by_count ? count_before + ulong(at) == target : begin <= target && target < end) {
            memory.entry = memory.list[at];
            memory.mass = end;
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    Found found;
    found.entry = memory.entry;
    found.mass = memory.mass;
    found.is_there = true;
    return found;
}

// The same where the bin has too many tokens; the bins are divided in turn.
METAL_FUNC Found find_deep(
    int bin, ulong target, bool by_count, Range range, thread const Row& row, device const a_t* logits,
    threadgroup Memory& memory)
{
    ulong mass = 0ul;
    while (count_at(bin, memory) - count_at(bin - 1, memory) > uint(CAPACITY)) {
        ulong mass_before = mass_at(bin - 1, memory);
        mass += mass_before;
        target -= by_count ? ulong(count_at(bin - 1, memory)) : mass_before;
        ulong first = ~0ul;
        ulong behind = ~0ul; // the last one, turned around
        for (int token = row.thread_number; token < row.length; token += THREADS) {
            float value = float(logits[token * row.column]);
            ulong entry = entry_of(value, token);
            if (bin_of(exponent_of(value, row), entry, range) == bin) {
                first = min(first, entry);
                behind = min(behind, ~entry);
            }
        }
        range.first = least_of(first, row.thread_number, memory);
        range.last = ~least_of(behind, row.thread_number, memory);
        range.shift = 0;
        range.bins = BINS;
        while (((range.last - range.first) >> uint(range.shift)) >= ulong(BINS)) {
            ++range.shift;
        }
        fill_bins(range, row, logits, memory);
        bin = bin_with(target, by_count, row.thread_number, memory);
    }
    Found found = find_in(bin, target, by_count, range, row, logits, memory);
    found.mass += mass;
    return found;
}

// The token that has `target` tokens before it, or before whose end a weight of `target` lies.
METAL_FUNC Found find(
    ulong target, bool by_count, thread Range& range, thread const Row& row, device const a_t* logits,
    threadgroup Memory& memory)
{
    int bin = bin_with(target, by_count, row.thread_number, memory);
    if (bin == BINS && range.bins < BINS) {
        range.bins = BINS;
        fill_bins(range, row, logits, memory);
        bin = bin_with(target, by_count, row.thread_number, memory);
    }
    Found found;
    found.entry = ~0ul;
    found.mass = 0ul;
    found.is_there = false;
    if (bin == BINS) {
        return found;
    }
    if (count_at(bin, memory) - count_at(bin - 1, memory) <= uint(CAPACITY)) {
        return find_in(bin, target, by_count, range, row, logits, memory);
    }
    found = find_deep(bin, target, by_count, range, row, logits, memory);
    fill_bins(range, row, logits, memory);
    return found;
}

// A weight times a word, over 2^32, rounded down.
METAL_FUNC ulong share_of(ulong mass, uint word)
{
    return (mass >> 32) * ulong(word) + (((mass & 0xfffffffful) * ulong(word)) >> 32);
}

// A weight times a number of two words, over 2^64, rounded down.
METAL_FUNC ulong share_of(ulong mass, uint high, uint low)
{
    return (mass >> 32) * ulong(high) + (((mass & 0xfffffffful) * ulong(high) + share_of(mass, low)) >> 32);
}

// The last token that is kept, of all in order.
METAL_FUNC ulong last_kept(
    ulong own, float top_p, long top_k, thread const Row& row, device const a_t* logits, threadgroup Memory& memory)
{
    Range range;
    range.first = 0ul;
    range.last = 0ul;
    range.shift = -1;
    range.bins = NEAR;
    if (top_k > 0l) {
        // so many of the threads' best tokens are in the first bins, and with them all that are likelier
        clear_bins(row.thread_number, memory);
        int bin = own == ~0ul ? BINS : bin_of(exponent_of(value_of(own), row), own, range);
        if (bin < BINS) {
            add(bin, 0ul, memory);
        }
        add_up_bins(row.thread_number, memory);
        range.bins = min(BINS, bin_with(ulong(top_k - 1l), true, row.thread_number, memory) + 1);
    }
    ulong mass = fill_bins(range, row, logits, memory);
    ulong last = ~0ul;
    if (top_k > 0l) {
        Found found = find(ulong(top_k - 1l), true, range, row, logits, memory);
        mass = found.is_there ? found.mass : mass;
        last = found.entry;
    }
    if (top_p < 1.0f) {
        ulong wanted = max(share_of(mass, uint(top_p * 4294967296.0f)), 1ul);
        last = find(wanted - 1ul, false, range, row, logits, memory).entry;
    }
    return last;
}

// Up to which token, and from which weight on, tokens are kept.
struct Kept {
    ulong last;
    ulong least;
};

// What a token weighs, where it is kept.
METAL_FUNC ulong kept_weight(float value, int token, thread const Kept& kept, thread const Row& row)
{
    float exponent = exponent_of(value, row);
    ulong found = exponent > -DEPTH && entry_of(value, token) <= kept.last ? weight_of(exponent) : 0ul;
    return found >= kept.least ? found : 0ul;
}

// The token at a random share of what the kept ones weigh; each thread has neighbours.
METAL_FUNC long at_share(
    thread const Kept& kept, uint high, uint low, thread const Row& row, device const a_t* logits,
    threadgroup Memory& memory)
{
    int own = (row.length + THREADS - 1) / THREADS;
    int first = min(row.thread_number * own, row.length);
    int end = min(first + own, row.length);
    ulong mass = 0ul;
    uint number = 0u;
    for (int token = first; token < end; ++token) {
        mass += kept_weight(float(logits[token * row.column]), token, kept, row);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    sum_before(mass, number, row.thread_number, memory);
    ulong target = share_of(memory.masses[THREADS - 1], high, low);
    for (int token = first; token < end && mass <= target; ++token) {
        mass += kept_weight(float(logits[token * row.column]), token, kept, row);
        if (target < mass) {
            memory.entry = ulong(token);
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    return long(memory.entry);
}

METAL_FUNC long drawn(
    thread Row& row, float top_p, float min_p, long top_k, uint high, uint low, device const a_t* logits,
    threadgroup Memory& memory)
{
    ulong own = ~0ul;
    for (int token = row.thread_number; token < row.length; token += THREADS) {
        own = min(own, entry_of(float(logits[token * row.column]), token));
    }
    ulong best = least_of(own, row.thread_number, memory);
    row.highest = value_of(best);
    if (uint(best >> 32) == 0u || !(row.highest - row.highest == 0.0f)) {
        return -1l;
    }
    if (row.scale == 0.0f) {
        return long(best & 0xfffffffful);
    }
    Kept kept;
    kept.last = ~0ul;
    kept.least = min_p > 0.0f ? ulong(min(min_p, 1.0f) * ONE) : 0ul;
    if (top_k > 0l || top_p < 1.0f) {
        kept.last = last_kept(own, top_p, top_k, row, logits, memory);
    }
    return at_share(kept, high, low, row, logits, memory);
}

kernel void draw(
    device const a_t* logits [[buffer(0)]],
    device const float* limits [[buffer(1)]],
    device const long* top_k [[buffer(2)]],
    device const long* words [[buffer(3)]],
    device out_t* out [[buffer(OUT_BUFFER)]],
    EPILOGUE_BUFFERS
    constant Params& p [[buffer(PARAMS_BUFFER)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]])
{
    threadgroup Memory memory;
    int at = int(group.x);
    device const float* limit = limits + at * p.limits_row;
    device const long* word = words + at * p.words_row;
    Row row;
    row.thread_number = int(thread_index);
    row.length = p.length;
    row.column = p.logits_column;
    row.highest = 0.0f;
    row.scale = limit[0] > 0.0f ? min(limit[0], 3.4028234e38f) : 0.0f; // no bin is ahead of the first, nor a NaN
    long token = drawn(
        row, limit[p.limits_column], limit[2 * p.limits_column], top_k[at * p.top_k_row],
        uint(word[0]), uint(word[p.words_column]), logits + at * p.logits_row, memory);
    if (thread_index == 0) {
        out[output_index(0, 0, at, p)] = out_t(epilogue(token, 0, 0, at, EPILOGUE_ARGUMENTS p));
    }
}
