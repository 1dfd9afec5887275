// What happens to the rows of a block of threads: parts of its warpgroups are added, then parts of several blocks.
constexpr int PART_FLOATS = sizeof(Rows) / 4, FINISHING = 128 * WARPGROUPS_M; // threads that have rows to finish
static_assert(WARPGROUPS_L <= 2, "one warpgroup's part is added to another's");
static_assert(WARPGROUPS_L == 1 || PART_FLOATS * FINISHING * 4 <= BARRIERS_AT, "parts are staged where operands were");

#if SPLITS > 1
// Arrivals at each tile of the result; the last one leaves zero behind.
__device__ uint arrivals[RESULT_TILES];
#endif

// Stores a thread's part, so that neighbouring threads write neighbouring numbers; and adds such a part to the thread's
// own.
__device__ __forceinline__ void put_part(float* part, const Rows& rows)
{
    #pragma unroll
    for (int e = 0; e < VALUE_SIZE / 8; ++e) {
        #pragma unroll
        for (int u = 0; u < 4; ++u) {
            part[(e * 4 + u) * FINISHING] = rows.result[e][u];
        }
    }
    #pragma unroll
    for (int half_row = 0; half_row < 2; ++half_row) {
        part[(VALUE_SIZE / 2 + half_row) * FINISHING] = rows.top[half_row];
        part[(VALUE_SIZE / 2 + 2 + half_row) * FINISHING] = rows.sum[half_row];
    }
}

template <typename Load>
__device__ __forceinline__ void add_part(Rows& rows, Load load)
{
    float own[2], other[2];
    #pragma unroll
    for (int half_row = 0; half_row < 2; ++half_row) {
        float part_top = load((VALUE_SIZE / 2 + half_row) * FINISHING), top = fmaxf(rows.top[half_row], part_top);
        own[half_row] = power_of_two((rows.top[half_row] - top) * FACTOR);
        other[half_row] = power_of_two((part_top - top) * FACTOR);
        rows.top[half_row] = top;
        rows.sum[half_row] = rows.sum[half_row] * own[half_row]
            + load((VALUE_SIZE / 2 + 2 + half_row) * FINISHING) * other[half_row];
    }
    #pragma unroll
    for (int e = 0; e < VALUE_SIZE / 8; ++e) {
        #pragma unroll
        for (int u = 0; u < 4; ++u) {
            float added = load((e * 4 + u) * FINISHING) * other[u / 2];
            rows.result[e][u] = rows.result[e][u] * own[u / 2] + added;
        }
    }
}

// Stores a thread's rows. Four lanes share each eight columns. They exchange results first, so that each lane has all
// eight columns of one block in four.
__device__ __forceinline__ void store_rows(
    const Rows& rows, int row, int batch, int group, SINK_PARAMETER OUT_T* out, EPILOGUE_PARAMETERS const Params& p)
{
    int lane = int(threadIdx.x) % 32;
    bool odd = lane & 1, upper = lane & 2;
    auto exchange = [](float& low, float& high, bool gives_low, int distance) {
        float other = __shfl_xor_sync(0xffffffffu, gives_low ? low : high, distance);
        low = gives_low ? other : low;
        high = gives_low ? high : other;
    };
    #pragma unroll
    for (int half_row = 0; half_row < 2; ++half_row) {
        int r = row + lane / 4 + half_row * 8;
        int head = (batch * GROUPS + group) * SHARED + r % SHARED;
        float sum = whole_sum(
            rows.sum[half_row], rows.top[half_row] * FACTOR, group * SHARED + r % SHARED, SINK_ARGUMENT p);
        float factor = sum == 0.0f ? 0.0f : 1.0f / sum;
        #pragma unroll
        for (int base = 0; base < VALUE_SIZE / 8; base += 4) {
            float block[4][2];
            #pragma unroll
            for (int e = 0; e < 4; ++e) {
                #pragma unroll
                for (int u = 0; u < 2; ++u) {
                    constexpr int LAST = VALUE_SIZE / 8 - 1;
                    block[e][u] = rows.result[base + e < LAST ? base + e : LAST][half_row * 2 + u] * factor;
                }
            }
            #pragma unroll
            for (int u = 0; u < 2; ++u) {
                exchange(block[0][u], block[1][u], odd, 1);
                exchange(block[2][u], block[3][u], odd, 1);
                exchange(block[0][u], block[2][u], upper, 2);
                exchange(block[1][u], block[3][u], upper, 2);
            }
            int column = (base + lane % 4) * 8;
            if (r >= p.rows * SHARED || column >= VALUE_SIZE) {
                continue;
            }
            #pragma unroll
            for (int first = 0; first < 8; first += STORE_SIZE) {
                float values[STORE_SIZE];
                #pragma unroll
                for (int u = 0; u < STORE_SIZE; ++u) {
                    values[u] = block[(first + u) / 2][(first + u) % 2];
                }
                finish(values, head, r / SHARED, column + first, out, EPILOGUE_ARGUMENTS p);
            }
        }
    }
}

#if SPLITS > 1
// Stores the part in memory. In the block that arrives last, adds up all parts, always in the same order, and returns
// true.
__device__ __forceinline__ bool add_splits(Rows& rows, const Tile& tile, int* flag, float* partial)
{
    int thread = int(threadIdx.x);
    long long number = blockIdx.x;
    auto part = [&](int split) { return partial + (number * SPLITS + split) * PART_FLOATS * FINISHING + thread; };
    put_part(part(tile.split), rows);
    synchronize(2, FINISHING);
    if (thread == 0) {
        *flag = count_arrival(arrivals[number], tile.splits - 1) == uint(tile.splits - 1);
    }
    synchronize(2, FINISHING);
    if (!*flag) {
        return false;
    }
    rows = Rows();
    for (int split = 0; split < tile.splits; ++split) {
        const float* from = part(split);
        add_part(rows, [&](int i) { return __ldcg(from + i); });
    }
    return true;
}
#endif

__device__ __forceinline__ void finish_rows(
    Rows& rows, const Tile& tile, int warpgroup, unsigned char* shared, SINK_PARAMETER float* partial, OUT_T* out,
    EPILOGUE_PARAMETERS const Params& p)
{
    add_up_rows(rows.sum);
#if WARPGROUPS_L > 1
    float* part = reinterpret_cast<float*>(shared) + int(threadIdx.x) % FINISHING;
    synchronize(1, MULTIPLYING);
    if (warpgroup >= WARPGROUPS_M) {
        put_part(part, rows);
    }
    synchronize(1, MULTIPLYING);
    if (warpgroup >= WARPGROUPS_M) {
        return;
    }
    add_part(rows, [&](int i) { return part[i]; });
#endif
#if SPLITS > 1
    if (tile.splits > 1 && !add_splits(rows, tile, reinterpret_cast<int*>(shared + FLAG_AT), partial)) {
        return;
    }
#endif
    int row = tile.row + warpgroup * 64 + int(threadIdx.x) / 32 % 4 * 16;
    store_rows(rows, row, tile.batch(), tile.group(), SINK_ARGUMENT out, EPILOGUE_ARGUMENTS p);
}
