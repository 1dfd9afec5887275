// A step of a recurrent layer: a warp computes the gates of a unit for ROWS rows of the batch, its lanes along h, and
// then the unit's new h. What elementwise arithmetic carries from step to step is kept in float.
// Grid: units, rows of the batch, directions. Block: 32 * WARPS.
extern "C" __global__ void __launch_bounds__(128) recurrence_step(
    const a_t* gates0, const a_t* weight0, const a_t* bias0, const a_t* gates1, const a_t* weight1, const a_t* bias1,
    const a_t* hidden, const a_t* carried, a_t* out, float* kept, const Params p)
{
    wait_for_previous_grid();
    int unit = int(blockIdx.x) * WARPS + int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
    int first = int(blockIdx.y) * ROWS, direction = int(blockIdx.z);
    if (unit >= p.units) {
        return;
    }
    bool forward = direction == 0;
    int time = forward ? p.step : p.steps - 1 - p.step, before = forward ? time - 1 : time + 1;
    const a_t* weight = forward ? weight0 : weight1;
    const long long weight_row = forward ? p.weight0_row : p.weight1_row;
    const int weight_k = forward ? p.weight0_k : p.weight1_k;
    const a_t* gates = forward ? gates0 + (long long)time * p.gates0_step : gates1 + (long long)time * p.gates1_step;
    const int gates_batch = forward ? p.gates0_batch : p.gates1_batch;
    const int gates_unit = forward ? p.gates0_unit : p.gates1_unit;

    const a_t* previous = out + ((long long)before * p.batch * DIRECTIONS + direction) * p.units;
    long long row_stride = DIRECTIONS * p.units;
    int unit_stride = 1;
    if (p.step == 0) {
        previous = hidden + (long long)direction * p.hidden_direction;
        row_stride = p.hidden_batch;
        unit_stride = p.hidden_unit;
    }

    float sums[GATES][ROWS] = {};
    if (p.step > 0 || HAS_HIDDEN) {
        #pragma unroll 2
        for (int k = lane * CHUNK; k < p.units; k += 32 * CHUNK) {
            Pack<a_t, CHUNK> h[ROWS], w[GATES];
            #pragma unroll
            for (int gate = 0; gate < GATES; ++gate) {
                const a_t* line = weight + (gate * p.units + unit) * weight_row + (long long)k * weight_k;
                w[gate] = load_pack<CHUNK>(line);
            }
            #pragma unroll
            for (int row = 0; row < ROWS; ++row) {
                const a_t* line = previous + min(first + row, p.batch - 1) * row_stride;
                h[row] = load_pack<CHUNK>(line + (long long)k * unit_stride);
            }
            #pragma unroll
            for (int u = 0; u < CHUNK; ++u) {
                #pragma unroll
                for (int gate = 0; gate < GATES; ++gate) {
                    #pragma unroll
                    for (int row = 0; row < ROWS; ++row) {
                        sums[gate][row] += float(w[gate][u]) * float(h[row][u]);
                    }
                }
            }
        }
    }
    #pragma unroll
    for (int row = 0; row < ROWS; ++row) {
        float own[GATES];
        #pragma unroll
        for (int gate = 0; gate < GATES; ++gate) {
            own[gate] = warp_sum<32>(sums[gate][row]);
        }
        int item = first + row;
        if (lane != row || item >= p.batch) {
            continue;
        }
        const a_t* given = gates + (long long)item * gates_batch + (long long)unit * gates_unit;
        float apart = 0.0f, bias = 0.0f, last = 0.0f;
        #pragma unroll
        for (int gate = 0; gate < GATES; ++gate) {
            float value = float(given[(long long)gate * p.units * gates_unit]);
            if (CELL == 1 && gate == 2) { // the reset of a GRU multiplies the sum alone
                apart = value;
            } else {
                own[gate] += value;
            }
        }
        int state = (direction * p.batch + item) * p.units + unit;
        if (CELL < 2 && p.step > 0) {
            last = kept[state];
        } else if (CELL == 0 && HAS_CARRIED) {
            last = float(carried[(long long)direction * p.carried_direction + (long long)item * p.carried_batch +
                                 (long long)unit * p.carried_unit]);
        } else if (CELL == 1 && HAS_HIDDEN) {
            last = float(previous[item * row_stride + (long long)unit * unit_stride]);
        }
        if (CELL == 1 && HAS_BIAS) {
            bias = float(forward ? bias0[(long long)unit * p.bias0_unit] : bias1[(long long)unit * p.bias1_unit]);
        }
        float result = next_state(own, apart, bias, last);
        if (CELL < 2) {
            kept[state] = last;
        }
        if (CELL == 0 && p.step == p.steps - 1) {
            out[(long long)p.steps * p.batch * DIRECTIONS * p.units + state] = a_t(last);
        }
        out[(((long long)time * p.batch + item) * DIRECTIONS + direction) * p.units + unit] = a_t(result);
    }
}
