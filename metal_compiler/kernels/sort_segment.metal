// Sorts segments of long rows, of each of which the first RUN entries are kept: [rows, segments, RUN].
// Grid: rows in x, segments in y.
kernel void sort_segment(
#if FROM_RUNS
    device const Entry* runs [[buffer(0)]],
#endif
    device Entry* kept [[buffer(KEPT_BUFFER)]],
    PROLOGUE_BUFFERS
    constant Params& p [[buffer(PARAMS_BUFFER)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]])
{
    threadgroup Entry entries[SEGMENT * SEGMENTS];
    sort_segments(entries, INPUT_ARGUMENTS p, group, int(thread_index));
    int segments = (p.length + SEGMENT - 1) / SEGMENT;
    for (int at = int(thread_index); at < RUN; at += THREADS) {
        kept[(int(group.x) * segments + int(group.y)) * RUN + at] = entries[at];
    }
}
