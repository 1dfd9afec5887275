// Sorts rows that a block holds: places of the first elements of each, in order. Grid: groups of SEGMENTS rows in x.
extern "C" __global__ void __launch_bounds__(THREADS) sort(
    INPUT_PARAMETERS OUT_T* out, EPILOGUE_PARAMETERS const Params p)
{
    wait_for_previous_grid();
    sort_segments(INPUT_ARGUMENTS p);
    for (int at = int(threadIdx.x); at < SEGMENTS * p.count; at += THREADS) {
        int segment = SEGMENTS > 1 ? at / p.count : 0, rank = at - segment * p.count;
        int row = int(blockIdx.x) * SEGMENTS + segment;
        if (row < p.rows) {
            int value[1] = {place_of(entries[segment * SEGMENT + rank])};
            finish(value, row / p.inner, row % p.inner, rank, out, EPILOGUE_ARGUMENTS p);
        }
    }
}
