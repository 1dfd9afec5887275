// Combines each chunk of a scan's columns, for `scan`: states [columns, chunks].
// Grid: groups of columns in x, chunks in y.
extern "C" __global__ void __launch_bounds__(LANES * SLICES * ROWS) scan_totals(
    SOURCE_PARAMETERS State* totals, const Params p)
{
    wait_for_previous_grid();
    int lane = int(threadIdx.x) % LANES, slice = int(threadIdx.x) / LANES % SLICES;
    int column = (int(blockIdx.x) * ROWS + int(threadIdx.x) / (LANES * SLICES)) * LANES + lane;
    int outer = LANES == 1 ? column : column / p.inner, inner = LANES == 1 ? 0 : column % p.inner;
    int begin = int(blockIdx.y) * p.chunk, end = column < p.columns ? min(begin + p.chunk, p.length) : begin;
    State part = nothing(), all;
    #pragma unroll 4
    for (int position = begin + slice; position < end; position += SLICES) {
        part = combine(part, lift(element(0, outer, position, inner, SOURCE_ARGUMENTS p), position));
    }
    ahead_of(part, all);
    if (slice == 0 && column < p.columns) {
        totals[(long long)column * gridDim.y + blockIdx.y] = all;
    }
}
