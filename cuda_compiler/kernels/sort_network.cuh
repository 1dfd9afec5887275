// Bitonic sorting of entries in shared memory by a block of THREADS. Sizes are powers of two.

__device__ __forceinline__ void put_in_order(Entry* entries, int low, int high)
{
    Entry a = entries[low], b = entries[high];
    if (is_before(b, a)) {
        entries[low] = b;
        entries[high] = a;
    }
}

// While a step, and the one ahead of it, reach no further than 64 entries, each warp works on entries of its own.
__device__ __forceinline__ void wait_for_step(int reach)
{
    if (reach > 64) {
        __syncthreads();
    } else {
        __syncwarp();
    }
}

// Sorts every `run` of `total` entries. All threads have waited for the entries, and will have for the result.
__device__ __forceinline__ void sort_runs(Entry* entries, int total, int run)
{
    for (int size = 2; size <= run; size *= 2) {
        for (int pair = int(threadIdx.x); pair < total / 2; pair += THREADS) {
            int low = pair * 2 - (pair & (size / 2 - 1));
            put_in_order(entries, low, low ^ (size - 1));
        }
        wait_for_step(size);
        for (int stride = size / 4; stride > 0; stride /= 2) {
            for (int pair = int(threadIdx.x); pair < total / 2; pair += THREADS) {
                int low = pair * 2 - (pair & (stride - 1));
                put_in_order(entries, low, low + stride);
            }
            wait_for_step(stride > 1 ? 2 * stride : 2 * size); // the next size reaches further
        }
    }
    __syncthreads();
}

// The first `run` of every `segment` of `total` entries, in order, at its beginning; all runs are sorted.
__device__ __forceinline__ void keep_first(Entry* entries, int total, int segment, int run)
{
    for (int gap = run, factor = 2; gap < segment; gap *= 2, factor *= 2) {
        int kept = total / factor;
        for (int at = int(threadIdx.x); at < kept; at += THREADS) {
            int low = (at & ~(run - 1)) * factor + (at & (run - 1)), high = (low ^ (run - 1)) + gap;
            if (is_before(entries[high], entries[low])) {
                entries[low] = entries[high];
            }
        }
        __syncthreads();
        for (int stride = run / 2; stride > 0; stride /= 2) {
            for (int pair = int(threadIdx.x); pair < kept / 2; pair += THREADS) {
                int within = pair & (run / 2 - 1);
                int low = (pair - within) * 2 * factor + within * 2 - (within & (stride - 1));
                put_in_order(entries, low, low + stride);
            }
            __syncthreads();
        }
    }
}
