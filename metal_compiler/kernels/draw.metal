// Draws a token of each row by probability: a threadgroup a row. An entry orders tokens: its upper bits are the logit,
// inverted, and its lower bits the token's number. Weights are integers, in units of 2^-40, so that their sums do not
// depend on the order.
//
// For the last token that the limits keep the tokens are counted and weighed in bins along the order. What is looked
// for, a number of tokens or a weight, lies in one bin: its tokens are put in order, or, where they are too many, are
// divided among bins in turn. What is kept is then weighed along the tokens' numbers. Where few are kept all of this is
// done with a list of them.
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

// Puts few tokens in order: the place of each is how many are ahead of it.
METAL_FUNC void order_few(int count, int thread_number, threadgroup Memory& memory)
{
    int place = 0;
    ulong own = thread_number < count ? memory.list[thread_number] : 0ul;
    for (int other = 0; other < count && thread_number < count; ++other) {
        place += memory.list[other] < own;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (thread_number < count) {
        memory.list[place] = own;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
}

// Lists the tokens of bins `first` to `last` in order, if there is room; returns how many there are.
METAL_FUNC int list_bins(
    int first, int last, thread const Range& range, thread const Row& row, device const a_t* logits,
    threadgroup Memory& memory)
{
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (row.thread_number == 0) {
        atomic_store_explicit(&memory.taken, 0u, memory_order_relaxed);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int token = row.thread_number; token < row.length; token += THREADS) {
        float value = float(logits[token * row.column]);
        ulong entry = entry_of(value, token);
        int bin = bin_of(exponent_of(value, row), entry, range, row);
        if (bin >= first && bin <= last) {
            uint at = atomic_fetch_add_explicit(&memory.taken, 1u, memory_order_relaxed);
            if (at < uint(CAPACITY)) {
                memory.list[at] = entry;
            }
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    int taken = int(atomic_load_explicit(&memory.taken, memory_order_relaxed));
    if (taken > CAPACITY) {
        return 0;
    }
    if (taken <= FEW) {
        order_few(taken, row.thread_number, memory);
        return taken;
    }
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

// The token of the list that has `target` tokens before it, or before whose end a weight of `target` lies.
METAL_FUNC Found find_in(
    thread const Window& window, ulong target, bool by_count, thread const Row& row, threadgroup Memory& memory)
{
    int first = row.thread_number * OWN_ENTRIES;
    int end = min(first + OWN_ENTRIES, window.taken);
    ulong mass = 0ul;
    uint number = 0u;
    for (int at = first; at < end; ++at) {
        mass += weight_of(exponent_of(value_of(memory.list[at]), row));
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    sum_before(mass, number, row.thread_number, memory);
    ulong reached = window.mass_before + mass;
    for (int at = first; at < end; ++at) {
        ulong begin = reached;
        reached += weight_of(exponent_of(value_of(memory.list[at]), row));
        if (by_count ? ulong(window.before) + ulong(at) == target : begin <= target && target < reached) {
            memory.entry = memory.list[at];
            memory.mass = reached;
            memory.place = at;
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    Found found;
    found.entry = memory.entry;
    found.mass = memory.mass;
    found.place = window.before == 0u ? memory.place : CAPACITY;
    found.is_there = true;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    return found;
}

// The same of all tokens, in a bin that has too many; the bins are divided in turn.
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
        ulong last = 0ul;
        for (int token = row.thread_number; token < row.length; token += THREADS) {
            float value = float(logits[token * row.column]);
            ulong entry = entry_of(value, token);
            if (bin_of(exponent_of(value, row), entry, range, row) == bin) {
                first = min(first, entry);
                last = max(last, entry);
            }
        }
        ends_of(first, last, row.thread_number, memory);
        range.first = first;
        range.last = last;
        range.shift = 0;
        range.bins = BINS;
        while (((range.last - range.first) >> uint(range.shift)) >= ulong(BINS)) {
            ++range.shift;
        }
        fill_bins(range, row, logits, memory);
        bin = bin_with(target, by_count, row.thread_number, memory);
    }
    Window window;
    window.before = count_at(bin - 1, memory);
    window.mass_before = mass_at(bin - 1, memory);
    window.taken = list_bins(bin, bin, range, row, logits, memory);
    Found found = find_in(window, target, by_count, row, memory);
    found.mass += mass;
    found.place = CAPACITY;
    return found;
}

// The same of all tokens. All likelier ones are listed too where that is no more work, or where what is looked for next
// is mostly among them: by weight behind a number.
METAL_FUNC Found find(
    ulong target, bool by_count, thread Range& range, thread Window& window, thread const Row& row,
    device const a_t* logits, threadgroup Memory& memory)
{
    if (by_count ? target - ulong(window.before) < ulong(window.taken) : target - window.mass_before < window.mass) {
        return find_in(window, target, by_count, row, memory); // differences below 0 are large
    }
    int bin = bin_with(target, by_count, row.thread_number, memory);
    if (bin == BINS && range.bins < BINS) {
        range.bins = BINS;
        fill_bins(range, row, logits, memory);
        bin = bin_with(target, by_count, row.thread_number, memory);
    }
    Found found;
    found.entry = ~0ul;
    found.mass = 0ul;
    found.place = CAPACITY;
    found.is_there = false;
    if (bin == BINS) {
        return found;
    }
    uint end = count_at(bin, memory);
    if (end - count_at(bin - 1, memory) > uint(CAPACITY)) {
        found = find_deep(bin, target, by_count, range, row, logits, memory);
        window.taken = 0;
        window.mass = 0ul;
        fill_bins(range, row, logits, memory);
        return found;
    }
    bool has_all = end <= uint(by_count ? CAPACITY : FEW);
    window.before = has_all ? 0u : count_at(bin - 1, memory);
    window.mass_before = has_all ? 0ul : mass_at(bin - 1, memory);
    window.mass = mass_at(bin, memory) - window.mass_before;
    window.taken = list_bins(has_all ? 0 : bin, bin, range, row, logits, memory);
    return find_in(window, target, by_count, row, memory);
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

// Lists the first `top_k` tokens, and some behind them, if there is room: so many of the threads' best ones are in the
// first bins, and with them all that are likelier. Returns how many there are.
METAL_FUNC int list_likeliest(
    ulong own, long top_k, thread const Range& range, thread const Row& row, device const a_t* logits,
    threadgroup Memory& memory)
{
    clear_bins(row.thread_number, memory);
    int bin = own == ~0ul ? BINS : bin_of(exponent_of(value_of(own), row), own, range, row);
    if (bin < BINS) {
        add(bin, 0ul, memory);
    }
    add_up_bins(row.thread_number, memory);
    bin = bin_with(ulong(top_k - 1l), true, row.thread_number, memory);
    return bin < BINS ? list_bins(0, bin, range, row, logits, memory) : 0;
}

// The last token that is kept, of all in order.
METAL_FUNC Found last_kept(
    ulong own, float top_p, long top_k, thread const Row& row, device const a_t* logits, threadgroup Memory& memory)
{
    Range range;
    range.first = 0ul;
    range.last = 0ul;
    range.shift = -1;
    range.bins = NEAR * row.bins < float(BINS - 1) ? int(NEAR * row.bins) + 1 : BINS;
    Window window;
    window.taken = 0;
    window.before = 0u;
    window.mass_before = 0ul;
    if (top_k > 0l && top_k <= long(THREADS / 2)) {
        window.taken = list_likeliest(own, top_k, range, row, logits, memory);
    }
    window.mass = window.taken > 0 ? ~0ul : 0ul; // all that is looked for
    ulong mass = window.taken > 0 ? 0ul : fill_bins(range, row, logits, memory);
    Found last;
    last.entry = ~0ul;
    last.place = CAPACITY;
    if (top_k > 0l) {
        last = find(ulong(top_k - 1l), true, range, window, row, logits, memory);
        mass = last.is_there ? last.mass : mass;
    }
    if (top_p < 1.0f) {
        ulong wanted = max(share_of(mass, uint(top_p * 4294967296.0f)), 1ul);
        last = find(wanted - 1ul, false, range, window, row, logits, memory);
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

// The token at a random share of what the kept ones weigh. Here of the first ones of the list, no more than FEW.
METAL_FUNC long at_share_of_list(
    thread const Kept& kept, int number, uint high, uint low, thread const Row& row, threadgroup Memory& memory)
{
    int at = row.thread_number;
    ulong entry = at < number ? memory.list[at] : 0ul;
    uint token = uint(entry & 0xfffffffful);
    memory.masses[at] = at < number ? kept_weight(value_of(entry), int(token), kept, row) : 0ul;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    ulong before = 0ul;
    ulong all = 0ul;
    for (int other = 0; other < number && at < number; ++other) {
        all += memory.masses[other];
        before += uint(memory.list[other] & 0xfffffffful) < token ? memory.masses[other] : 0ul;
    }
    ulong target = share_of(all, high, low);
    if (at < number && before <= target && target - before < memory.masses[at]) {
        memory.entry = ulong(token);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    return long(memory.entry);
}

// The same of all tokens; each thread has neighbours.
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
    ulong last_one = 0ul;
    for (int token = row.thread_number; token < row.length; token += THREADS) {
        ulong entry = entry_of(float(logits[token * row.column]), token);
        own = min(own, entry);
        last_one = max(last_one, entry);
    }
    ulong best = own;
    ends_of(best, last_one, row.thread_number, memory);
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
    int number = CAPACITY;
    if (top_k > 0l || top_p < 1.0f) {
        row.bins = float(BINS - 1) / max(min(-exponent_of(value_of(last_one), row), DEPTH), 1e-30f);
        Found last = last_kept(own, top_p, top_k, row, logits, memory);
        kept.last = last.entry;
        number = last.place + 1;
    }
    return number <= FEW ? at_share_of_list(kept, number, high, low, row, memory)
                         : at_share(kept, high, low, row, logits, memory);
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
    row.bins = 0.0f;
    row.scale = limit[0] > 0.0f ? min(limit[0], 3.4028234e38f) : 0.0f; // no bin is ahead of the first, nor a NaN
    long token = drawn(
        row, limit[p.limits_column], limit[2 * p.limits_column], top_k[at * p.top_k_row],
        uint(word[0]), uint(word[p.words_column]), logits + at * p.logits_row, memory);
    if (thread_index == 0) {
        out[output_index(0, 0, at, p)] = out_t(epilogue(token, 0, 0, at, EPILOGUE_ARGUMENTS p));
    }
}
