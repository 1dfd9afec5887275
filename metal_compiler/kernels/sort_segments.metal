// SEGMENTS rows, or one segment of a row, brought into threadgroup memory, of which the first RUN are found, in order.
// What is sorted are elements, or with FROM_RUNS the entries that launches ahead have kept.
#if FROM_RUNS
#define INPUT_PARAMETERS device const Entry* runs,
#define INPUT_ARGUMENTS runs,
#else
#define INPUT_PARAMETERS SOURCE_PARAMETERS
#define INPUT_ARGUMENTS SOURCE_ARGUMENTS
#endif

METAL_FUNC void sort_segments(
    threadgroup Entry* entries, INPUT_PARAMETERS constant Params& p, uint3 group, int thread_index)
{
    int first = int(group.y) * SEGMENT;
    for (int at = thread_index; at < SEGMENT * SEGMENTS; at += THREADS) {
        int row = int(group.x) * SEGMENTS + at / SEGMENT, place = first + at % SEGMENT;
        Entry entry = last_entry();
        if (row < p.rows && place < p.length) {
#if FROM_RUNS
            entry = runs[row * p.length + place];
#else
            entry = entry_of(key_of(element(0, row / p.inner, row % p.inner, place, SOURCE_ARGUMENTS p)), place);
#endif
        }
        entries[at] = entry;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    sort_runs(entries, SEGMENT * SEGMENTS, RUN, thread_index);
    keep_first(entries, SEGMENT * SEGMENTS, SEGMENT, RUN, thread_index);
}
