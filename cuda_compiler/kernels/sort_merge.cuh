// Merges pairs of neighbouring runs of rows [rows, length]: each block makes TILE entries of a pair, each thread ITEMS
// of them. Where they begin in both runs is searched for (Green, McColl and Bader, "GPU Merge Path", 2012).
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

// The same, found by a warp: each lane tries the last place of one of 32 parts of what is left.
__device__ __forceinline__ int share_of_first_by_warp(
    const Entry* a, int a_count, const Entry* b, int b_count, int count)
{
    int low = max(0, count - b_count), high = min(count, a_count);
    while (low < high) {
        int part = (high - low + 31) / 32, at = low + (int(threadIdx.x) % 32 + 1) * part - 1;
        bool behind = at < high && is_before(a[at], b[count - 1 - at]);
        low += __popc(__ballot_sync(~0u, behind)) * part;
        high = min(high, low + part - 1);
    }
    return low;
}

extern "C" __global__ void __launch_bounds__(THREADS) sort_merge(const Entry* runs, Entry* merged, const Params p)
{
    __shared__ Entry entries[TILE];
    __shared__ int bounds[2];
    wait_for_previous_grid();
    int start = int(blockIdx.y) * TILE, pair = start / (2 * p.run) * (2 * p.run);
    const Entry* a = runs + (long long)blockIdx.x * p.length + pair;
    const Entry* b = a + p.run;
    int a_count = min(p.run, p.length - pair), b_count = max(0, min(p.run, p.length - pair - p.run));
    int from = start - pair, to = min(from + TILE, a_count + b_count);
    int warp = int(threadIdx.x) / 32;
    if (warp < 2) { // both searches at once
        bounds[warp] = share_of_first_by_warp(a, a_count, b, b_count, warp == 0 ? from : to);
    }
    __syncthreads();
    int a_from = bounds[0], a_to = bounds[1];
    int own_a = a_to - a_from, own_b = to - from - own_a;
    for (int at = int(threadIdx.x); at < to - from; at += THREADS) {
        entries[at] = at < own_a ? a[a_from + at] : b[from - a_from + at - own_a];
    }
    __syncthreads();
    int first = min(int(threadIdx.x) * ITEMS, to - from), last = min(first + ITEMS, to - from);
    int i = share_of_first(entries, own_a, entries + own_a, own_b, first), j = first - i;
    Entry own[ITEMS];
#pragma unroll
    for (int k = 0; k < ITEMS; ++k) {
        if (first + k < last) {
            bool takes_a = j >= own_b || (i < own_a && is_before(entries[i], entries[own_a + j]));
            own[k] = takes_a ? entries[i++] : entries[own_a + j++];
        }
    }
    __syncthreads(); // all have read what is overwritten, so that neighbours are stored by neighbouring threads
#pragma unroll
    for (int k = 0; k < ITEMS; ++k) {
        if (first + k < last) {
            entries[first + k] = own[k];
        }
    }
    __syncthreads();
    Entry* out = merged + (long long)blockIdx.x * p.length + start;
    for (int at = int(threadIdx.x); at < to - from; at += THREADS) {
        out[at] = entries[at];
    }
}
