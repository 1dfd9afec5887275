// Combines each chunk of a scan's columns, for `scan`: states [columns, chunks].
// Grid: groups of columns in x, chunks in y.
kernel void scan_totals(
    device State* totals [[buffer(TOTALS_BUFFER)]],
    PROLOGUE_BUFFERS
    constant Params& p [[buffer(PARAMS_BUFFER)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]])
{
    threadgroup State shared[LANES * SLICES];
    int lane = int(thread_index) % LANES, slice = int(thread_index) / LANES;
    int column = int(group.x) * LANES + lane, outer = column / p.inner, inner = column % p.inner;
    int begin = int(group.y) * p.chunk, end = column < p.columns ? min(begin + p.chunk, p.length) : begin;
    State part = nothing();
    for (int position = begin + slice; position < end; position += SLICES) {
        part = combine(part, state_at(SOURCE_ARGUMENTS p, outer, position, inner));
    }
    State all = nothing();
    ahead_of(part, all, lane, slice, shared);
    if (slice == 0 && column < p.columns) {
        totals[column * p.chunks + int(group.y)] = all;
    }
}
