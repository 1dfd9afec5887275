// Merges pairs of neighbouring runs of rows [rows, length]: each block makes TILE entries of a pair, each thread ITEMS of them.
// Where they begin in both runs is searched for (Green, McColl and Bader, "GPU Merge Path", 2012).
// Grid: rows in x, tiles in y.
constexpr int TILE = THREADS * ITEMS;

// How many of the first `count` entries of two sorted lists merged are those of the first list.
__device__ __forceinline__ int share_of_first(const Entry* a, int a_count, const Entry* b, int b_count, int count)
{
    int low = max(0, count - b_count), high = min(count, a_count);
    while (low < high) {
        int middle = (low + high) / 2;
        if (is_before(a[middle], b[count - 1 - middle])) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

extern "C" __global__ void __launch_bounds__(THREADS) sort_merge(const Entry* runs, Entry* merged, const Params p)
{
    __shared__ Entry entries[TILE];
    wait_for_previous_grid();
    int start = int(blockIdx.y) * TILE, pair = start / (2 * p.run) * (2 * p.run);
    const Entry* a = runs + (long long)blockIdx.x * p.length + pair;
    const Entry* b = a + p.run;
    int a_count = min(p.run, p.length - pair), b_count = max(0, min(p.run, p.length - pair - p.run));
    int from = start - pair, to = min(from + TILE, a_count + b_count);
    int a_from = share_of_first(a, a_count, b, b_count, from), a_to = share_of_first(a, a_count, b, b_count, to);
    int own_a = a_to - a_from, own_b = to - from - own_a;
    for (int at = int(threadIdx.x); at < to - from; at += THREADS) {
        entries[at] = at < own_a ? a[a_from + at] : b[from - a_from + at - own_a];
    }
    __syncthreads();
    int first = min(int(threadIdx.x) * ITEMS, to - from), last = min(first + ITEMS, to - from);
    int i = share_of_first(entries, own_a, entries + own_a, own_b, first), j = first - i;
    Entry* out = merged + (long long)blockIdx.x * p.length + start;
    for (int at = first; at < last; ++at) {
        bool takes_a = j >= own_b || (i < own_a && is_before(entries[i], entries[own_a + j]));
        out[at] = takes_a ? entries[i++] : entries[own_a + j++];
    }
}
