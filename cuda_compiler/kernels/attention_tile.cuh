// What a warp does with 16 rows of queries and a block of positions, and which blocks are worth reading.
constexpr int WARPS = WARPS_M * WARPS_L, THREADS = WARPS * 32, TILE_M = WARPS_M * 16, STEP = BLOCK / WARPS_L;
constexpr int TILES = (LENGTH + BLOCK - 1) / BLOCK;
constexpr int QK_WIDTH = (HEAD_SIZE + 15) / 16 * 16, V_WIDTH = (VALUE_SIZE + 15) / 16 * 16;
constexpr int STAGES = 3; // blocks of keys or of values that are on their way or in use
static_assert(TILES < 1 << 15, "tiles are listed in 15 bits");
static_assert(STEP % 16 == 0, "a warp multiplies by 16 positions at a time");

constexpr int Q_BYTES = tile_bytes(TILE_M, QK_WIDTH);
constexpr int STAGE_BYTES = tile_bytes(BLOCK, QK_WIDTH > V_WIDTH ? QK_WIDTH : V_WIDTH);

// Starts copying `count` rows of SIZE elements, and zeros behind them, into a tile of ROWS by WIDTH.
template <int ROWS, int SIZE, int WIDTH, int CHUNK, typename Row>
__device__ __forceinline__ void copy_rows(unsigned char* tile, const tile_t* source, int step, int count, Row row_start)
{
    constexpr int PIECES = WIDTH / CHUNK;
    for (int index = int(threadIdx.x); index < ROWS * PIECES; index += THREADS) {
        int row = index / PIECES, column = index % PIECES * CHUNK;
        bool valid = row < count && column < SIZE;
        unsigned char* target = tile + place<WIDTH>(row, column);
        const tile_t* from = valid ? source + row_start(row) + (long long)column * step : source;
        if (CHUNK == 8) {
            copy_chunk(target, from, valid);
        } else {
            *reinterpret_cast<tile_t*>(target) = valid ? *from : tile_t(0.0f);
        }
    }
}

// What a warp has of its 16 rows: lane l has rows l / 4 and l / 4 + 8, and of eight columns 2 * (l % 4) and the next.
struct Rows {
    float result[V_WIDTH / 8][4], top[2], sum[2];
};

__device__ __forceinline__ float element(const unsigned char* tile, uint at)
{
    return float(*reinterpret_cast<const tile_t*>(tile + at));
}

// Scores of the warp's rows at STEP positions from `first` of the tile on. Without tensor cores a lane reads the two
// rows that it has results of from memory.
__device__ __forceinline__ void multiply_keys(
    float (&score)[STEP / 8][4], const uint (&query)[QK_WIDTH / 16][4], const tile_t* upper_row,
    const tile_t* lower_row, const unsigned char* keys, int first, const Params& p)
{
    uint lane = threadIdx.x % 32;
    #pragma unroll
    for (int n = 0; n < STEP / 8; ++n) {
        score[n][0] = score[n][1] = score[n][2] = score[n][3] = 0.0f;
    }
    if (TensorCores<tile_t>::available) {
        #pragma unroll
        for (int d = 0; d < QK_WIDTH / 16; ++d) {
            #pragma unroll
            for (int n = 0; n < STEP / 16; ++n) {
                uint part[4];
                uint row = first + n * 16 + lane / 16 * 8 + lane % 8;
                load_matrices(part, shared_address(keys) + place<QK_WIDTH>(row, d * 16 + lane / 8 % 2 * 8));
                TensorCores<tile_t>::multiply(score[2 * n], query[d], part[0], part[1]);
                TensorCores<tile_t>::multiply(score[2 * n + 1], query[d], part[2], part[3]);
            }
        }
    } else {
        for (int d = 0; d < HEAD_SIZE; ++d) {
            float upper = float(upper_row[(long long)d * p.q_step]), lower = float(lower_row[(long long)d * p.q_step]);
            #pragma unroll
            for (int c = 0; c < STEP / 4; ++c) {
                float key = element(keys, place<QK_WIDTH>(first + c / 2 * 8 + lane % 4 * 2 + c % 2, d));
                score[c / 2][c % 2] += upper * key;
                score[c / 2][c % 2 + 2] += lower * key;
            }
        }
    }
}

// result += weight * values
__device__ __forceinline__ void multiply_values(
    Rows& rows, const float (&weight)[STEP / 8][4], const unsigned char* values, int first)
{
    uint lane = threadIdx.x % 32;
    if (TensorCores<tile_t>::available) {
        #pragma unroll
        for (int n = 0; n < STEP / 16; ++n) {
            const float (&left)[4] = weight[2 * n], (&right)[4] = weight[2 * n + 1];
            uint part[4] = {pack_pair(left[0], left[1]), pack_pair(left[2], left[3]), pack_pair(right[0], right[1]),
                            pack_pair(right[2], right[3])};
            #pragma unroll
            for (int e = 0; e < V_WIDTH / 16; ++e) {
                uint value[4];
                uint row = first + n * 16 + lane / 8 % 2 * 8 + lane % 8;
                load_matrices_transposed(value, shared_address(values) + place<V_WIDTH>(row, e * 16 + lane / 16 * 8));
                TensorCores<tile_t>::multiply(rows.result[2 * e], part, value[0], value[1]);
                TensorCores<tile_t>::multiply(rows.result[2 * e + 1], part, value[2], value[3]);
            }
        }
    } else {
        #pragma unroll 1 // unrolled it is too much code for the instruction cache, and takes the compiler ten seconds
        for (int column = 0; column < 8; ++column) {
            uint owner = lane / 4 * 4 + column / 2;
            #pragma unroll
            for (int n = 0; n < STEP / 8; ++n) {
                float upper = __shfl_sync(0xffffffffu, column % 2 ? weight[n][1] : weight[n][0], owner);
                float lower = __shfl_sync(0xffffffffu, column % 2 ? weight[n][3] : weight[n][2], owner);
                #pragma unroll
                for (int e = 0; e < V_WIDTH / 4; ++e) {
                    uint at = place<V_WIDTH>(first + n * 8 + column, e / 2 * 8 + lane % 4 * 2 + e % 2);
                    float value = element(values, at);
                    rows.result[e / 2][e % 2] += upper * value;
                    rows.result[e / 2][e % 2 + 2] += lower * value;
                }
            }
        }
    }
}

// Scores become weights, in powers of two, beside the largest score so far.
__device__ __forceinline__ void soften(Rows& rows, float (&score)[STEP / 8][4])
{
    #pragma unroll
    for (int half_row = 0; half_row < 2; ++half_row) {
        float top = rows.top[half_row];
        #pragma unroll
        for (int n = 0; n < STEP / 8; ++n) {
            top = fmaxf(top, fmaxf(score[n][half_row * 2], score[n][half_row * 2 + 1]));
        }
        top = quad_max(top);
        float shrink = exp2f(rows.top[half_row] - top), sum = 0.0f; // one where both are CLOSED, and all is zero
        #pragma unroll
        for (int n = 0; n < STEP / 8; ++n) {
            #pragma unroll
            for (int u = 0; u < 2; ++u) {
                float value = score[n][half_row * 2 + u];
                float weight = value == CLOSED ? 0.0f : exp2f(value - top);
                score[n][half_row * 2 + u] = weight;
                sum += weight;
            }
        }
        rows.top[half_row] = top;
        rows.sum[half_row] = rows.sum[half_row] * shrink + sum;
        #pragma unroll
        for (int e = 0; e < V_WIDTH / 8; ++e) {
            rows.result[e][half_row * 2] *= shrink;
            rows.result[e][half_row * 2 + 1] *= shrink;
        }
    }
}

// The scores in powers of two, and what the mask does to them.
__device__ __forceinline__ void mask_scores(
    float (&score)[STEP / 8][4], const mask_t* mask, int row, int position, bool is_open, const Params& p)
{
    uint lane = threadIdx.x % 32;
    #pragma unroll
    for (int n = 0; n < STEP / 8; ++n) {
        #pragma unroll
        for (int u = 0; u < 4; ++u) {
            score[n][u] = scaled_score(score[n][u]);
        }
    }
    if (is_open) {
        return;
    }
    float added[STEP / 8][4] = {}; // all of them are on their way before the first is used
#if MASK
    #pragma unroll
    for (int u = 0; u < 4; ++u) {
        int r = min(row + int(lane / 4) + u / 2 * 8, p.rows * SHARED - 1);
        const mask_t* source = mask + (long long)(r / p.rows) * p.mask_head + (long long)(r % p.rows) * p.mask_row;
        #pragma unroll
        for (int n = 0; n < STEP / 8; ++n) {
            int j = min(position + n * 8 + int(lane % 4) * 2 + u % 2, LENGTH - 1);
            added[n][u] = mask_value(source[(long long)j * p.mask_step]);
        }
    }
#endif
    #pragma unroll
    for (int u = 0; u < 4; ++u) {
        int own = (row + int(lane / 4) + u / 2 * 8) % p.rows;
        #pragma unroll
        for (int n = 0; n < STEP / 8; ++n) {
            int j = position + n * 8 + int(lane % 4) * 2 + u % 2;
            bool closed = j >= LENGTH || (CAUSAL && j > own) || added[n][u] <= MASK_CLOSED;
            score[n][u] = closed ? CLOSED : score[n][u] + binary_exponent(added[n][u]);
        }
    }
}

// Whether some, or all, of the tile's rows are open at a block of positions: 0 for none, 2 for all, else 1.
__device__ __forceinline__ int state_of(
    int tile, int row, const unsigned char* states, int batch, int group, const Params& p)
{
    int last = min(row + TILE_M, p.rows * SHARED);
    if (p.state_head == 0) {
        last = min(last, row + p.rows); // every head is the same
    }
    bool any = false, all = (tile + 1) * BLOCK <= LENGTH;
    for (int r = row; r < last;) {
        int own = r % p.rows, end = min(r - own + p.rows, last), state = 2;
#if MASK && !MASK_STATES
        state = 1;
#elif MASK
        int part = own / STATE_ROWS;
        end = min(end, r - own + (part + 1) * STATE_ROWS);
        int head = group * SHARED + r / p.rows;
        state =
            states[((masked_as(batch) * p.state_batch + head * p.state_head) * p.state_parts + part) * TILES + tile];
#endif
        if (CAUSAL) {
            int first_own = own, last_own = own + end - r - 1;
            state = tile * BLOCK > last_own ? 0 : (tile + 1) * BLOCK - 1 > first_own ? min(state, 1) : state;
        }
        any |= state != 0;
        all &= state == 2;
        r = end;
    }
    return any ? all ? 2 : 1 : 0;
}

// Lists the tiles that are open, each times two, plus one where the mask changes nothing.
__device__ __forceinline__ int list_tiles(
    unsigned short* list, int row, const unsigned char* states, int batch, int group, const Params& p)
{
    __shared__ int total;
    __shared__ unsigned char known[TILES];
    #pragma unroll 4
    for (int tile = int(threadIdx.x); tile < TILES; tile += THREADS) {
        known[tile] = (unsigned char)state_of(tile, row, states, batch, group, p);
    }
    return list_open_blocks<TILES>(list, known, &total);
}
