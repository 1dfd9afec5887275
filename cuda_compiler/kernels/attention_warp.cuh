// How a warp multiplies a piece of 16 positions for all rows. Positions are the 16 rows of the tensor cores' operand,
// and a set of eight rows of queries its columns, so that few queries leave no part of a tensor core idle: scores are
// keys by queries, results are values transposed by weights transposed.
constexpr int THREADS = WARPS * 32, PIECE = 16;
constexpr int QK_WIDTH = (HEAD_SIZE + 15) / 16 * 16, V_WIDTH = (VALUE_SIZE + 15) / 16 * 16;
constexpr int ROWS = SHARED * OWN_ROWS, SETS = (ROWS + 7) / 8;
constexpr bool WHOLE_BLOCKS = LENGTH % BLOCK == 0; // else pieces may begin behind the last position

// Bytes from row to row of a piece: rows are apart so that banks differ, or are whole lines of permuted codes.
constexpr int pitch_of(int bytes) { return ELEMENT_BYTES == 1 && bytes % 128 == 0 ? bytes : bytes + 16; }
constexpr int K_PITCH = pitch_of(QK_WIDTH * ELEMENT_BYTES), V_PITCH = pitch_of(V_WIDTH * ELEMENT_BYTES);

// What bytes of a row of a piece are permuted by, in steps of 32: eight lanes find four chunks of two neighbours, or two
// of four rows that are two apart, in different banks.
template <int PITCH>
__device__ __forceinline__ int permutation_of(int row)
{
    return PITCH % 128 == 0 ? (row / 2 % 4 ^ row % 2 * 2) * 32 : 0;
}

constexpr int Q_PITCH = QK_WIDTH + 8, RESULT_PITCH = V_WIDTH + 4; // elements from row to row
constexpr int K_BYTES = PIECE * K_PITCH, PIECE_BYTES = K_BYTES + PIECE * (V_PITCH + SCALE_BYTES);
constexpr int SET_BYTES = 8 * RESULT_PITCH * 4, STAGE_BYTES = PIECE_BYTES > SET_BYTES ? PIECE_BYTES : SET_BYTES;
static_assert(SETS * SET_BYTES <= DEPTH * STAGE_BYTES, "a warp's results lie where its pieces were");

// Of each set a lane has the rows 2 * (l % 4) and the next: scores at the positions l / 4 and l / 4 + 8, the two rows
// side by side; results at the columns l / 4 and l / 4 + 8 of each 16. The sums are over the lane's own positions.
// Behind the results are those of values that are all the code of zero.
constexpr int VALUE_TILES = V_WIDTH / 16, ZERO_TILES = ELEMENT_BYTES == 1;
struct Rows {
    float result[SETS][VALUE_TILES + ZERO_TILES][4], top[SETS][2], sum[SETS][2];
};
typedef float Scores[SETS][4];
typedef uint Queries[SETS][QK_WIDTH / 16][2];

__device__ __forceinline__ int lane_row(int set, int u) { return set * 8 + int(threadIdx.x) % 4 * 2 + u % 2; }
__device__ __forceinline__ int lane_place(int u) { return int(threadIdx.x) % 32 / 4 + u / 2 * 8; }

// Rows of no positions yet.
__device__ __forceinline__ void begin_rows(Rows& rows)
{
    rows = {};
    #pragma unroll
    for (int set = 0; set < SETS; ++set) {
        rows.top[set][0] = rows.top[set][1] = CLOSED;
    }
}

// Whether some, or all, rows are open at one of COUNT blocks of positions: 0 for none, 2 for all, else 1 plus four
// times the pieces at the block's end at which none are.
template <int COUNT>
__device__ __forceinline__ int state_of(int block, const unsigned char* states, int batch, int group, const Params& p)
{
    bool any = block < COUNT, all = (block + 1) * BLOCK <= LENGTH && (!MASK || MASK_STATES);
    int closed = 0;
#if MASK && MASK_STATES
    any = false;
    closed = BLOCK / PIECE - 1;
    #pragma unroll
    for (int head = 0; head < MASK_HEADS; ++head) {
        int number = masked_as(batch) * p.state_batch + (group * SHARED + head) * p.state_head;
        int state = block < COUNT ? states[(long long)number * COUNT + block] : 0;
        any |= state != 0;
        all &= state == 2;
        closed = state == 0 ? closed : min(closed, state >> 2);
    }
#endif
    return any ? all ? 2 : 1 + 4 * closed : 0;
}

// The chunk of a piece's rows, CHUNKS each, that a lane copies behind the `first`. Where a row's divide a warp, it lies
// a constant number of rows behind the lane's first one, and so do addresses.
template <int CHUNKS>
struct PieceChunk {
    static constexpr bool IN_STEP = 32 % CHUNKS == 0;
    int lane_row, chunk, further;

    __device__ __forceinline__ explicit PieceChunk(int first)
    {
        int index = int(threadIdx.x) % 32 + (IN_STEP ? 0 : first);
        lane_row = index / CHUNKS;
        chunk = index % CHUNKS;
        further = IN_STEP ? first / CHUNKS : 0;
    }
    __device__ __forceinline__ int row() const { return lane_row + further; }

    // Where it lies, in units of which rows are STEP apart and the chunk has SIZE.
    template <int STEP, int SIZE>
    __device__ __forceinline__ long long offset() const
    {
        return (long long)lane_row * STEP + chunk * SIZE + (long long)further * STEP;
    }

    // Where it goes in a piece. Permutations of rows that have no bits in common add up.
    template <int PITCH>
    __device__ __forceinline__ int place() const
    {
        int byte = chunk * 16 ^ permutation_of<PITCH>(lane_row);
        return lane_row * PITCH + (byte ^ permutation_of<PITCH>(further)) + further * PITCH;
    }
};

// Starts copying 16 rows of SIZE elements, and zeros behind them; rows from `count` on are zeros.
template <int SIZE, int WIDTH, int PITCH, int STEP>
__device__ __forceinline__ void copy_rows(unsigned char* tile, const tile_t* source, int count)
{
    constexpr int CHUNKS = WIDTH / 8;
    #pragma unroll
    for (int first = 0; first < PIECE * CHUNKS; first += 32) {
        PieceChunk<CHUNKS> own(first);
        bool valid = (WHOLE_BLOCKS || own.row() < count) && (SIZE == WIDTH || own.chunk * 8 < SIZE);
        const tile_t* from = source + own.template offset<STEP, 8>();
        copy_chunk(tile + own.template place<PITCH>(), valid ? from : source, valid);
    }
}

// Where a piece begins among the positions, and whether the mask changes any of its scores.
struct Piece {
    int position;
    bool is_masked;
};

// What the mask adds to the scores of a piece, if it changes any.
struct PieceMask {
    Scores added = {};
    bool changes = false;

    __device__ __forceinline__ void load(const mask_t* mask, const Piece& piece, const Params& p)
    {
        changes = MASK && piece.is_masked;
#if MASK
        if (!changes) {
            return;
        }
        #pragma unroll
        for (int set = 0; set < SETS; ++set) {
            #pragma unroll
            for (int u = 0; u < 4; ++u) {
                int row = min(lane_row(set, u), ROWS - 1), at = min(piece.position + lane_place(u), LENGTH - 1);
                const mask_t* source = mask + (long long)(row / OWN_ROWS) * p.mask_head +
                                       (long long)(row % OWN_ROWS) * p.mask_row + (long long)at * p.mask_step;
                added[set][u] = mask_value(*source);
            }
        }
#endif
    }

    // Scores of what is closed, or does not exist, are CLOSED.
    __device__ __forceinline__ void apply(Scores& score, int position) const
    {
        if (!changes && WHOLE_BLOCKS) {
            return;
        }
        #pragma unroll
        for (int set = 0; set < SETS; ++set) {
            #pragma unroll
            for (int u = 0; u < 4; ++u) {
                bool is_closed = !WHOLE_BLOCKS && position + lane_place(u) >= LENGTH;
                if (changes) {
                    is_closed |= added[set][u] <= MASK_CLOSED;
                    score[set][u] += binary_exponent(added[set][u]);
                }
                score[set][u] = is_closed ? CLOSED : score[set][u];
            }
        }
    }
};

__device__ __forceinline__ void multiply_keys(Scores& score, const Queries& query, const unsigned char* keys)
{
    int lane = int(threadIdx.x) % 32;
    uint first = shared_address(keys) + lane % 16 * K_PITCH + lane / 16 * 16;
    Scores odd = {};
    #pragma unroll
    for (int set = 0; set < SETS; ++set) {
        score[set][0] = score[set][1] = score[set][2] = score[set][3] = 0.0f;
    }
    #pragma unroll
    for (int d = 0; d < QK_WIDTH / 16; ++d) {
        uint part[4];
        load_matrices(part, first + d * 32);
        #pragma unroll
        for (int set = 0; set < SETS; ++set) {
            TensorCores<tile_t>::multiply(d % 2 ? odd[set] : score[set], part, query[set][d][0], query[set][d][1]);
        }
    }
    #pragma unroll
    for (int set = 0; set < SETS; ++set) {
        #pragma unroll
        for (int u = 0; u < 4; ++u) {
            score[set][u] += odd[set][u];
        }
    }
}

__device__ __forceinline__ float place_max(float value)
{
    value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 4));
    value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 8));
    return fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 16));
}

__device__ __forceinline__ float place_sum(float value)
{
    value += __shfl_xor_sync(0xffffffffu, value, 4);
    value += __shfl_xor_sync(0xffffffffu, value, 8);
    return value + __shfl_xor_sync(0xffffffffu, value, 16);
}

// Scores become weights, in powers of two, beside the largest score so far. The `first` of a warp find no results yet.
__device__ __forceinline__ void soften(Rows& rows, Scores& score, const PieceMask& mask, int position, bool first)
{
    float shrink[SETS][2];
    #pragma unroll
    for (int index = 0; index < SETS * 4; ++index) {
        score[index / 4][index % 4] = scaled_score(score[index / 4][index % 4]);
    }
    mask.apply(score, position);
    #pragma unroll
    for (int set = 0; set < SETS; ++set) {
        #pragma unroll
        for (int u = 0; u < 2; ++u) {
            float top = fmaxf(rows.top[set][u], place_max(fmaxf(score[set][u], score[set][u + 2])));
            float base = top == CLOSED ? 0.0f : top; // so that what is CLOSED weighs nothing
            shrink[set][u] = power_of_two(rows.top[set][u] - base);
            #pragma unroll
            for (int at = u; at < 4; at += 2) {
                score[set][at] = power_of_two(score[set][at] - base);
            }
            rows.top[set][u] = top;
            rows.sum[set][u] = rows.sum[set][u] * shrink[set][u] + score[set][u] + score[set][u + 2];
        }
    }
    bool shrinks = false;
    #pragma unroll
    for (int index = 0; index < SETS * 2; ++index) {
        shrinks |= shrink[index / 2][index % 2] != 1.0f;
    }
    if (first || !__any_sync(0xffffffffu, shrinks)) {
        return;
    }
    #pragma unroll
    for (int set = 0; set < SETS; ++set) {
        #pragma unroll
        for (int e = 0; e < VALUE_TILES + ZERO_TILES; ++e) {
            #pragma unroll
            for (int u = 0; u < 4; ++u) {
                rows.result[set][e][u] *= shrink[set][u % 2];
            }
        }
    }
}

__device__ __forceinline__ uint transposed(uint matrix)
{
    uint result = 0;
#if __CUDA_ARCH__ >= 750
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(matrix));
#endif
    return result;
}

// result += values * weight
__device__ __forceinline__ void add_values(Rows& rows, const Scores& weight, const unsigned char* values)
{
    int lane = int(threadIdx.x) % 32;
    uint first = shared_address(values) + (lane / 16 * 8 + lane % 8) * V_PITCH + lane / 8 % 2 * 16;
    uint part[SETS][2];
    #pragma unroll
    for (int set = 0; set < SETS; ++set) {
        part[set][0] = transposed(pack_pair(weight[set][0], weight[set][1]));
        part[set][1] = transposed(pack_pair(weight[set][2], weight[set][3]));
    }
    #pragma unroll
    for (int e = 0; e < VALUE_TILES; ++e) {
        uint value[4];
        load_matrices_transposed(value, first + e * 32);
        #pragma unroll
        for (int set = 0; set < SETS; ++set) {
            TensorCores<tile_t>::multiply(rows.result[set][e], value, part[set][0], part[set][1]);
        }
    }
}

__device__ __forceinline__ float* warp_results(unsigned char* ring, int warp)
{
    return reinterpret_cast<float*>(ring + warp * DEPTH * STAGE_BYTES);
}

// A lane's results, by their numbers: what they are, and in which column.
__device__ __forceinline__ float lane_result(const Rows& rows, int set, int e, int u) { return rows.result[set][e][u]; }
__device__ __forceinline__ int lane_column(int e, int u) { return e * 16 + lane_place(u); }

// Stores a warp's results where its pieces were, and the largest scores and the sums of weights in `parts`.
template <typename Parts, typename Result, typename Column>
__device__ __forceinline__ void leave_rows(
    const Rows& rows, unsigned char* ring, Parts& parts, Result result, Column column)
{
    int warp = int(threadIdx.x) / 32;
    float* target = warp_results(ring, warp);
    #pragma unroll
    for (int set = 0; set < SETS; ++set) {
        #pragma unroll
        for (int u = 0; u < 2; ++u) {
            float sum = place_sum(rows.sum[set][u]);
            if (threadIdx.x % 32 < 4) {
                parts.top[warp][lane_row(set, u)] = rows.top[set][u];
                parts.sum[warp][lane_row(set, u)] = sum;
            }
        }
        #pragma unroll
        for (int e = 0; e < VALUE_TILES; ++e) {
            #pragma unroll
            for (int u = 0; u < 4; ++u) {
                target[lane_row(set, u) * RESULT_PITCH + column(e, u)] = result(rows, set, e, u);
            }
        }
    }
}

// The weight of each of `busy` warps in a row, at most MOST, beside the largest score of all, which is returned.
template <int MOST, typename Parts>
__device__ __forceinline__ float weigh_warps(float (&weight)[MOST], const Parts& parts, int row, int busy)
{
    float top = CLOSED;
    #pragma unroll
    for (int warp = 0; warp < MOST; ++warp) {
        weight[warp] = warp < busy ? parts.top[warp][row] : CLOSED;
        top = fmaxf(top, weight[warp]);
    }
    #pragma unroll
    for (int warp = 0; warp < MOST; ++warp) {
        weight[warp] = power_of_two(weight[warp] - top);
    }
    return top;
}
