// Tokens of some bins, listed in order (see `draw`): each block of a row lists its own, which all then have.
constexpr int COUNTERS = THREADS / FEW; // lanes that look at a token's place together

// Puts few entries in order: the place of each is how many are ahead of it.
__device__ __forceinline__ void order_few(Entry* entries, int count)
{
    int at = int(threadIdx.x) / COUNTERS, share = int(threadIdx.x) % COUNTERS, place = 0;
    Entry own = at < count ? entries[at] : 0ull;
    #pragma unroll 4
    for (int other = share; other < count; other += COUNTERS) {
        place += entries[other] < own;
    }
    #pragma unroll
    for (int distance = 1; distance < COUNTERS; distance *= 2) {
        place += __shfl_xor_sync(ALL_LANES, place, distance);
    }
    __syncthreads();
    if (share == 0 && at < count) {
        entries[place] = own;
    }
    __syncthreads();
}

#if PARTS > 1
// Gathers what the blocks of the row have listed, if it is not too much; returns how many tokens that is.
__device__ __forceinline__ int gather_lists(Memory& memory)
{
    int ends[PARTS], taken = 0;
    exchange(OF_LISTS, uint64(memory.taken), memory, [&](int rank, uint64 of_block) {
        taken += int(of_block);
        ends[rank] = taken;
    });
    if (taken > CAPACITY) {
        return taken;
    }
    #pragma unroll 1
    for (int at = int(threadIdx.x); at < taken; at += THREADS) {
        int rank = 0, begin = 0;
        #pragma unroll
        for (int other = 0; other + 1 < PARTS; ++other) {
            bool is_behind = at >= ends[other];
            rank += is_behind;
            begin = is_behind ? ends[other] : begin;
        }
        Pair entries;
        load_of_block(memory.reached + (at - begin) / 2 * 2, rank, entries);
        memory.list[at] = (at - begin) % 2 == 0 ? entries.first : entries.second;
    }
    synchronize_row();
    return taken;
}
#endif

// Puts the tokens that are listed in order; returns how many there are, 0 where there is no room for them.
__device__ __forceinline__ int sort_list(Memory& memory)
{
    __syncthreads();
#if PARTS > 1
    int taken = gather_lists(memory);
#else
    int taken = int(memory.taken);
#endif
    if (taken > CAPACITY) {
        return 0;
    }
    if (taken <= FEW) {
        order_few(memory.list, taken);
    } else {
        for (int at = taken + int(threadIdx.x); at < CAPACITY; at += THREADS) {
            memory.list[at] = ~0ull;
        }
        __syncthreads();
        Entry entries[ITEMS];
        #pragma unroll
        for (int item = 0; item < ITEMS; ++item) {
            entries[item] = memory.list[int(threadIdx.x) * ITEMS + item];
        }
        sort_registers(entries, memory.list);
    }
    return taken;
}

// Replaces the sums of weights by those of the list, behind what is ahead of it.
__device__ __forceinline__ void weigh_list(int taken, uint64 mass_before, const Row& row, Memory& memory)
{
    int first = int(threadIdx.x) * OWN_ENTRIES;
    uint64 weights[OWN_ENTRIES], mass = 0ull;
    uint number = 0u;
    #pragma unroll
    for (int u = 0; u < OWN_ENTRIES; ++u) {
        weights[u] = first + u < taken ? weight_of(depth_of(value_of(memory.list[first + u]), row)) : 0ull;
        mass += weights[u];
    }
    sum_before(mass, number, memory);
    mass += mass_before;
    #pragma unroll
    for (int u = 0; u < OWN_ENTRIES; ++u) {
        mass += weights[u];
        memory.reached[first + u] = mass;
    }
    __syncthreads();
}

// Lists the tokens of bins `first` to `last` in order, if there is room; returns how many there are. So much weighs what
// is ahead of them.
__device__ __noinline__ int list_bins(
    int first, int last, uint64 mass_before, const Range& range, const Row& row, Memory& memory)
{
    Entry* own = PARTS > 1 ? memory.reached : memory.list;
    __syncthreads();
    if (threadIdx.x == 0) {
        memory.taken = 0u;
    }
    __syncthreads();
    auto append = [&](float value, int token) {
        uint at = atomicAdd(&memory.taken, 1u);
        if (at < uint(CAPACITY)) {
            own[at] = entry_of(value, token);
        }
    };
    if (range.shift < 0) {
        float begin = float(first), end = last < BINS - 1 ? float(last + 1) : float(2 * BINS);
        walk(row, [&](float value, int token) {
            float depth = depth_of(value, row), bin = depth * row.bins;
            if (depth <= OCTAVES && bin >= begin && bin < end) {
                append(value, token);
            }
        });
    } else {
        walk(row, [&](float value, int token) {
            int bin = bin_of(value, token, range, row);
            if (bin >= first && bin <= last) {
                append(value, token);
            }
        });
    }
    int taken = sort_list(memory);
    weigh_list(taken, mass_before, row, memory);
    return taken;
}
