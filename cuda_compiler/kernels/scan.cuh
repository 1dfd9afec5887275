// Scans: each result combines an element and all ahead of it in its column. A block walks over chunk `blockIdx.y` of
// ROWS columns, or of LANES neighbouring ones, in tiles of ITEMS elements a thread; `scan_totals` has combined the
// chunks ahead of it.
// Grid: groups of columns in x, chunks in y.
constexpr int TILE = SLICES * ITEMS;

__device__ __forceinline__ constexpr int padded(int index) { return index + index / 32; } // so that banks differ

extern "C" __global__ void __launch_bounds__(LANES * SLICES * ROWS) scan(
    SOURCE_PARAMETERS const State* totals, OUT_T* out, EPILOGUE_PARAMETERS const Params p)
{
    wait_for_previous_grid();
    int lane = int(threadIdx.x) % LANES, slice = int(threadIdx.x) / LANES % SLICES;
    int row = int(threadIdx.x) / (LANES * SLICES), column = (int(blockIdx.x) * ROWS + row) * LANES + lane;
    bool has_column = column < p.columns;
    int outer = LANES == 1 ? column : column / p.inner, inner = LANES == 1 ? 0 : column % p.inner;
    int begin = int(blockIdx.y) * p.chunk, end = has_column ? min(begin + p.chunk, p.length) : begin;
    State carried = nothing(), all;
    if (gridDim.y > 1) {
        State part = nothing();
        for (int chunk = slice; chunk < int(blockIdx.y) && has_column; chunk += SLICES) {
            part = combine(part, totals[(long long)column * gridDim.y + chunk]);
        }
        ahead_of(part, carried);
    }
    for (int tile = begin; tile < min(begin + p.chunk, p.length); tile += TILE) {
        State states[ITEMS];
        int first = tile + slice * ITEMS;
#if LANES == 1
        __shared__ element_t elements[ROWS][padded(TILE)];
        #pragma unroll
        for (int item = 0; item < ITEMS; ++item) {
            int at = item * SLICES + slice;
            elements[row][padded(at)] =
                tile + at < end ? element(0, outer, tile + at, inner, SOURCE_ARGUMENTS p) : element_t(0);
        }
        __syncthreads();
#endif
        #pragma unroll
        for (int item = 0; item < ITEMS; ++item) {
            int position = first + item;
#if LANES == 1
            element_t own = elements[row][padded(slice * ITEMS + item)];
#else
            element_t own = position < end ? element(0, outer, position, inner, SOURCE_ARGUMENTS p) : element_t(0);
#endif
            states[item] = position < end ? lift(own, position) : nothing();
            if (item > 0) {
                states[item] = combine(states[item - 1], states[item]);
            }
        }
        State ahead = combine(carried, ahead_of(states[ITEMS - 1], all));
        carried = combine(carried, all);
#if LANES == 1
        __shared__ value_t values[ROWS][padded(TILE)];
        #pragma unroll
        for (int item = 0; item < ITEMS; ++item) {
            values[row][padded(slice * ITEMS + item)] = value_of(combine(ahead, states[item]));
        }
        __syncthreads();
#endif
        #pragma unroll
        for (int item = 0; item < ITEMS; ++item) {
#if LANES == 1
            int at = item * SLICES + slice, position = tile + at;
            value_t value[1] = {values[row][padded(at)]};
#else
            int position = first + item;
            value_t value[1] = {value_of(combine(ahead, states[item]))};
#endif
            if (position < end) {
                finish(value, outer, position, inner, out, EPILOGUE_ARGUMENTS p);
            }
        }
    }
}
