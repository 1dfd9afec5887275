// Tokens of a row, counted and weighed in bins along their order (see `draw`).
constant constexpr int BINS = 1344;
constant constexpr float DEPTH = 28.0f; // of exponents that have a weight
constant constexpr float NEAR = 9.0f; // of exponents that most of the weight lies in
constant constexpr float ONE = 1099511627776.0f; // the greatest weight
constant constexpr int FEW = THREADS; // tokens of a list whose places are counted
constant constexpr int OWN_BINS = (BINS + THREADS - 1) / THREADS;
constant constexpr int OWN_ENTRIES = CAPACITY / THREADS;

struct Memory {
    atomic_uint counts[BINS];
    atomic_uint lows[BINS];
    atomic_uint highs[BINS];
    ulong list[CAPACITY];
    ulong masses[THREADS];
    uint numbers[THREADS];
    atomic_uint taken;
    int place;
    ulong entry;
    ulong mass;
};

struct Row {
    int thread_number;
    int length;
    int column;
    float highest;
    float scale;
    float bins; // of an exponent of 1, so that they reach to the lowest logit
};

// Which tokens are in bins: those by their exponent, or those of a part of the order, its entries divided by 2^shift.
struct Range {
    ulong first;
    ulong last;
    int shift; // -1: by exponent
    int bins;
};

// The tokens that are in the list, in order, and what lies ahead of them; none where none are taken.
struct Window {
    int taken;
    uint before;
    ulong mass_before;
    ulong mass;
};

struct Found {
    ulong entry;
    ulong mass; // up to the end of it
    int place;  // in the list; CAPACITY where that does not begin with the first token
    bool is_there;
};

METAL_FUNC ulong entry_of(float value, int token)
{
    uint bits = as_type<uint>(value + 0.0f);
    uint key = bits >> 31 != 0u ? bits : ~(bits | 0x80000000u);
    return (ulong(value != value ? 0u : key) << 32) | ulong(uint(token));
}

METAL_FUNC float value_of(ulong entry)
{
    uint key = uint(entry >> 32);
    return as_type<float>(key >> 31 != 0u ? key : ~key & 0x7fffffffu);
}

METAL_FUNC float exponent_of(float value, thread const Row& row) { return (value - row.highest) * row.scale; }

METAL_FUNC ulong weight_of(float exponent) { return ulong(precise::exp(exponent) * ONE); }

METAL_FUNC int bin_of(float exponent, ulong entry, thread const Range& range, thread const Row& row)
{
    if (range.shift < 0) {
        return exponent > -DEPTH ? min(int(-exponent * row.bins), BINS - 1) : BINS;
    }
    return exponent > -DEPTH && entry >= range.first && entry <= range.last
        ? int((entry - range.first) >> uint(range.shift))
        : BINS;
}

METAL_FUNC uint count_at(int bin, threadgroup Memory& memory)
{
    return bin < 0 ? 0u : atomic_load_explicit(&memory.counts[bin], memory_order_relaxed);
}

METAL_FUNC ulong mass_at(int bin, threadgroup Memory& memory)
{
    if (bin < 0) {
        return 0ul;
    }
    ulong high = ulong(atomic_load_explicit(&memory.highs[bin], memory_order_relaxed));
    return (high << 32) + ulong(atomic_load_explicit(&memory.lows[bin], memory_order_relaxed));
}

METAL_FUNC void put(int bin, uint count, ulong mass, threadgroup Memory& memory)
{
    atomic_store_explicit(&memory.counts[bin], count, memory_order_relaxed);
    atomic_store_explicit(&memory.lows[bin], uint(mass), memory_order_relaxed);
    atomic_store_explicit(&memory.highs[bin], uint(mass >> 32), memory_order_relaxed);
}

METAL_FUNC void add(int bin, ulong mass, threadgroup Memory& memory)
{
    uint low = uint(mass);
    atomic_fetch_add_explicit(&memory.counts[bin], 1u, memory_order_relaxed);
    uint before = atomic_fetch_add_explicit(&memory.lows[bin], low, memory_order_relaxed);
    uint high = uint(mass >> 32) + (before + low < low ? 1u : 0u);
    if (high != 0u) {
        atomic_fetch_add_explicit(&memory.highs[bin], high, memory_order_relaxed);
    }
}

// What the threads before this one have; all of it stands behind the last one. One thread adds up, which takes no
// longer than a barrier for each doubling.
METAL_FUNC void sum_before(thread ulong& mass, thread uint& number, int thread_number, threadgroup Memory& memory)
{
    memory.masses[thread_number] = mass;
    memory.numbers[thread_number] = number;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (thread_number == 0) {
        for (int other = 1; other < THREADS; ++other) {
            memory.masses[other] += memory.masses[other - 1];
            memory.numbers[other] += memory.numbers[other - 1];
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    mass = memory.masses[thread_number] - mass;
    number = memory.numbers[thread_number] - number;
}

METAL_FUNC ulong sum_of(ulong mass, int thread_number, threadgroup Memory& memory)
{
    uint number = 0u;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    sum_before(mass, number, thread_number, memory);
    ulong sum = memory.masses[THREADS - 1];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    return sum;
}

// Replaces entries of each thread by the first and the last of all threads.
METAL_FUNC void ends_of(thread ulong& first, thread ulong& last, int thread_number, threadgroup Memory& memory)
{
    memory.masses[thread_number] = first;
    memory.list[thread_number] = last;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (thread_number == 0) {
        for (int other = 1; other < THREADS; ++other) {
            memory.masses[0] = min(memory.masses[0], memory.masses[other]);
            memory.list[0] = max(memory.list[0], memory.list[other]);
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    first = memory.masses[0];
    last = memory.list[0];
    threadgroup_barrier(mem_flags::mem_threadgroup);
}

METAL_FUNC void clear_bins(int thread_number, threadgroup Memory& memory)
{
    for (int bin = thread_number; bin < BINS; bin += THREADS) {
        put(bin, 0u, 0ul, memory);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
}

// Replaces counts and weights of bins by the sums up to each bin.
METAL_FUNC void add_up_bins(int thread_number, threadgroup Memory& memory)
{
    threadgroup_barrier(mem_flags::mem_threadgroup);
    int first = thread_number * OWN_BINS;
    ulong mass = 0ul;
    uint count = 0u;
    for (int bin = first; bin < min(first + OWN_BINS, BINS); ++bin) {
        mass += mass_at(bin, memory);
        count += count_at(bin, memory);
    }
    sum_before(mass, count, thread_number, memory);
    for (int bin = first; bin < min(first + OWN_BINS, BINS); ++bin) {
        mass += mass_at(bin, memory);
        count += count_at(bin, memory);
        put(bin, count, mass, memory);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
}

// Fills the bins with the tokens of a range; those behind its last bin are weighed together. Gives what all of them
// weigh.
METAL_FUNC ulong fill_bins(
    thread const Range& range, thread const Row& row, device const a_t* logits, threadgroup Memory& memory)
{
    clear_bins(row.thread_number, memory);
    ulong all = 0ul;
    for (int token = row.thread_number; token < row.length; token += THREADS) {
        float value = float(logits[token * row.column]);
        float exponent = exponent_of(value, row);
        int bin = bin_of(exponent, entry_of(value, token), range, row);
        if (bin < BINS) {
            ulong weight = weight_of(exponent);
            all += weight;
            if (bin < range.bins) {
                add(bin, weight, memory);
            }
        }
    }
    add_up_bins(row.thread_number, memory);
    return sum_of(all, row.thread_number, memory);
}

METAL_FUNC bool is_behind(int bin, ulong target, bool by_count, threadgroup Memory& memory)
{
    return by_count ? ulong(count_at(bin, memory)) > target : mass_at(bin, memory) > target;
}

// The first bin that ends behind `target`; BINS where there is none.
METAL_FUNC int bin_with(ulong target, bool by_count, int thread_number, threadgroup Memory& memory)
{
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (thread_number == 0) {
        memory.place = BINS;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int bin = thread_number; bin < BINS; bin += THREADS) {
        if (is_behind(bin, target, by_count, memory)
            && (bin == 0 || !is_behind(bin - 1, target, by_count, memory))) {
            memory.place = bin;
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    return memory.place;
}
