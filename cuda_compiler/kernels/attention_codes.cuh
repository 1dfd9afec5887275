// Attention of few rows over many positions whose keys and values are codes of a byte, with a scale for each head and position,
// as in a decode step: the algorithm of attention_decode.cuh, with the products of attention_coded_rows.cuh.
//
// Codes go from memory to registers. The next keys are on their way once these have been multiplied, and so are the next values.
// FRESH keys and values are rounded to codes here: each block computes them, since whichever has their positions needs them, and
// one writes them to their places. Grid: as in attention_decode.cuh.
constexpr int NEW = HEAD_SIZE + VALUE_SIZE;

// A position, or the last one where there is none any more: the last block may hold pieces behind it.
__device__ __forceinline__ int existing(int position) { return LENGTH % BLOCK == 0 ? position : min(position, LENGTH - 1); }

// Starts reading the keys, or values, of a piece from a position on.
__device__ __forceinline__ void read_keys(
    Keys& keys, const unsigned char* k, const k_scale_t* scales, int position)
{
    #pragma unroll
    for (int half_piece = 0; half_piece < 2; ++half_piece) {
        int at = existing(position + lane_place(half_piece * 2));
        read_key<false>(keys, half_piece, k + (long long)at * K_ROW);
        keys.scale[half_piece] = float(scales[(long long)at * K_SCALE_ROW]);
    }
}

__device__ __forceinline__ void read_values(
    Values& values, const unsigned char* v, const v_scale_t* scales, int position)
{
    #pragma unroll
    for (int which = 0; which < 4; ++which) {
        int at = existing(position + value_place_of(which));
        read_value<false>(values, which, v + (long long)at * V_ROW);
    }
    #pragma unroll
    for (int half_piece = 0; half_piece < 2; ++half_piece) {
        int at = existing(position + lane_place(half_piece * 2));
        values.scale[half_piece] = float(scales[(long long)at * V_SCALE_ROW]);
    }
}

#if FRESH
// New keys and values, side by side, and what becomes of them.
struct Fresh {
    float number[FRESH][NEW], key_scale[FRESH], value_scale[FRESH];
    alignas(16) unsigned char code[FRESH][NEW];
};

__device__ __forceinline__ void compute_fresh(Fresh& fresh, int batch, int group, OPERAND_PARAMETERS const Params& p)
{
    for (int index = int(threadIdx.x); index < FRESH * NEW; index += THREADS) {
        int row = index / NEW, column = index % NEW;
        fresh.number[row][column] = column < HEAD_SIZE
            ? key_value(batch, group, row, column, OPERAND_ARGUMENTS p)
            : value_value(batch, group, row, column - HEAD_SIZE, OPERAND_ARGUMENTS p);
    }
}

__device__ __forceinline__ void round_fresh(Fresh& fresh)
{
    for (int row = int(threadIdx.x) / 32; row < FRESH * 2; row += WARPS) {
        unsigned char* code = fresh.code[row / 2];
        const float* number = fresh.number[row / 2];
        if (row % 2 == 0) {
            float scale = round_row<HEAD_SIZE>(code, [&](int column) { return number[column]; });
            fresh.key_scale[row / 2] = float(k_scale_t(scale));
        } else {
            float scale = round_row<VALUE_SIZE>(code + HEAD_SIZE, [&](int column) { return number[HEAD_SIZE + column]; });
            fresh.value_scale[row / 2] = float(v_scale_t(scale));
        }
    }
}

// Writes a new row of codes, and its scale, to their place in memory, if there is such a place.
template <int SIZE, int STEP, int SCALE_STEP, typename S>
__device__ __forceinline__ void write_row(unsigned char* target, S* scales, const unsigned char* code, float scale, int place)
{
    if (place < 0) {
        return;
    }
    for (int word = int(threadIdx.x); word < SIZE / 4; word += THREADS) {
        reinterpret_cast<uint*>(target + (long long)place * STEP)[word] = reinterpret_cast<const uint*>(code)[word];
    }
    if (threadIdx.x == 0) {
        scales[(long long)place * SCALE_STEP] = S(scale);
    }
}

// Puts what is new where it belongs in the keys, or values, of a piece, which may have been read before it was in memory.
__device__ __forceinline__ void patch_keys(Keys& keys, const Fresh& fresh, const int (&places)[FRESH], int position)
{
    #pragma unroll
    for (int row = 0; row < FRESH; ++row) {
        #pragma unroll
        for (int half_piece = 0; half_piece < 2; ++half_piece) {
            if (places[row] - position == lane_place(half_piece * 2)) {
                read_key<true>(keys, half_piece, fresh.code[row]);
                keys.scale[half_piece] = fresh.key_scale[row];
            }
        }
    }
}

__device__ __forceinline__ void patch_values(Values& values, const Fresh& fresh, const int (&places)[FRESH], int position)
{
    #pragma unroll
    for (int row = 0; row < FRESH; ++row) {
        int at = places[row] - position;
        #pragma unroll
        for (int half_piece = 0; half_piece < 2; ++half_piece) {
            if (at == lane_place(half_piece * 2)) {
                values.scale[half_piece] = fresh.value_scale[row];
            }
        }
        #pragma unroll
        for (int which = 0; which < 4; ++which) {
            if (at == value_place_of(which)) {
                read_value<true>(values, which, fresh.code[row] + HEAD_SIZE);
            }
        }
    }
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, SETS == 1 ? 2 : 1) attention_codes(
    OPERAND_PARAMETERS KEPT unsigned char* k, KEPT unsigned char* v, KEPT k_scale_t* k_scales, KEPT v_scale_t* v_scales,
    const mask_t* mask, SINK_PARAMETER const unsigned char* states, float* partial, OUT_T* out, EPILOGUE_PARAMETERS const Params p)
{
    extern __shared__ __align__(128) unsigned char ring[]; // what warps leave
    __shared__ Parts parts;
    __shared__ __align__(16) tile_t queries[SETS * 8 * Q_PITCH];
    int batch = int(blockIdx.z) / GROUPS, group = int(blockIdx.z) % GROUPS;
    if (EARLY) {
        hurry_next_grid();
    }
    if (CLUSTER > 1) {
        announce_to_cluster();
    }
    if (!EARLY) {
        wait_for_previous_grid();
    }
    clear_queries(queries);
    Share share(list_open(states, batch, group, p));
    if (share.is_nobodys()) {
        if (CLUSTER > 1) {
            wait_for_cluster();
        }
        return;
    }
    enter_group(k, v, mask, batch, group, p);
    k_scales += (long long)batch * K_SCALE_BATCH + (long long)group * K_SCALE_HEAD;
    v_scales += (long long)batch * V_SCALE_BATCH + (long long)group * V_SCALE_HEAD;
    Keys keys = {};
    Values values = {};
    Scores added = {};
    if (share.has(0)) {
        read_keys(keys, k, k_scales, share.position(0));
        read_values(values, v, v_scales, share.position(0));
        load_mask(added, mask, share.position(0), share.is_masked(0), p);
    }
    if (EARLY) {
        wait_for_previous_grid();
    }
#if FRESH
    __shared__ Fresh fresh;
    int key_places[FRESH], value_places[FRESH];
    find_places(key_places, value_places, batch, group, OPERAND_ARGUMENTS p);
#endif
    OwnQueries own;
    compute_queries(own, batch, group, OPERAND_ARGUMENTS p);
#if FRESH
    compute_fresh(fresh, batch, group, OPERAND_ARGUMENTS p);
#endif
    leave_queries(queries, own);
    __syncthreads();
#if FRESH
    round_fresh(fresh);
    __syncthreads();
    if (share.is_first()) {
        for (int row = 0; row < FRESH; ++row) {
            write_row<HEAD_SIZE, K_ROW, K_SCALE_ROW>(k, k_scales, fresh.code[row], fresh.key_scale[row], key_places[row]);
            write_row<VALUE_SIZE, V_ROW, V_SCALE_ROW>(
                v, v_scales, fresh.code[row] + HEAD_SIZE, fresh.value_scale[row], value_places[row]);
        }
    }
#endif
    Rows rows;
    Queries query;
    begin_rows(rows);
    load_coded_queries(query, queries);
    for (int turn = 0; share.has(turn); ++turn) {
        int position = share.position(turn);
        bool more = share.has(turn + 1);
#if FRESH
        patch_keys(keys, fresh, key_places, position);
#endif
        Scores score;
        multiply_coded_keys(score, query, keys);
        if (more) { // into the registers of those that were just multiplied
            read_keys(keys, k, k_scales, share.position(turn + 1));
        }
        soften(rows, score, added, position);
        if (more) {
            load_mask(added, mask, share.position(turn + 1), share.is_masked(turn + 1), p);
        }
#if FRESH
        patch_values(values, fresh, value_places, position);
#endif
        add_coded_values(rows, score, values);
        if (more) {
            read_values(values, v, v_scales, share.position(turn + 1));
        }
    }
    if (share.has(0)) {
        leave_rows(rows, ring, parts, 1.0f / VALUE_UNIT, coded_lane_column);
    }
    finish_shares(parts, ring, share, batch, group, SINK_ARGUMENT partial, out, EPILOGUE_ARGUMENTS p);
#if FRESH
    if (share.is_first() && threadIdx.x == 0) {
        report_places(batch, group, OPERAND_ARGUMENTS p);
    }
#endif
}
