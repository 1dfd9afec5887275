// Attention of few rows over many positions: result[row] = sum over j of weight[j] * v[j], the weights being the
// softmax over j of SCALE * (q[row] . k[j]) + mask[row, j], with a running maximum as in FlashAttention (Dao et al.,
// 2022), the positions shared out as in Flash-Decoding (Dao et al., 2023).
//
// A cluster of blocks, or several, computes all rows of the SHARED query heads that read one head of keys, or one of
// HEAD_PARTS parts of these, each of which is a group of its own and reads the keys again. Single warps take pieces of
// 16 positions in turns and do not wait for each other: each copies DEPTH pieces ahead. Blocks of positions that the
// mask closes are not read. Only as many clusters work as have enough to do. The queries are computed here; so are
// FRESH keys and values, which this kernel also writes to their places among the others. A row that is closed
// everywhere gives zeros.
// Grid: clusters in x, batch * groups in z.

typedef OwnPacks<ROWS, HEAD_SIZE> OwnQueryPacks;
#if FRESH
typedef OwnPacks<FRESH, HEAD_SIZE> OwnKeys;
typedef OwnPacks<FRESH, VALUE_SIZE> OwnValues;
#endif

// Where lies what a thread's part of queries and of new keys and values is made of. It is found ahead of the wait for the
// grid that makes them, where it does not take too many registers.
struct InputPlaces {
    query_pack_places queries[OwnQueryPacks::Place::TURNS];
#if FRESH
    key_pack_places keys[OwnKeys::Place::TURNS];
    value_pack_places values[OwnValues::Place::TURNS];
#endif

    __device__ __forceinline__ InputPlaces(int batch, int group, OPERAND_PARAMETERS const Params& p)
    {
        find<OwnQueryPacks>(queries, [&](int row, int column) {
            int head = group * SHARED + row / OWN_ROWS;
            return find_query_pack_places(batch, head, row % OWN_ROWS, column, OPERAND_ARGUMENTS p);
        });
#if FRESH
        find<OwnKeys>(keys, [&](int row, int column) {
            return find_key_pack_places(batch, group / HEAD_PARTS, row, column, OPERAND_ARGUMENTS p);
        });
        find<OwnValues>(values, [&](int row, int column) {
            return find_value_pack_places(batch, group / HEAD_PARTS, row, column, OPERAND_ARGUMENTS p);
        });
#endif
    }

private:
    template <typename Packs, typename Places, int TURNS, typename Find>
    __device__ __forceinline__ void find(Places (&places)[TURNS], Find find_places)
    {
        #pragma unroll
        for (int turn = 0; turn < TURNS; ++turn) {
            typename Packs::Place place(turn);
            places[turn] = find_places(place.row, place.column);
            if (TURNS == 1) {
                places[turn].settle_all();
            }
        }
    }
};

// Computes the queries and the new keys and values together: all loads are issued before the first is waited for.
__device__ __forceinline__ void compute_inputs(
    tile_t* queries, tile_t* fresh, const InputPlaces& places, int batch, int group, OPERAND_PARAMETERS const Params& p)
{
    OwnQueryPacks own;
    own.compute([&](float (&value)[OPERAND_PACK], int turn, int row, int column) {
        int head = group * SHARED + row / OWN_ROWS;
        query_pack(value, places.queries[turn], batch, head, row % OWN_ROWS, column, OPERAND_ARGUMENTS p);
    });
#if FRESH
    OwnKeys keys;
    OwnValues values;
    keys.compute([&](float (&value)[OPERAND_PACK], int turn, int row, int column) {
        key_pack(value, places.keys[turn], batch, group / HEAD_PARTS, row, column, OPERAND_ARGUMENTS p);
    });
    values.compute([&](float (&value)[OPERAND_PACK], int turn, int row, int column) {
        value_pack(value, places.values[turn], batch, group / HEAD_PARTS, row, column, OPERAND_ARGUMENTS p);
    });
#endif
    own.store<Q_PITCH>(queries);
#if FRESH
    keys.store<HEAD_SIZE + VALUE_SIZE>(fresh);
    values.store<HEAD_SIZE + VALUE_SIZE>(fresh + HEAD_SIZE);
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) attention_decode(
    OPERAND_PARAMETERS KEPT_T* k, KEPT_T* v, const mask_t* mask, SINK_PARAMETER const unsigned char* states,
    float* partial, OUT_T* out, EPILOGUE_PARAMETERS const Params p)
{
    extern __shared__ __align__(128) unsigned char ring[]; // stages of a piece each, DEPTH for each warp
    __shared__ Parts parts;
    __shared__ __align__(16) tile_t queries[SETS * 8 * Q_PITCH];
    int batch = int(blockIdx.z) / GROUPS, group = int(blockIdx.z) % GROUPS;
    int warp = int(threadIdx.x) / 32;
    begin_block(queries, parts, HURRIES);
    Share share(Open(states, batch, group, p));
    if (share.is_nobodys()) {
        return;
    }
    enter_group<HEAD_PARTS>(k, v, mask, batch, group, p);
    auto stage = [&](int turn) { return ring + (warp * DEPTH + turn % DEPTH) * STAGE_BYTES; };
    auto copy = [&](int turn) {
        if (share.has(turn)) {
            int position = share.piece(turn).position, count = LENGTH - position;
            const tile_t *keys = k + (long long)position * K_ROW, *values = v + (long long)position * V_ROW;
            copy_rows<HEAD_SIZE, QK_WIDTH, K_PITCH, K_ROW>(stage(turn), keys, count);
            copy_rows<VALUE_SIZE, V_WIDTH, V_PITCH, V_ROW>(stage(turn) + K_BYTES, values, count);
        }
        commit_copies();
    };
    #pragma unroll 1
    for (int turn = 0; turn < DEPTH; ++turn) {
        copy(turn);
    }
    const InputPlaces places(batch, group, OPERAND_ARGUMENTS p);
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
    __shared__ FreshRows<tile_t> fresh;
    OwnPlaces own(batch, group / HEAD_PARTS, OPERAND_ARGUMENTS p);
    compute_inputs(queries, fresh.row[0], places, batch, group, OPERAND_ARGUMENTS p);
    fresh.leave_places(own);
#else
    compute_inputs(queries, nullptr, places, batch, group, OPERAND_ARGUMENTS p);
#endif
    __syncthreads();
#if FRESH
    if (share.is_last() && group % HEAD_PARTS == 0) {
        fresh.write(k, v);
    }
    int watched = fresh.watched();
#endif
    Rows rows;
    Queries query;
    begin_rows(rows);
    load_queries(query, queries);
    for (int turn = 0; share.has(turn); ++turn) {
        Scores score;
        wait_for_copies<DEPTH - 1>();
        __syncwarp();
#if FRESH
        fresh.patch(stage(turn), piece.position, watched, [](int, int, int) {});
#endif
        multiply_keys(score, query, stage(turn));
        soften(rows, score, added, piece.position, turn == 0);
        if (share.has(turn + 1)) {
            piece = share.piece(turn + 1);
            added.load(mask, piece, p);
        }
        add_values(rows, score, stage(turn) + K_BYTES);
        __syncwarp();
        copy(turn + DEPTH);
    }
    if (share.has(0)) {
        leave_rows(rows, ring, parts, lane_result, lane_column);
    }
    finish_shares(parts, ring, share, batch, group, SINK_ARGUMENT partial, out, EPILOGUE_ARGUMENTS p);
#if FRESH
    if (share.is_last() && group % HEAD_PARTS == 0) {
        report_places(fresh.place, batch, group / HEAD_PARTS, OPERAND_ARGUMENTS p);
    }
#endif
}
