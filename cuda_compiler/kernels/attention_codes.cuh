// Attention of few rows over many positions whose keys and values are codes of a byte, with a scale for each head and
// position, as in a decode step: the algorithm of attention_decode.cuh, with the products of attention_coded_rows.cuh.
//
// Codes are copied to shared memory, DEPTH pieces of each warp ahead. FRESH keys and values are rounded to codes by
// each warp that has their positions, and once more by one block, which writes them to memory. Grid: as in
// attention_decode.cuh.
constexpr int NEW = HEAD_SIZE + VALUE_SIZE;

template <typename S>
__device__ __forceinline__ void copy_scale(S* target, const S* source)
{
    if (sizeof(S) == 4) {
        copy_part<4>(target, source, 4);
    } else {
        *target = *source;
    }
}

// Starts copying the piece from a position on; the last position again where there is none any more.
__device__ __forceinline__ void copy_piece(
    unsigned char* stage, const unsigned char* k, const unsigned char* v, const k_scale_t* k_scales,
    const v_scale_t* v_scales, int position)
{
    constexpr bool WHOLE = LENGTH % BLOCK == 0;
    int count = LENGTH - position, row = int(threadIdx.x) % PIECE;
    long long at = position + (WHOLE ? row : min(row, count - 1));
    copy_bytes<HEAD_SIZE, K_PITCH, K_ROW, WHOLE>(stage, k + (long long)position * K_ROW, count);
    copy_bytes<VALUE_SIZE, V_PITCH, V_ROW, WHOLE>(stage + K_BYTES, v + (long long)position * V_ROW, count);
    if (threadIdx.x % 32 < PIECE) {
        copy_scale(key_scales_of(stage) + row, k_scales + at * K_SCALE_ROW);
    } else {
        copy_scale(value_scales_of(stage) + row, v_scales + at * V_SCALE_ROW);
    }
}

#if FRESH
// New keys and values, side by side.
typedef float Fresh[FRESH][NEW];

__device__ __forceinline__ void compute_fresh(Fresh& fresh, int batch, int group, OPERAND_PARAMETERS const Params& p)
{
    for (int index = int(threadIdx.x); index < FRESH * NEW; index += THREADS) {
        int row = index / NEW, column = index % NEW;
        fresh[row][column] = column < HEAD_SIZE
            ? key_value(batch, group, row, column, OPERAND_ARGUMENTS p)
            : value_value(batch, group, row, column - HEAD_SIZE, OPERAND_ARGUMENTS p);
    }
}

// Rounds a new row of keys, or values, to codes and a scale, with all lanes of a warp.
template <int SIZE, typename S>
__device__ __forceinline__ void put_fresh(unsigned char* code, S* scale, const float* number)
{
    S found(round_row<SIZE>(code, [&](int column) { return number[column]; }));
    if (threadIdx.x % 32 == 0) {
        *scale = found;
    }
}

// Replaces new rows in a piece, which may have been copied before these were in memory.
__device__ __forceinline__ void patch(
    unsigned char* stage, const Fresh& fresh, const int (&key_places)[FRESH], const int (&value_places)[FRESH],
    int position)
{
    bool changed = false;
    #pragma unroll
    for (int row = 0; row < FRESH; ++row) {
        int key = key_places[row] - position, value = value_places[row] - position;
        if (0 <= key && key < PIECE) {
            put_fresh<HEAD_SIZE>(stage + key * K_PITCH, key_scales_of(stage) + key, fresh[row]);
            changed = true;
        }
        if (0 <= value && value < PIECE) {
            put_fresh<VALUE_SIZE>(
                stage + K_BYTES + value * V_PITCH, value_scales_of(stage) + value, fresh[row] + HEAD_SIZE);
            changed = true;
        }
    }
    if (changed) {
        __syncwarp();
    }
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, SETS == 1 ? 2 : 1) attention_codes(
    OPERAND_PARAMETERS KEPT unsigned char* k, KEPT unsigned char* v, KEPT k_scale_t* k_scales, KEPT v_scale_t* v_scales,
    const mask_t* mask, SINK_PARAMETER const unsigned char* states, float* partial, OUT_T* out,
    EPILOGUE_PARAMETERS const Params p)
{
    extern __shared__ __align__(128) unsigned char ring[]; // stages of a piece each, DEPTH for each warp
    __shared__ Parts parts;
    __shared__ __align__(16) tile_t queries[SETS * 8 * Q_PITCH];
    int batch = int(blockIdx.z) / GROUPS, group = int(blockIdx.z) % GROUPS;
    begin_block(queries, parts, false);
    Share share(list_open(states, batch, group, p));
    if (share.is_nobodys()) {
        return;
    }
    enter_group(k, v, mask, batch, group, p);
    k_scales += (long long)batch * K_SCALE_BATCH + (long long)group * K_SCALE_HEAD;
    v_scales += (long long)batch * V_SCALE_BATCH + (long long)group * V_SCALE_HEAD;
    int warp = int(threadIdx.x) / 32;
    auto stage = [&](int turn) { return ring + (warp * DEPTH + turn % DEPTH) * STAGE_BYTES; };
    auto copy = [&](int turn) {
        if (share.has(turn)) {
            copy_piece(stage(turn), k, v, k_scales, v_scales, share.position(turn));
        }
        commit_copies();
    };
    #pragma unroll 1
    for (int turn = 0; turn < DEPTH; ++turn) {
        copy(turn);
    }
    Scores added = {};
    if (share.has(0)) {
        load_mask(added, mask, share.position(0), share.is_masked(0), p);
    }
    if (EARLY) {
        wait_for_previous_grid();
    }
#if FRESH
    __shared__ Fresh fresh;
    __shared__ int key_places[FRESH], value_places[FRESH];
    OwnPlaces places(batch, group, OPERAND_ARGUMENTS p);
#endif
    OwnQueries own;
    compute_queries(own, batch, group, OPERAND_ARGUMENTS p);
#if FRESH
    compute_fresh(fresh, batch, group, OPERAND_ARGUMENTS p);
#endif
    leave_queries(queries, own);
#if FRESH
    places.leave(key_places, value_places);
#endif
    __syncthreads();
#if FRESH
    if (share.is_last()) { // the last warps have the fewest pieces
        for (int each = WARPS - 1 - warp; each < FRESH * 2; each += WARPS) {
            int row = each / 2, place = each % 2 ? value_places[row] : key_places[row];
            if (place < 0) { // there is no such place
                continue;
            }
            if (each % 2 == 0) {
                put_fresh<HEAD_SIZE>(
                    k + (long long)place * K_ROW, k_scales + (long long)place * K_SCALE_ROW, fresh[row]);
            } else {
                put_fresh<VALUE_SIZE>(
                    v + (long long)place * V_ROW, v_scales + (long long)place * V_SCALE_ROW, fresh[row] + HEAD_SIZE);
            }
        }
    }
#endif
    Rows rows;
    Queries query;
    begin_rows(rows);
    load_coded_queries(query, queries);
    for (int turn = 0; share.has(turn); ++turn) {
        int position = share.position(turn);
        Scores score;
        wait_for_copies<DEPTH - 1>();
        __syncwarp();
#if FRESH
        patch(stage(turn), fresh, key_places, value_places, position);
#endif
        multiply_piece_keys(score, query, stage(turn));
        soften(rows, score, added, position, turn == 0);
        if (share.has(turn + 1)) {
            load_mask(added, mask, share.position(turn + 1), share.is_masked(turn + 1), p);
        }
        add_piece_values(rows, score, stage(turn));
        __syncwarp();
        copy(turn + DEPTH);
    }
    if (EARLY) {
        hurry_next_grid(); // not before: what it reads would come between the codes and what is waited for here
    }
    if (share.has(0)) {
        leave_rows(rows, ring, parts, RESULT_UNIT, coded_lane_column);
    }
    finish_shares(parts, ring, share, batch, group, SINK_ARGUMENT partial, out, EPILOGUE_ARGUMENTS p);
#if FRESH
    if (share.is_last() && threadIdx.x == 0) {
        report_places(key_places, value_places, batch, group, OPERAND_ARGUMENTS p);
    }
#endif
}
