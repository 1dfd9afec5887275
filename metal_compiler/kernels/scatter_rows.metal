// Values combined in the rows that an index names: a threadgroup has 64 / LANES rows, of LANES * COLUMNS columns each.
// It reads the whole index in chunks, lists the entries that name its rows, in order, and combines their values.
// Grid: threadgroups in x, columns innermost, then rows. Block: 64.
constant constexpr int ROWS = 64 / LANES;
constant constexpr int OWN = CHUNK / 64; // indices of a thread

METAL_FUNC float added(float a, float b) { return a + b; }
METAL_FUNC float multiplied(float a, float b) { return a * b; }
METAL_FUNC float greatest(float a, float b) { return a > b || a != a ? a : b; } // NaN stays
METAL_FUNC float least(float a, float b) { return a < b || a != a ? a : b; }

kernel void scatter_rows(
    device const int* index [[buffer(0)]],
    device const v_t* values [[buffer(1)]],
#if HAS_BASE
    device const b_t* base [[buffer(2)]],
#endif
    device out_t* out [[buffer(OUT_BUFFER)]],
    EPILOGUE_BUFFERS
    constant Params& p [[buffer(PARAMS_BUFFER)]],
    uint3 threadgroup_position [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]])
{
    threadgroup int listed[CHUNK]; // the row of the threadgroup, and behind it the place in the chunk
    threadgroup int counts[64];
    int block = int(threadgroup_position.x);
    int above = block / p.column_blocks;
    int outer = above / p.row_blocks;
    int first = above % p.row_blocks * ROWS;
    int thread_number = int(thread_index);
    int row = first + thread_number / LANES;
    int column = (block % p.column_blocks * LANES + thread_number % LANES) * COLUMNS;
    bool inside = row < p.rows && column < p.width;
    int columns = inside ? min(COLUMNS, p.width - column) : 0;
    device const v_t* source = values + outer * p.values_outer + column * p.values_column;

    float sums[GROUP];
    for (int c = 0; c < GROUP; ++c) {
        sums[c] = NEUTRAL;
    }
    int number = 0;
    for (int chunk = 0; chunk < p.count; chunk += CHUNK) {
        int end = min(CHUNK, p.count - chunk);
        int start = thread_number * OWN;
        int found = 0;
        for (int at = start; at < min(start + OWN, end); ++at) {
            int named = index[(chunk + at) * p.index_step];
            found += named >= first && named < first + ROWS ? 1 : 0;
        }
        counts[thread_number] = found;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        int place = 0;
        int total = 0;
        for (int t = 0; t < 64; ++t) {
            place += t < thread_number ? counts[t] : 0;
            total += counts[t];
        }
        for (int at = start; at < min(start + OWN, end); ++at) {
            int named = index[(chunk + at) * p.index_step];
            if (named >= first && named < first + ROWS) {
                listed[place] = (named - first) * CHUNK + at;
                place += 1;
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (int k = 0; k < total; ++k) {
            int entry = listed[k];
            if (first + entry / CHUNK != row) {
                continue;
            }
            number += 1;
            device const v_t* part = source + (chunk + entry % CHUNK) * p.values_row;
            for (int c = 0; c < columns; ++c) {
                sums[c] = COMBINE(sums[c], float(part[c * p.values_column]));
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    if (!inside) {
        return;
    }
    for (int c = 0; c < columns; ++c) {
#if HAS_BASE
        float before = float(base[outer * p.base_outer + row * p.base_row + (column + c) * p.base_column]);
#else
        float before = FILL;
#endif
        float result = INCLUDED ? COMBINE(before, sums[c]) : sums[c];
#if MEAN
        result = result / float(max(1, number + INCLUDED));
#endif
        sums[c] = number > 0 ? result : before;
    }
    store_group(sums, columns, outer, row, column, out, EPILOGUE_ARGUMENTS p);
}
