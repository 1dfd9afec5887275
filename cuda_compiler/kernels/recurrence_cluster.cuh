// A recurrent layer over all of its steps: the blocks of a cluster share the units of a direction and keep their
// weights, in registers and in shared memory, from the first step to the last. Each step they multiply their weights by
// h of 8 * ROW_SETS rows of the batch, which all of them hold, and write their units' new h into the shared memory of
// all. Clusters never wait for each other, and the blocks of a cluster always run at once, so that no block waits for
// one that cannot begin. Grid: CLUSTER * tiles of the batch, directions. Block: 32 * WARPS.
constexpr int THREADS = 32 * WARPS, BATCH = 8 * ROW_SETS;
constexpr int GROUPS = WARPS / SPLITS;                 // warps along the rows of weights; SPLITS share the columns
constexpr int DEPTH = SPLITS * STEPS_K * 16;           // columns of weights, and elements of h, zeros included
constexpr int PITCH = (DEPTH + 63) / 64 * 64 + 8;      // elements from one row of h to the next, for ldmatrix
constexpr int LINES = GROUPS * TILES * 16;             // rows of weights of a block, zeros included
constexpr int PARTS = STEPS_K * TILES;                 // 16 x 16 matrices of a warp; the first KEPT lie in registers
constexpr int SLOTS = PARTS > KEPT ? PARTS - KEPT : 0;
constexpr int HIDDEN_BYTES = BATCH * PITCH * 2;        // of one of the two buffers of h
constexpr int PAIRS_OWNED = OWN / 2 * BATCH;           // pairs of neighbouring units, for each row of the batch
constexpr int ITEMS = (PAIRS_OWNED + THREADS - 1) / THREADS;
static_assert(
    SLOTS * THREADS * 16 + 2 * HIDDEN_BYTES + SPLITS * LINES * BATCH * 4 <= SHARED_BYTES, "as Python counts it");

// A block that is alone waits for its own threads only, and writes to its own shared memory.
constexpr bool IS_CLUSTER = CLUSTER > 1 && __CUDA_ARCH__ >= 900;
__device__ __forceinline__ void arrive()
{
    if (IS_CLUSTER) {
        arrive_at_cluster();
    }
}
__device__ __forceinline__ void wait_for_all()
{
    if (IS_CLUSTER) {
        wait_for_cluster();
    } else {
        __syncthreads();
    }
}
__device__ __forceinline__ uint address_in_block(const void* target, int rank)
{
    return IS_CLUSTER ? address_in_cluster(target, rank) : shared_address(target);
}
__device__ __forceinline__ void store_states(uint address, uint pair)
{
    if (IS_CLUSTER) {
        store_at(address, pair);
    } else {
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(pair) : "memory");
    }
}

// Where the elements of a direction lie.
struct Direction {
    const a_t *gates, *weight, *bias;
    long long gates_step, gates_batch, weight_row;
    int gates_unit, weight_k, bias_unit;
};

// Two neighbouring elements, the second of which may not be there.
__device__ __forceinline__ uint read_pair(const a_t* source, int stride, bool second)
{
#if PAIRED
    return *reinterpret_cast<const uint*>(source);
#else
    return uint(source[0].bits) | (second ? uint(source[stride].bits) << 16 : 0u);
#endif
}
__device__ __forceinline__ void store_states(a_t* target, uint pair, bool second)
{
#if PAIRED
    *reinterpret_cast<uint*>(target) = pair;
#else
    target[0].bits = (unsigned short)pair;
    if (second) {
        target[1].bits = (unsigned short)(pair >> 16);
    }
#endif
}

// Two neighbours along k of one of a block's rows of weights; zeros around them.
__device__ __forceinline__ uint weight_pair(const Direction& d, int rank, int line, int k)
{
    int gate = line / OWN, unit = rank * OWN + line % OWN;
    if (gate >= GATES || unit >= UNITS || k >= UNITS) {
        return 0;
    }
    const a_t* row = d.weight + ((long long)gate * UNITS + unit) * d.weight_row;
    return read_pair(row + (long long)k * d.weight_k, d.weight_k, k + 1 < UNITS);
}

// A lane's part of the 16 x 16 matrix `part` of a warp, as mma.m16n8k16 takes it.
__device__ __forceinline__ uint4 weight_part(const Direction& d, int rank, int group, int split, int part)
{
    int lane = int(threadIdx.x) % 32;
    int line = (group * TILES + part % TILES) * 16 + lane / 4, k = (split * STEPS_K + part / TILES) * 16 + lane % 4 * 2;
    return make_uint4(
        weight_pair(d, rank, line, k), weight_pair(d, rank, line + 8, k), weight_pair(d, rank, line, k + 8),
        weight_pair(d, rank, line + 8, k + 8));
}

// Multiplies a warp's weights by h, and leaves the sums for the block.
__device__ __forceinline__ void multiply(
    const uint4 (&kept)[KEPT], const uint4* slots, const a_t* h, float* sums, int group, int split)
{
    int lane = int(threadIdx.x) % 32;
    float sum[TILES][ROW_SETS][4] = {};
    #pragma unroll
    for (int step = 0; step < STEPS_K; step += 2) {
        uint b[ROW_SETS][4];
        #pragma unroll
        for (int set = 0; set < ROW_SETS; ++set) {
            const a_t* row = h + (set * 8 + lane % 8) * PITCH + (split * STEPS_K + step) * 16 + lane / 8 * 8;
            load_matrices(b[set], shared_address(row));
        }
        #pragma unroll
        for (int half_step = 0; half_step < 2; ++half_step) {
            #pragma unroll
            for (int tile = 0; tile < TILES; ++tile) {
                constexpr int LAST = KEPT - 1;
                int part = (step + half_step) * TILES + tile;
                uint4 w = part < KEPT ? kept[part < KEPT ? part : LAST] : slots[(part - KEPT) * THREADS + threadIdx.x];
                const uint a[4] = {w.x, w.y, w.z, w.w};
                #pragma unroll
                for (int set = 0; set < ROW_SETS; ++set) {
                    TensorCores<a_t>::multiply(sum[tile][set], a, b[set][half_step * 2], b[set][half_step * 2 + 1]);
                }
            }
        }
    }
    float* own = sums + (split * LINES + group * TILES * 16) * BATCH;
    #pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
        #pragma unroll
        for (int set = 0; set < ROW_SETS; ++set) {
            float* target = own + (tile * 16 + lane / 4) * BATCH + set * 8 + lane % 4 * 2;
            const float(&part)[4] = sum[tile][set];
            *reinterpret_cast<float2*>(target) = make_float2(part[0], part[1]);
            *reinterpret_cast<float2*>(target + 8 * BATCH) = make_float2(part[2], part[3]);
        }
    }
}

// A thread's pair of units, and row of the batch.
struct Item {
    int unit, row, item; // the first unit of the pair; the row in the tile; the row of the batch
    bool first, second;  // whether these units are there

    __device__ __forceinline__ Item(int number, int rank, int tile, const Params& p)
    {
        int place = number * THREADS + int(threadIdx.x);
        row = place % BATCH;
        unit = rank * OWN + place / BATCH * 2;
        item = tile * BATCH + row;
        first = place < PAIRS_OWNED && unit < UNITS && item < p.batch;
        second = first && unit + 1 < UNITS;
    }
};

extern "C" __global__ void __launch_bounds__(256, 1) recurrence_cluster(
    const a_t* gates0, const a_t* weight0, const a_t* bias0, const a_t* gates1, const a_t* weight1, const a_t* bias1,
    const a_t* hidden, const a_t* carried, a_t* out, const Params p)
{
    extern __shared__ __align__(128) unsigned char shared[];
    wait_for_previous_grid();
    uint4* slots = reinterpret_cast<uint4*>(shared);
    a_t* buffers = reinterpret_cast<a_t*>(shared + SLOTS * THREADS * 16);
    float* sums = reinterpret_cast<float*>(shared + SLOTS * THREADS * 16 + 2 * HIDDEN_BYTES);
    int rank = int(blockIdx.x) % CLUSTER, tile = int(blockIdx.x) / CLUSTER, direction = int(blockIdx.y);
    int group = int(threadIdx.x) / 32 % GROUPS, split = int(threadIdx.x) / 32 / GROUPS;
    bool forward = direction == 0;
    Direction d = {gates0, weight0, bias0, p.gates0_step, p.gates0_batch, p.weight0_row, p.gates0_unit, p.weight0_k,
                   p.bias0_unit};
    if (!forward) {
        d = {gates1,        weight1,       bias1,       p.gates1_step, p.gates1_batch,
             p.weight1_row, p.gates1_unit, p.weight1_k, p.bias1_unit};
    }

    uint4 kept[KEPT];
    #pragma unroll
    for (int part = 0; part < KEPT; ++part) {
        kept[part] = part < PARTS ? weight_part(d, rank, group, split, part) : make_uint4(0, 0, 0, 0);
    }
    #pragma unroll 1
    for (int part = KEPT; part < PARTS; ++part) {
        slots[(part - KEPT) * THREADS + threadIdx.x] = weight_part(d, rank, group, split, part);
    }
    const a_t* start = hidden + (long long)direction * p.hidden_direction;
    for (int place = int(threadIdx.x); place < 2 * BATCH * PITCH; place += THREADS) {
        int row = place / PITCH % BATCH, unit = place % PITCH, item = tile * BATCH + row;
        bool there = HAS_HIDDEN && place < BATCH * PITCH && unit < UNITS && item < p.batch;
        buffers[place] = there ? start[(long long)item * p.hidden_batch + (long long)unit * p.hidden_unit] : a_t(0.0f);
    }
    float last[ITEMS][2], bias[ITEMS][2];
    const a_t* carried_start = CELL == 0 ? carried + (long long)direction * p.carried_direction : start;
    const long long start_batch = CELL == 0 ? p.carried_batch : p.hidden_batch;
    const int start_unit = CELL == 0 ? p.carried_unit : p.hidden_unit;
    #pragma unroll
    for (int number = 0; number < ITEMS; ++number) {
        Item own(number, rank, tile, p);
        #pragma unroll
        for (int u = 0; u < 2; ++u) {
            bool there = u == 0 ? own.first : own.second, given = CELL == 0 ? HAS_CARRIED : HAS_HIDDEN && CELL == 1;
            long long place = own.item * start_batch + (long long)(own.unit + u) * start_unit;
            last[number][u] = there && given ? float(carried_start[place]) : 0.0f;
            bias[number][u] = there && HAS_BIAS ? float(d.bias[(long long)(own.unit + u) * d.bias_unit]) : 0.0f;
        }
    }
    uint remote[CLUSTER];
    #pragma unroll
    for (int other = 0; other < CLUSTER; ++other) {
        remote[other] = address_in_block(buffers, other);
    }
    __syncthreads();
    arrive(); // no block is written to before it has begun

    for (int step = 0; step < p.steps; ++step) {
        int time = forward ? step : p.steps - 1 - step;
        uint given[ITEMS][GATES];
        #pragma unroll
        for (int number = 0; number < ITEMS; ++number) {
            Item own(number, rank, tile, p);
            const a_t* gates = d.gates + time * d.gates_step + own.item * d.gates_batch;
            #pragma unroll
            for (int gate = 0; gate < GATES; ++gate) {
                const a_t* place = gates + ((long long)gate * UNITS + own.unit) * d.gates_unit;
                given[number][gate] = own.first ? read_pair(place, d.gates_unit, own.second) : 0;
            }
        }
        wait_for_all(); // h of the step before is whole, and nobody reads the one before that
        multiply(kept, slots, buffers + step % 2 * (BATCH * PITCH), sums, group, split);
        __syncthreads();
        bool ends = step == p.steps - 1;
        #pragma unroll
        for (int number = 0; number < ITEMS; ++number) {
            Item own(number, rank, tile, p);
            float result[2];
            #pragma unroll
            for (int u = 0; u < 2; ++u) {
                float total[GATES], apart = 0.0f;
                int place = min(own.unit - rank * OWN + u, OWN - 1);
                #pragma unroll
                for (int gate = 0; gate < GATES; ++gate) {
                    float value = number_in_pair<a_t>(given[number][gate], u);
                    total[gate] = 0.0f;
                    #pragma unroll
                    for (int part = 0; part < SPLITS; ++part) {
                        total[gate] += sums[(part * LINES + gate * OWN + place) * BATCH + own.row];
                    }
                    if (CELL == 1 && gate == 2) { // the reset of a GRU multiplies the sum alone
                        apart = value;
                    } else {
                        total[gate] += value;
                    }
                }
                result[u] = next_state(total, apart, bias[number][u], last[number][u]);
            }
            uint pair = uint(a_t(result[0]).bits) | (own.second ? uint(a_t(result[1]).bits) << 16 : 0u);
            if (own.first) {
                if (!ends) {
                    uint offset = uint((((step + 1) % 2 * BATCH + own.row) * PITCH + own.unit) * 2);
                    #pragma unroll
                    for (int other = 0; other < CLUSTER; ++other) {
                        store_states(remote[other] + offset, pair);
                    }
                }
                long long row = ((long long)time * p.batch + own.item) * DIRECTIONS + direction;
                store_states(out + row * UNITS + own.unit, pair, own.second);
                if (CELL == 0 && ends) {
                    uint cells = as_pair(a_t(last[number][0]), a_t(last[number][1]));
                    long long tail = (long long)p.steps * p.batch * DIRECTIONS + direction * p.batch + own.item;
                    store_states(out + tail * UNITS + own.unit, cells, own.second);
                }
            }
        }
        if (!ends) {
            arrive();
        }
    }
}
