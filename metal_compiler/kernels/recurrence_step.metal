// A step of a recurrent layer: a simdgroup computes the gates of a unit for ROWS rows of the batch, its lanes along h,
// and then the unit's new h. What elementwise arithmetic carries from step to step is kept in float.
// CELL: 0 LSTM, 1 GRU, 2 tanh, 3 relu. Grid: units, rows of the batch, directions. Block: 32 * SIMDGROUPS.

#if CHUNK == 4
typedef float4 part_t;
METAL_FUNC float4 read_part(device const a_t* source)
{
    return float4(*(device const vec<a_t, 4>*)source);
}
METAL_FUNC float total_of(float4 part)
{
    return (part.x + part.y) + (part.z + part.w);
}
#else
typedef float part_t;
METAL_FUNC float read_part(device const a_t* source)
{
    return float(*source);
}
METAL_FUNC float total_of(float part)
{
    return part;
}
#endif

METAL_FUNC float sigmoid(float x)
{
    return 1.0f / (1.0f + precise::exp(-x));
}

kernel void recurrence_step(
    device const a_t* gates0 [[buffer(0)]],
    device const a_t* weight0 [[buffer(1)]],
    device const a_t* bias0 [[buffer(2)]],
    device const a_t* gates1 [[buffer(3)]],
    device const a_t* weight1 [[buffer(4)]],
    device const a_t* bias1 [[buffer(5)]],
    device const a_t* hidden [[buffer(6)]],
    device const a_t* carried [[buffer(7)]],
    device a_t* out [[buffer(OUT_BUFFER)]],
    device float* kept [[buffer(KEPT_BUFFER)]],
    constant Params& p [[buffer(PARAMS_BUFFER)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]])
{
    int unit = int(group.x) * SIMDGROUPS + int(simdgroup);
    int first = int(group.y) * ROWS;
    int direction = int(group.z);
    if (unit >= p.units) {
        return;
    }
    int time = direction == 0 ? p.step : p.steps - 1 - p.step;
    int before = direction == 0 ? time - 1 : time + 1;
    device const a_t* gates = direction == 0 ? gates0 : gates1;
    device const a_t* weight = direction == 0 ? weight0 : weight1;
    int gates_unit = direction == 0 ? p.gates0_unit : p.gates1_unit;
    gates += time * (direction == 0 ? p.gates0_step : p.gates1_step);
    int gates_batch = direction == 0 ? p.gates0_batch : p.gates1_batch;
    int weight_row = direction == 0 ? p.weight0_row : p.weight1_row;
    int weight_k = direction == 0 ? p.weight0_k : p.weight1_k;

    device const a_t* previous = out + (before * p.batch * DIRECTIONS + direction) * p.units;
    int row_stride = DIRECTIONS * p.units;
    int unit_stride = 1;
    if (p.step == 0) {
        previous = hidden + direction * p.hidden_direction;
        row_stride = p.hidden_batch;
        unit_stride = p.hidden_unit;
    }

    part_t parts[GATES * ROWS];
    for (int place = 0; place < GATES * ROWS; ++place) {
        parts[place] = part_t(0.0f);
    }
    if (p.step > 0 || HAS_HIDDEN) {
        for (int k = int(lane) * CHUNK; k < p.units; k += 32 * CHUNK) {
            part_t h[ROWS];
            for (int row = 0; row < ROWS; ++row) {
                h[row] = read_part(previous + min(first + row, p.batch - 1) * row_stride + k * unit_stride);
            }
            for (int gate = 0; gate < GATES; ++gate) {
                part_t w = read_part(weight + (gate * p.units + unit) * weight_row + k * weight_k);
                for (int row = 0; row < ROWS; ++row) {
                    parts[gate * ROWS + row] += w * h[row];
                }
            }
        }
    }
    float totals[GATES * ROWS];
    for (int place = 0; place < GATES * ROWS; ++place) {
        totals[place] = simd_sum(total_of(parts[place]));
    }
    for (int row = int(lane); row < min(ROWS, p.batch - first); row += 32) {
        int item = first + row;
        device const a_t* given = gates + item * gates_batch;
        int state = (direction * p.batch + item) * p.units + unit;
        float result;
#if CELL == 0
        float entry = sigmoid(totals[row] + float(given[unit * gates_unit]));
        float forget = sigmoid(totals[1 * ROWS + row] + float(given[(p.units + unit) * gates_unit]));
        float candidate = precise::tanh(totals[2 * ROWS + row] + float(given[(2 * p.units + unit) * gates_unit]));
        float output = sigmoid(totals[3 * ROWS + row] + float(given[(3 * p.units + unit) * gates_unit]));
        float cell = 0.0f;
        if (p.step > 0) {
            cell = kept[state];
        } else if (HAS_CARRIED) {
            cell = float(carried[direction * p.carried_direction + item * p.carried_batch + unit * p.carried_unit]);
        }
        cell = forget * cell + entry * candidate;
        kept[state] = cell;
        if (p.step == p.steps - 1) {
            out[p.steps * p.batch * DIRECTIONS * p.units + state] = a_t(cell);
        }
        result = output * precise::tanh(cell);
#elif CELL == 1
        float reset = sigmoid(totals[row] + float(given[unit * gates_unit]));
        float update = sigmoid(totals[1 * ROWS + row] + float(given[(p.units + unit) * gates_unit]));
        float own = totals[2 * ROWS + row];
        if (HAS_BIAS) {
            own += float(direction == 0 ? bias0[unit * p.bias0_unit] : bias1[unit * p.bias1_unit]);
        }
        float candidate = precise::tanh(float(given[(2 * p.units + unit) * gates_unit]) + reset * own);
        float last = 0.0f;
        if (p.step > 0) {
            last = kept[state];
        } else if (HAS_HIDDEN) {
            last = float(hidden[direction * p.hidden_direction + item * p.hidden_batch + unit * p.hidden_unit]);
        }
        result = (1.0f - update) * candidate + update * last;
        kept[state] = result;
#elif CELL == 2
        result = precise::tanh(totals[row] + float(given[unit * gates_unit]));
#else
        result = totals[row] + float(given[unit * gates_unit]);
        result = result < 0.0f ? 0.0f : result; // NaN stays
#endif
        out[((time * p.batch + item) * DIRECTIONS + direction) * p.units + unit] = a_t(result);
    }
}
