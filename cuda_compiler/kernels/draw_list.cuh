// Tokens of some bins, listed in order (see `draw`): each block of a row lists its own, which all then have.
constexpr int COUNTERS = THREADS / FEW; // lanes that look at a token's place together

// Puts few entries in order: the place of each is how many are ahead of it.
__device__ __forceinline__ void order_few(Entry* entries, int count)
{
    int place = 0, at = int(threadIdx.x) / COUNTERS, share = int(threadIdx.x) % COUNTERS;
    Entry own = at < count ? entries[at] : 0ull;
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
// Merges the lists of all blocks, which are in order and end at `ends` of this block's list.
__device__ __forceinline__ void merge_lists(const int (&ends)[PARTS], Memory& memory)
{
    Entry entries[ITEMS];
    int places[ITEMS];
    #pragma unroll
    for (int item = 0; item < ITEMS; ++item) {
        int at = int(threadIdx.x) + item * THREADS;
        if (item * THREADS >= ends[PARTS - 1]) {
            break;
        }
        entries[item] = memory.list[at < ends[PARTS - 1] ? at : 0];
        int reached[PARTS]; // behind the entries of each list that are ahead of this one
        #pragma unroll
        for (int rank = 0; rank < PARTS; ++rank) {
            reached[rank] = rank > 0 ? ends[rank - 1] : 0;
        }
        for (int half = FEW; half > 0; half /= 2) { // in all lists side by side, as each step waits for its load
            #pragma unroll
            for (int rank = 0; rank < PARTS; ++rank) {
                int next = reached[rank] + half;
                bool is_behind = next <= ends[rank] && memory.list[min(next, CAPACITY) - 1] < entries[item];
                reached[rank] = is_behind ? next : reached[rank];
            }
        }
        places[item] = 0;
        #pragma unroll
        for (int rank = 0; rank < PARTS; ++rank) {
            places[item] += reached[rank] - (rank > 0 ? ends[rank - 1] : 0);
        }
    }
    __syncthreads();
    #pragma unroll
    for (int item = 0; item < ITEMS; ++item) {
        if (int(threadIdx.x) + item * THREADS < ends[PARTS - 1]) {
            memory.list[places[item]] = entries[item];
        }
    }
    __syncthreads();
}

// Gathers what the blocks of the row have listed, if it is not too much; returns how many tokens that is. Short lists
// end up in order.
__device__ __forceinline__ int gather_lists(bool& is_sorted, Memory& memory)
{
    int ends[PARTS], taken = 0, most = 0, count = int(memory.taken);
    if (count <= FEW) {
        order_few(memory.own, count);
    }
    exchange(OF_BINS, uint64(count), memory, [&](int rank, uint64 of_block) {
        most = max(most, int(of_block));
        taken += int(of_block);
        ends[rank] = taken;
    });
    if (taken > CAPACITY) {
        return taken;
    }
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
    is_sorted = most <= FEW;
    if (is_sorted) {
        merge_lists(ends, memory);
    }
    return taken;
}
#endif

// Puts the tokens that are listed in order; returns how many there are, 0 where there is no room for them.
__device__ __forceinline__ int sort_list(Memory& memory)
{
    __syncthreads();
    int taken = int(memory.taken);
#if PARTS > 1
    bool is_sorted = false;
    taken = gather_lists(is_sorted, memory);
    if (is_sorted) {
        return taken;
    }
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

// Lists the tokens of bins `first` to `last` in order, if there is room; returns how many there are.
__device__ __noinline__ int list_bins(int first, int last, const Range& range, const Row& row, Memory& memory)
{
    Entry* own = PARTS > 1 ? memory.own : memory.list;
    __syncthreads();
    if (threadIdx.x == 0) {
        memory.taken = 0u;
    }
    __syncthreads();
    walk(row, [&](float value, int token) {
        int bin = bin_of(value, token, range, row);
        if (bin >= first && bin <= last) {
            uint at = atomicAdd(&memory.taken, 1u);
            if (at < uint(CAPACITY)) {
                own[at] = entry_of(value, token);
            }
        }
    });
    return sort_list(memory);
}
