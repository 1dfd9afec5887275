// The first RUN elements of segments of long rows, in order, where RUN is small: [rows, segments, RUN] entries. The
// RUN-th of the threads' first elements is a bound: only elements up to it are sorted, at most ITEMS of each of RUN
// threads. Grid: rows in x, segments in y.
constexpr int CAPACITY = RUN * ITEMS > THREADS ? RUN * ITEMS : THREADS;

extern "C" __global__ void __launch_bounds__(THREADS) sort_select(
    SOURCE_PARAMETERS Entry* kept, const Params p)
{
    __shared__ Entry entries[CAPACITY];
    __shared__ int taken;
    wait_for_previous_grid();
    int row = int(blockIdx.x), first = int(blockIdx.y) * (THREADS * ITEMS) + int(threadIdx.x);
    int outer = row / p.inner, inner = row % p.inner;
    Entry own[ITEMS], best = last_entry();
    #pragma unroll
    for (int item = 0; item < ITEMS; ++item) {
        int place = first + item * THREADS;
        own[item] = last_entry();
        if (place < p.length) {
            own[item] = entry_of(key_of(element(0, outer, inner, place, SOURCE_ARGUMENTS p)), place);
        }
    }
    #pragma unroll
    for (int item = 0; item < ITEMS; ++item) {
        if (is_before(own[item], best)) {
            best = own[item];
        }
    }
    entries[threadIdx.x] = best;
    if (threadIdx.x == 0) {
        taken = 0;
    }
    __syncthreads();
    sort_runs(entries, THREADS, RUN);
    keep_first(entries, THREADS, THREADS, RUN);
    Entry bound = entries[RUN - 1];
    __syncthreads();
    #pragma unroll
    for (int item = 0; item < ITEMS; ++item) {
        if (!is_before(bound, own[item]) && is_before(own[item], last_entry())) {
            entries[atomicAdd(&taken, 1)] = own[item];
        }
    }
    __syncthreads();
    int total = RUN;
    while (total < taken) {
        total *= 2;
    }
    for (int at = taken + int(threadIdx.x); at < total; at += THREADS) {
        entries[at] = last_entry();
    }
    __syncthreads();
    sort_runs(entries, total, RUN);
    keep_first(entries, total, total, RUN);
    for (int at = int(threadIdx.x); at < RUN; at += THREADS) {
        kept[((long long)row * gridDim.y + blockIdx.y) * RUN + at] = entries[at];
    }
}
