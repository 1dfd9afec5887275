// Merges pairs of neighbouring runs of rows [rows, length]: each threadgroup makes THREADS * ITEMS entries of a pair,
// each thread ITEMS of them. Where they begin in both runs is searched for (Green, McColl and Bader, "GPU Merge Path",
// 2012). Grid: rows in x, tiles in y.

// How many of the first `count` entries of two sorted lists merged are those of the first list.
METAL_FUNC int share_of_first(device const Entry* a, int a_count, device const Entry* b, int b_count, int count)
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

kernel void sort_merge(
    device const Entry* runs [[buffer(0)]],
    device Entry* merged [[buffer(MERGED_BUFFER)]],
    constant Params& p [[buffer(PARAMS_BUFFER)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]])
{
    int start = (int(group.y) * THREADS + int(thread_index)) * ITEMS, pair = start / (2 * p.run) * (2 * p.run);
    if (start >= p.length) {
        return;
    }
    device const Entry* a = runs + int(group.x) * p.length + pair;
    device const Entry* b = a + p.run;
    int a_count = min(p.run, p.length - pair), b_count = max(0, min(p.run, p.length - pair - p.run));
    int from = start - pair, to = min(from + ITEMS, a_count + b_count);
    int i = share_of_first(a, a_count, b, b_count, from), j = from - i;
    device Entry* out = merged + int(group.x) * p.length + pair;
    for (int at = from; at < to; ++at) {
        bool takes_a = j >= b_count;
        if (i < a_count && j < b_count) {
            takes_a = is_before(a[i], b[j]);
        }
        if (takes_a) {
            out[at] = a[i];
            i += 1;
        } else {
            out[at] = b[j];
            j += 1;
        }
    }
}
