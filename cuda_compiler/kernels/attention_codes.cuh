// Attention of few rows over many positions whose keys and values are codes of a byte, with a scale for each head and
// position, as in a decode step: the algorithm of attention_decode.cuh, with the products of attention_coded_rows.cuh.
//
// Codes are copied to shared memory, DEPTH pieces of each warp ahead. FRESH keys and values are rounded to codes by
// each block, one of which writes them to memory. Grid: as in attention_decode.cuh.

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
    int count = LENGTH - position, row = int(threadIdx.x) % PIECE;
    long long at = position + (WHOLE_BLOCKS ? row : min(row, count - 1));
    copy_bytes<HEAD_SIZE, K_PITCH, K_ROW>(stage, k + (long long)position * K_ROW, count);
    copy_bytes<VALUE_SIZE, V_PITCH, V_ROW>(stage + K_BYTES, v + (long long)position * V_ROW, count);
    if (threadIdx.x % 32 < PIECE) {
        copy_scale(key_scales_of(stage) + row, k_scales + at * K_SCALE_ROW);
    } else {
        copy_scale(value_scales_of(stage) + row, v_scales + at * V_SCALE_ROW);
    }
}

#if FRESH
constexpr int FRESH_WARPS = FRESH * 2 < WARPS / 2 ? FRESH * 2 : WARPS / 2; // which compute new rows, and no queries

// New keys and values in codes.
struct FreshCodes : FreshRows<unsigned char> {
    float scale[2][FRESH];

    // Computes rows and rounds them, one after another with each of the last warps.
    __device__ __forceinline__ void compute(int batch, int group, OPERAND_PARAMETERS const Params& p)
    {
        #pragma unroll 1
        for (int each = WARPS - 1 - int(threadIdx.x) / 32; each < FRESH * 2; each += FRESH_WARPS) {
            int number = each / 2, is_value = each % 2;
            float found;
            if (is_value) {
                found = round_row<VALUE_SIZE>(row[number] + HEAD_SIZE, [&](int column) {
                    return value_value(batch, group, number, column, OPERAND_ARGUMENTS p);
                });
            } else {
                found = round_row<HEAD_SIZE>(row[number], [&](int column) {
                    return key_value(batch, group, number, column, OPERAND_ARGUMENTS p);
                });
            }
            if (threadIdx.x % 32 == 0) {
                scale[is_value][number] = found;
            }
        }
    }

    // Writes them to memory, with their scales.
    __device__ __forceinline__ void write_all(
        unsigned char* k, unsigned char* v, k_scale_t* k_scales, v_scale_t* v_scales) const
    {
        write(k, v);
        int number = THREADS - 1 - int(threadIdx.x);
        if (number < FRESH && place[0][number] >= 0) {
            k_scales[(long long)place[0][number] * K_SCALE_ROW] = k_scale_t(scale[0][number]);
        }
        if (number < FRESH && place[1][number] >= 0) {
            v_scales[(long long)place[1][number] * V_SCALE_ROW] = v_scale_t(scale[1][number]);
        }
    }

    __device__ __forceinline__ void patch_all(unsigned char* stage, int position, int watched) const
    {
        patch(stage, position, watched, [&](int number, int key, int value) {
            bool is_first = threadIdx.x % 32 == 0;
            if (is_first && uint(key) < PIECE) {
                key_scales_of(stage)[key] = k_scale_t(scale[0][number]);
            }
            if (is_first && uint(value) < PIECE) {
                value_scales_of(stage)[value] = v_scale_t(scale[1][number]);
            }
        });
    }
};
#else
constexpr int FRESH_WARPS = 0;
#endif

constexpr int EARLY_PIECES = DEPTH > 1 ? DEPTH - 1 : 1; // all together would be ahead of the queries on their way
constexpr bool IS_ALONE = SETS > 1 || 2 * WARPS * DEPTH * STAGE_BYTES > 220 << 10; // on its multiprocessor

extern "C" __global__ void __launch_bounds__(THREADS, IS_ALONE ? 1 : 2) attention_codes(
    OPERAND_PARAMETERS KEPT unsigned char* k, KEPT unsigned char* v, KEPT k_scale_t* k_scales, KEPT v_scale_t* v_scales,
    const mask_t* mask, SINK_PARAMETER const unsigned char* states, float* partial, OUT_T* out,
    EPILOGUE_PARAMETERS const Params p)
{
    extern __shared__ __align__(128) unsigned char ring[]; // stages of a piece each, DEPTH for each warp
    __shared__ Parts parts;
    __shared__ __align__(16) tile_t queries[SETS * 8 * Q_PITCH];
    int batch = int(blockIdx.z) / GROUPS, group = int(blockIdx.z) % GROUPS;
    begin_block(queries, parts, false);
    Share share(Open(states, batch, group, p));
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
            copy_piece(stage(turn), k, v, k_scales, v_scales, share.piece(turn).position);
        }
        commit_copies();
    };
    #pragma unroll 1
    for (int turn = 0; turn < EARLY_PIECES; ++turn) {
        copy(turn);
    }
    meet_cluster();
    Piece piece = {};
    PieceMask added;
    if (share.has(0)) {
        piece = share.piece(0);
        added.load(mask, piece, p);
    }
    if (EARLY) {
        wait_for_previous_grid();
    }
#if FRESH
    __shared__ FreshCodes fresh;
    OwnPlaces places(batch, group, OPERAND_ARGUMENTS p);
    if (warp >= WARPS - FRESH_WARPS) {
        fresh.compute(batch, group, OPERAND_ARGUMENTS p);
    }
#endif
    if (warp < WARPS - FRESH_WARPS) {
        OwnQueries<(WARPS - FRESH_WARPS) * 32> own;
        own.compute(batch, group, OPERAND_ARGUMENTS p);
        leave_coded(own, queries);
    }
#if FRESH
    fresh.leave_places(places);
#endif
    #pragma unroll 1
    for (int turn = EARLY_PIECES; turn < DEPTH; ++turn) {
        copy(turn);
    }
    __syncthreads();
#if FRESH
    if (share.is_last()) {
        fresh.write_all(k, v, k_scales, v_scales);
    }
    int watched = fresh.watched();
#endif
    Rows rows;
    CodedQueries query;
    begin_rows(rows);
    query.load(queries);
    for (int turn = 0; share.has(turn); ++turn) {
        Scores score;
        wait_for_copies<DEPTH - 1>();
        __syncwarp();
#if FRESH
        fresh.patch_all(stage(turn), piece.position, watched);
#endif
        multiply_piece_keys(score, query, stage(turn));
        soften(rows, score, added, piece.position, turn == 0);
        if (share.has(turn + 1)) {
            piece = share.piece(turn + 1);
            added.load(mask, piece, p);
        }
        add_piece_values(rows, score, stage(turn));
        __syncwarp();
        copy(turn + DEPTH);
    }
    if (EARLY) {
        hurry_next_grid(); // not before: what it reads would come between the codes and what is waited for here
    }
    if (share.has(0)) {
        leave_rows(rows, ring, parts, coded_lane_result, coded_lane_column);
    }
    finish_shares(parts, ring, share, batch, group, SINK_ARGUMENT partial, out, EPILOGUE_ARGUMENTS p);
#if FRESH
    if (share.is_last()) {
        report_places(fresh.place, batch, group, OPERAND_ARGUMENTS p);
    }
#endif
}
