// States of a scan among threads. LANES neighbouring threads have neighbouring columns, and SLICES threads share each
// column. What a state is, is generated: `State`, `combine`. They pass through threadgroup memory, as simdgroups do not
// exchange integers of 64 bits.

// The state of one element.
METAL_FUNC State state_at(SOURCE_PARAMETERS constant Params& p, int outer, int position, int inner)
{
    return lift(element(0, outer, position, inner, SOURCE_ARGUMENTS p), position);
}

// The states of the slices ahead of this thread's, combined; `all` becomes that of all slices.
METAL_FUNC State ahead_of(State own, thread State& all, int lane, int slice, threadgroup State* states)
{
    threadgroup_barrier(mem_flags::mem_threadgroup);
    states[slice * LANES + lane] = own;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int distance = 1; distance < SLICES; distance *= 2) {
        State below = nothing();
        if (slice >= distance) {
            below = states[(slice - distance) * LANES + lane];
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (slice >= distance) {
            own = combine(below, own);
            states[slice * LANES + lane] = own;
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    all = states[(SLICES - 1) * LANES + lane];
    State ahead = nothing();
    if (slice > 0) {
        ahead = states[(slice - 1) * LANES + lane];
    }
    return ahead;
}
