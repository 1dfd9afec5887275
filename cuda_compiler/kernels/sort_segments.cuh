// SEGMENTS rows, or one segment of a row, brought into shared memory, of which the first RUN are found, in order. What is
// sorted are elements, or with FROM_RUNS the entries that launches ahead have kept.
#if FROM_RUNS
#define INPUT_PARAMETERS const Entry* runs,
#define INPUT_ARGUMENTS runs,
#else
#define INPUT_PARAMETERS SOURCE_PARAMETERS
#define INPUT_ARGUMENTS SOURCE_ARGUMENTS
#endif

__shared__ Entry entries[SEGMENT * SEGMENTS];

__device__ __forceinline__ void sort_segments(INPUT_PARAMETERS const Params& p)
{
    int first = int(blockIdx.y) * SEGMENT;
    for (int at = int(threadIdx.x); at < SEGMENT * SEGMENTS; at += THREADS) {
        int row = int(blockIdx.x) * SEGMENTS + at / SEGMENT, place = first + at % SEGMENT;
        Entry entry = last_entry();
        if (row < p.rows && place < p.length) {
#if FROM_RUNS
            entry = runs[(long long)row * p.length + place];
#else
            entry = entry_of(key_of(element(0, row / p.inner, row % p.inner, place, SOURCE_ARGUMENTS p)), place);
#endif
        }
        entries[at] = entry;
    }
    __syncthreads();
    sort_runs(entries, SEGMENT * SEGMENTS, RUN);
    keep_first(entries, SEGMENT * SEGMENTS, SEGMENT, RUN);
}
