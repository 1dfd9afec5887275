// Sorts rows that a threadgroup holds: places of the first elements of each, in order. Grid: groups of SEGMENTS rows in
// x.
kernel void sort(
#if FROM_RUNS
    device const Entry* runs [[buffer(0)]],
#endif
    device out_t* out [[buffer(OUT_BUFFER)]],
    EPILOGUE_BUFFERS
    PROLOGUE_BUFFERS
    constant Params& p [[buffer(PARAMS_BUFFER)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]])
{
    threadgroup Entry entries[SEGMENT * SEGMENTS];
    sort_segments(entries, INPUT_ARGUMENTS p, group, int(thread_index));
    for (int at = int(thread_index); at < SEGMENTS * p.count; at += THREADS) {
        int segment = at / p.count, rank = at % p.count, row = int(group.x) * SEGMENTS + segment;
        if (row < p.rows) {
            int outer = row / p.inner, inner = row % p.inner, place = place_of(entries[segment * SEGMENT + rank]);
            out[output_index(outer, inner, rank, p)] =
                out_t(epilogue(place, outer, inner, rank, EPILOGUE_ARGUMENTS p));
        }
    }
}
