// Puts together what `attention.metal` made of several parts of the positions: the sums of each part weigh as much as
// its largest score allows. A thread computes GROUP neighbouring results.
// Grid: groups of results, 1, 1. Block: 128.

constant constexpr int GROUPS = (VALUE_SIZE + GROUP - 1) / GROUP;

kernel void attention_combine(
    device const float* part_sums [[buffer(0)]],
    device const float* part_rows [[buffer(1)]],
#ifdef SINK_STEP
    device const sink_t* sinks [[buffer(2)]],
#endif
    device out_t* out [[buffer(OUT_BUFFER)]],
    EPILOGUE_BUFFERS
    constant Params& p [[buffer(PARAMS_BUFFER)]],
    uint position [[thread_position_in_grid]])
{
    int row = int(position) / GROUPS;
    int col = int(position) % GROUPS * GROUP;
    if (row >= p.all_rows) {
        return;
    }
    float highest = -INFINITY;
    for (int part = 0; part < p.parts; ++part) {
        float part_max = part_rows[2 * (part * p.all_rows + row)];
        highest = part_max > highest ? part_max : highest;
    }
    float reference = highest == -INFINITY ? 0.0f : highest;
    float sum = 0.0f;
    float results[GROUP];
    for (int c = 0; c < GROUP; ++c) {
        results[c] = 0.0f;
    }
    for (int part = 0; part < p.parts; ++part) {
        int part_row = part * p.all_rows + row;
        float kept = precise::exp(part_rows[2 * part_row] - reference);
        sum += kept * part_rows[2 * part_row + 1];
        for (int c = 0; c < GROUP; ++c) {
            results[c] += col + c < VALUE_SIZE ? kept * part_sums[part_row * VALUE_SIZE + col + c] : 0.0f;
        }
    }
#ifdef SINK_STEP // takes its share of the weights, and brings no value
    float sink = float(sinks[row / p.rows % SINKS * SINK_STEP]);
    sum += sum == 0.0f ? 0.0f : precise::exp(min(sink - reference, 80.0f)); // finite
#endif
    float factor = sum == 0.0f ? 0.0f : 1.0f / sum;
    for (int c = 0; c < GROUP; ++c) {
        results[c] *= factor;
    }
    store_group(results, VALUE_SIZE - col, row / p.rows, row % p.rows, col, out, EPILOGUE_ARGUMENTS p);
}
