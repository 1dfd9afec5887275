// Bitonic sorting of entries in threadgroup memory by THREADS threads. Sizes are powers of two.

METAL_FUNC void put_in_order(threadgroup Entry* entries, int low, int high)
{
    Entry a = entries[low], b = entries[high];
    if (is_before(b, a)) {
        entries[low] = b;
        entries[high] = a;
    }
}

// Sorts every `run` of `total` entries. All threads have waited for the entries, and will have for the result.
METAL_FUNC void sort_runs(threadgroup Entry* entries, int total, int run, int thread_index)
{
    for (int size = 2; size <= run; size *= 2) {
        for (int pair = thread_index; pair < total / 2; pair += THREADS) {
            int low = pair * 2 - (pair & (size / 2 - 1));
            put_in_order(entries, low, low ^ (size - 1));
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (int stride = size / 4; stride > 0; stride /= 2) {
            for (int pair = thread_index; pair < total / 2; pair += THREADS) {
                int low = pair * 2 - (pair & (stride - 1));
                put_in_order(entries, low, low + stride);
            }
            threadgroup_barrier(mem_flags::mem_threadgroup);
        }
    }
}

// The first `run` of every `segment` of `total` entries, in order, at its beginning; all runs are sorted.
METAL_FUNC void keep_first(threadgroup Entry* entries, int total, int segment, int run, int thread_index)
{
    int factor = 2;
    for (int gap = run; gap < segment; gap *= 2) {
        int kept = total / factor;
        for (int at = thread_index; at < kept; at += THREADS) {
            int low = (at & ~(run - 1)) * factor + (at & (run - 1)), high = (low ^ (run - 1)) + gap;
            if (is_before(entries[high], entries[low])) {
                entries[low] = entries[high];
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (int stride = run / 2; stride > 0; stride /= 2) {
            for (int pair = thread_index; pair < kept / 2; pair += THREADS) {
                int within = pair & (run / 2 - 1);
                int low = (pair - within) * 2 * factor + within * 2 - (within & (stride - 1));
                put_in_order(entries, low, low + stride);
            }
            threadgroup_barrier(mem_flags::mem_threadgroup);
        }
        factor *= 2;
    }
}
