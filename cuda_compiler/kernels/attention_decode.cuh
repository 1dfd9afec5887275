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

// Computes the queries and the new keys and values together: all loads are issued before the first is waited for.
__device__ __forceinline__ void compute_inputs(
    tile_t* queries, tile_t* fresh, int batch, int group, OPERAND_PARAMETERS const Params& p)
{
    constexpr int NEW = HEAD_SIZE + VALUE_SIZE, KEYS = FRESH * HEAD_SIZE, VALUES = FRESH * VALUE_SIZE;
    float key[turns_of(KEYS) + 1], value[turns_of(VALUES) + 1];
    OwnQueries own;
    compute_queries(own, batch, group, OPERAND_ARGUMENTS p);
#if FRESH
    #pragma unroll
    for (int turn = 0; turn < turns_of(KEYS); ++turn) {
        int index = element_of_turn<KEYS>(turn);
        key[turn] = key_value(batch, group / HEAD_PARTS, index / HEAD_SIZE, index % HEAD_SIZE, OPERAND_ARGUMENTS p);
    }
    #pragma unroll
    for (int turn = 0; turn < turns_of(VALUES); ++turn) {
        int index = element_of_turn<VALUES>(turn);
        value[turn] =
            value_value(batch, group / HEAD_PARTS, index / VALUE_SIZE, index % VALUE_SIZE, OPERAND_ARGUMENTS p);
    }
#endif
    leave_queries(queries, own);
#if FRESH
    #pragma unroll
    for (int turn = 0; turn < turns_of(KEYS); ++turn) {
        int index = element_of_turn<KEYS>(turn);
        fresh[index / HEAD_SIZE * NEW + index % HEAD_SIZE] = tile_t(key[turn]);
    }
    #pragma unroll
    for (int turn = 0; turn < turns_of(VALUES); ++turn) {
        int index = element_of_turn<VALUES>(turn);
        fresh[index / VALUE_SIZE * NEW + HEAD_SIZE + index % VALUE_SIZE] = tile_t(value[turn]);
    }
#endif
}

#if FRESH
constexpr int NEW_CHUNKS = (HEAD_SIZE + VALUE_SIZE) / 8; // of a row, in which values follow the keys

// Writes new keys and values to their places in memory, the last warps first, which have the fewest pieces.
__device__ __forceinline__ void write_fresh(
    tile_t* k, tile_t* v, const tile_t* fresh, const int (&key_places)[FRESH], const int (&value_places)[FRESH])
{
    #pragma unroll
    for (int first = 0; first < FRESH * NEW_CHUNKS; first += THREADS) {
        int index = first + THREADS - 1 - int(threadIdx.x), row = index / NEW_CHUNKS, chunk = index % NEW_CHUNKS;
        if (index < FRESH * NEW_CHUNKS) {
            int behind = chunk - HEAD_SIZE / 8, place = behind < 0 ? key_places[row] : value_places[row];
            tile_t* target = behind < 0 ? k + (long long)place * K_ROW + chunk * 8
                                        : v + (long long)place * V_ROW + behind * 8;
            if (place >= 0) { // else there is no such place
                *reinterpret_cast<uint4*>(target) = *reinterpret_cast<const uint4*>(fresh + index * 8);
            }
        }
    }
}

// Replaces new rows in a piece, which may have been copied before these were in memory.
__device__ __forceinline__ void patch(
    unsigned char* stage, const tile_t* fresh, const int (&key_places)[FRESH], const int (&value_places)[FRESH],
    int position)
{
    int lane = int(threadIdx.x) % 32;
    bool changed = false;
    #pragma unroll
    for (int row = 0; row < FRESH; ++row) {
        int key = key_places[row] - position, value = value_places[row] - position;
        if (uint(key) >= PIECE && uint(value) >= PIECE) {
            continue;
        }
        #pragma unroll
        for (int first = 0; first < NEW_CHUNKS; first += 32) {
            int chunk = first + lane, behind = chunk - HEAD_SIZE / 8;
            int at = behind < 0 ? key : value, byte = behind < 0 ? key * K_PITCH + chunk * 16
                                                                 : K_BYTES + value * V_PITCH + behind * 16;
            if (uint(at) < PIECE && chunk < NEW_CHUNKS) {
                *reinterpret_cast<uint4*>(stage + byte) =
                    *reinterpret_cast<const uint4*>(fresh + (row * NEW_CHUNKS + chunk) * 8);
            }
        }
        changed = true;
    }
    if (changed) {
        __syncwarp();
    }
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 2) attention_decode(
    OPERAND_PARAMETERS KEPT_T* k, KEPT_T* v, const mask_t* mask, SINK_PARAMETER const unsigned char* states,
    float* partial, OUT_T* out, EPILOGUE_PARAMETERS const Params p)
{
    extern __shared__ __align__(128) unsigned char ring[]; // stages of a piece each, DEPTH for each warp
    __shared__ Parts parts;
    __shared__ __align__(16) tile_t queries[SETS * 8 * Q_PITCH], fresh[FRESH ? FRESH * (HEAD_SIZE + VALUE_SIZE) : 8];
    int batch = int(blockIdx.z) / GROUPS, group = int(blockIdx.z) % GROUPS;
    int warp = int(threadIdx.x) / 32;
    begin_block(queries, parts, EARLY);
    Share share(list_open(states, batch, group, p));
    if (share.is_nobodys()) {
        return;
    }
    enter_group<HEAD_PARTS>(k, v, mask, batch, group, p);
    auto stage = [&](int turn) { return ring + (warp * DEPTH + turn % DEPTH) * STAGE_BYTES; };
    auto copy = [&](int turn) {
        if (share.has(turn)) {
            int position = share.position(turn), count = LENGTH - position;
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
    Scores added = {};
    if (share.has(0)) {
        load_mask(added, mask, share.position(0), share.is_masked(0), p);
    }
    if (EARLY) {
        wait_for_previous_grid();
    }
#if FRESH
    __shared__ int key_places[FRESH], value_places[FRESH];
    OwnPlaces places(batch, group / HEAD_PARTS, OPERAND_ARGUMENTS p);
#endif
    compute_inputs(queries, fresh, batch, group, OPERAND_ARGUMENTS p);
#if FRESH
    places.leave(key_places, value_places);
#endif
    __syncthreads();
#if FRESH
    if (share.is_last() && group % HEAD_PARTS == 0) {
        write_fresh(k, v, fresh, key_places, value_places);
    }
#endif
    Rows rows;
    Queries query;
    begin_rows(rows);
    load_queries(query, queries);
    for (int turn = 0; share.has(turn); ++turn) {
        int position = share.position(turn);
        Scores score;
        wait_for_copies<DEPTH - 1>();
        __syncwarp();
#if FRESH
        patch(stage(turn), fresh, key_places, value_places, position);
#endif
        multiply_keys(score, query, stage(turn));
        soften(rows, score, added, position, turn == 0);
        if (share.has(turn + 1)) {
            load_mask(added, mask, share.position(turn + 1), share.is_masked(turn + 1), p);
        }
        add_values(rows, score, stage(turn) + K_BYTES);
        __syncwarp();
        copy(turn + DEPTH);
    }
    if (share.has(0)) {
        leave_rows(rows, ring, parts, 1.0f, lane_column);
    }
    finish_shares(parts, ring, share, batch, group, SINK_ARGUMENT partial, out, EPILOGUE_ARGUMENTS p);
#if FRESH
    if (share.is_last() && group % HEAD_PARTS == 0 && threadIdx.x == 0) {
        report_places(key_places, value_places, batch, group / HEAD_PARTS, OPERAND_ARGUMENTS p);
    }
#endif
}
