// A step of a recurrent layer on tensor cores: a block computes the gates of 16 / GATES units for 8 * SETS rows of the
// batch; its warps share h, and then some threads compute new states. Only the first step waits before it reads weights
// and gates; later ones read them before they wait. What elementwise arithmetic carries from step to step is kept in
// float.
// Grid: units, rows of the batch, directions. Block: 32 * WARPS.
constexpr int THREADS = 32 * WARPS, BATCH = 8 * SETS;
constexpr int BLOCK_UNITS = 16 / GATES;
// Elements of h at a time: each thread has 8 neighbours of two rows of weights for them.
constexpr int SPAN = 32 * WARPS;
constexpr int PASSES = (UNITS + SPAN - 1) / SPAN;
constexpr int EARLY = PASSES < 4 ? PASSES : 4;         // passes whose weights are read together
constexpr int PITCH = 10;                              // numbers from one row of a sum to the next, away from its bank
constexpr int ITEMS = (BLOCK_UNITS * BATCH + THREADS - 1) / THREADS;

// Eight neighbours of a row of weights or of h; zeros behind the last.
__device__ __forceinline__ Pack<uint, 4> neighbours(const a_t* row, int k)
{
    Pack<uint, 4> none = {};
    return k < UNITS ? load_pack<4>(reinterpret_cast<const uint*>(row + k)) : none;
}

extern "C" __global__ void __launch_bounds__(THREADS, SETS == 1 ? 4 : 2) recurrence_tile(
    const a_t* gates0, const a_t* weight0, const a_t* bias0, const a_t* gates1, const a_t* weight1, const a_t* bias1,
    const a_t* hidden, const a_t* carried, a_t* out, float* kept, const Params p)
{
    __shared__ float parts[WARPS][SETS][16][PITCH];
    if (p.step == 0) {
        wait_for_previous_grid();
    }
    int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32, direction = int(blockIdx.z);
    int first = int(blockIdx.y) * BATCH, first_unit = int(blockIdx.x) * BLOCK_UNITS;
    bool forward = direction == 0;
    int time = forward ? p.step : p.steps - 1 - p.step, before = forward ? time - 1 : time + 1;
    const a_t* weight = forward ? weight0 : weight1;
    const long long weight_row = forward ? p.weight0_row : p.weight1_row;
    const a_t* gates = forward ? gates0 + (long long)time * p.gates0_step : gates1 + (long long)time * p.gates1_step;
    const int gates_batch = forward ? p.gates0_batch : p.gates1_batch;
    const int gates_unit = forward ? p.gates0_unit : p.gates1_unit;
    const a_t* lines[2]; // rows of weights: by unit, and inside of each by gate
    #pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
        int line = min(lane / 4 + upper * 8, BLOCK_UNITS * GATES - 1), unit = min(first_unit + line / GATES, UNITS - 1);
        lines[upper] = weight + (line % GATES * UNITS + unit) * weight_row;
    }
    int k = warp * 32 + lane % 4 * 8;
    Pack<uint, 4> w[EARLY][2];
    #pragma unroll
    for (int pass = 0; pass < EARLY; ++pass) {
        w[pass][0] = neighbours(lines[0], k + pass * SPAN);
        w[pass][1] = neighbours(lines[1], k + pass * SPAN);
    }
    float given[ITEMS][GATES];
    #pragma unroll
    for (int number = 0; number < ITEMS; ++number) {
        int at = int(threadIdx.x) + number * THREADS, item = first + at % BATCH, unit = first_unit + at / BATCH;
        #pragma unroll
        for (int gate = 0; gate < GATES; ++gate) {
            bool there = at < BLOCK_UNITS * BATCH && item < p.batch && unit < UNITS;
            const a_t* place = gates + (long long)item * gates_batch + (long long)(gate * UNITS + unit) * gates_unit;
            given[number][gate] = there ? float(*place) : 0.0f;
        }
    }
    if (p.step > 0) {
        wait_for_previous_grid();
    }

    const a_t* previous = out + ((long long)before * p.batch * DIRECTIONS + direction) * UNITS;
    long long row_stride = DIRECTIONS * UNITS;
    if (p.step == 0) {
        previous = hidden + (long long)direction * p.hidden_direction;
        row_stride = p.hidden_batch;
    }
    float last[ITEMS];
    #pragma unroll
    for (int number = 0; number < ITEMS; ++number) {
        int at = int(threadIdx.x) + number * THREADS, item = first + at % BATCH, unit = first_unit + at / BATCH;
        last[number] = 0.0f;
        if (at >= BLOCK_UNITS * BATCH || item >= p.batch || unit >= UNITS) {
            continue;
        }
        if (CELL < 2 && p.step > 0) {
            last[number] = __ldcg(kept + (direction * p.batch + item) * UNITS + unit); // other blocks have neighbours
        } else if (CELL == 0 && HAS_CARRIED) {
            last[number] = float(carried[(long long)direction * p.carried_direction +
                                         (long long)item * p.carried_batch + (long long)unit * p.carried_unit]);
        } else if (CELL == 1 && HAS_HIDDEN) {
            last[number] = float(previous[item * row_stride + unit]);
        }
    }
    float sums[SETS][4] = {};
    if (p.step > 0 || HAS_HIDDEN) {
        #pragma unroll
        for (int pass = 0; pass < PASSES; ++pass) {
            if (pass >= EARLY) {
                w[pass % EARLY][0] = neighbours(lines[0], k + pass * SPAN);
                w[pass % EARLY][1] = neighbours(lines[1], k + pass * SPAN);
            }
            const Pack<uint, 4>&low = w[pass % EARLY][0], &high = w[pass % EARLY][1];
            #pragma unroll
            for (int set = 0; set < SETS; ++set) {
                const a_t* row = previous + min(first + set * 8 + lane / 4, p.batch - 1) * row_stride;
                Pack<uint, 4> h = neighbours(row, k + pass * SPAN);
                #pragma unroll
                for (int part = 0; part < 4; part += 2) { // the order along k is that of both operands
                    const uint a[4] = {low[part], high[part], low[part + 1], high[part + 1]};
                    TensorCores<a_t>::multiply(sums[set], a, h[part], h[part + 1]);
                }
            }
        }
    }
    #pragma unroll
    for (int set = 0; set < SETS; ++set) {
        #pragma unroll
        for (int part = 0; part < 4; ++part) {
            parts[warp][set][lane / 4 + part / 2 * 8][lane % 4 * 2 + part % 2] = sums[set][part];
        }
    }
    __syncthreads();
    #pragma unroll
    for (int number = 0; number < ITEMS; ++number) {
        int at = int(threadIdx.x) + number * THREADS, item = first + at % BATCH, unit = first_unit + at / BATCH;
        if (at >= BLOCK_UNITS * BATCH || item >= p.batch || unit >= UNITS) {
            continue;
        }
        float own[GATES], apart = 0.0f, bias = 0.0f;
        #pragma unroll
        for (int gate = 0; gate < GATES; ++gate) {
            own[gate] = 0.0f;
            #pragma unroll
            for (int other = 0; other < WARPS; ++other) {
                own[gate] += parts[other][at % BATCH / 8][at / BATCH * GATES + gate][at % 8];
            }
            if (CELL == 1 && gate == 2) { // the reset of a GRU multiplies the sum alone
                apart = given[number][gate];
            } else {
                own[gate] += given[number][gate];
            }
        }
        if (CELL == 1 && HAS_BIAS) {
            bias = float(forward ? bias0[(long long)unit * p.bias0_unit] : bias1[(long long)unit * p.bias1_unit]);
        }
        float result = next_state(own, apart, bias, last[number]);
        int state = (direction * p.batch + item) * UNITS + unit;
        if (CELL < 2) {
            kept[state] = last[number];
        }
        if (CELL == 0 && p.step == p.steps - 1) {
            out[(long long)p.steps * p.batch * DIRECTIONS * UNITS + state] = a_t(last[number]);
        }
        out[(((long long)time * p.batch + item) * DIRECTIONS + direction) * UNITS + unit] = a_t(result);
    }
}
