// Scans: each result combines an element and all ahead of it in its column. A threadgroup walks over chunk `group.y` of
// LANES neighbouring columns, in tiles of ITEMS elements a thread; `scan_totals` has combined the chunks ahead of it.
// Grid: groups of columns in x, chunks in y.
kernel void scan(
    device const State* totals [[buffer(0)]],
    device out_t* out [[buffer(1)]],
    EPILOGUE_BUFFERS
    PROLOGUE_BUFFERS
    constant Params& p [[buffer(PARAMS_BUFFER)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]])
{
    threadgroup State shared[LANES * SLICES];
    int lane = int(thread_index) % LANES, slice = int(thread_index) / LANES;
    int column = int(group.x) * LANES + lane, outer = column / p.inner, inner = column % p.inner;
    int begin = int(group.y) * p.chunk, last = min(begin + p.chunk, p.length);
    int end = column < p.columns ? last : begin;
    State part = nothing();
    for (int chunk = slice; chunk < int(group.y) && column < p.columns; chunk += SLICES) {
        part = combine(part, totals[column * p.chunks + chunk]);
    }
    State carried = nothing();
    State all = nothing();
    ahead_of(part, carried, lane, slice, shared);
    for (int tile = begin; tile < last; tile += SLICES * ITEMS) {
        int first = tile + slice * ITEMS;
        State states[ITEMS];
        for (int item = 0; item < ITEMS; ++item) {
            states[item] = nothing();
            if (first + item < end) {
                states[item] = state_at(SOURCE_ARGUMENTS p, outer, first + item, inner);
            }
            if (item > 0) {
                states[item] = combine(states[item - 1], states[item]);
            }
        }
        State ahead = ahead_of(states[ITEMS - 1], all, lane, slice, shared);
        ahead = combine(carried, ahead);
        carried = combine(carried, all);
        for (int item = 0; item < ITEMS; ++item) {
            if (first + item < end) {
                value_t value = value_of(combine(ahead, states[item]));
                out[output_index(outer, first + item, inner, p)] =
                    out_t(epilogue(value, outer, first + item, inner, EPILOGUE_ARGUMENTS p));
            }
        }
    }
}
