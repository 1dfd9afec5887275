// Attention of few rows over many positions: result[row] = sum over j of weight[j] * v[j], the weights being the softmax over
// j of SCALE * (q[row] . k[j]) + mask[row, j], with a running maximum as in FlashAttention (Dao et al., 2022), the positions
// shared out as in Flash-Decoding (Dao et al., 2023).
//
// A cluster of blocks, or several, computes all rows of the SHARED query heads that read one head of keys, or one of
// HEAD_PARTS parts of these, each of which is a group of its own and reads the keys again. Positions are
// taken 16 at a time by single warps, in turns, which wait for nobody: each has DEPTH pieces on their way. Blocks of
// positions that the mask closes are not read; as few clusters work as have enough to do. The queries are computed here;
// so are FRESH keys and values, which this kernel also writes to their places among the others. A row that is closed
// everywhere gives zeros.
// Grid: clusters in x, batch * groups in z.

// Lists the blocks of positions that are open, each times two, plus one where the mask changes nothing.
__device__ __forceinline__ int list_open(unsigned short* list, const unsigned char* states, int batch, int group, const Params& p)
{
    __shared__ int counts[WARPS];
    int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32, total = 0;
    for (int base = 0; base < TILES; base += THREADS) {
        int tile = base + int(threadIdx.x);
        bool any = false, all = (tile + 1) * BLOCK <= LENGTH;
#if MASK && MASK_STATES
        #pragma unroll
        for (int head = 0; head < MASK_HEADS; ++head) {
            int number = masked_as(batch) * p.state_batch + (group * SHARED + head) * p.state_head;
            int state = tile < TILES ? states[(long long)number * TILES + tile] : 0;
            any |= state != 0;
            all &= state == 2;
        }
#else
        any = tile < TILES;
        all &= !MASK;
#endif
        uint open = __ballot_sync(0xffffffffu, any);
        if (lane == 0) {
            counts[warp] = __popc(open);
        }
        __syncthreads();
        int found = total;
        #pragma unroll
        for (int other = 0; other < WARPS; ++other) {
            found += other < warp ? counts[other] : 0;
            total += counts[other];
        }
        if (any) {
            list[found + __popc(open & ((1u << lane) - 1))] = (unsigned short)(tile * 2 + all);
        }
        __syncthreads();
    }
    return total;
}

// The element, of COUNT, that a thread computes in a turn; the last one again where there are no more.
template <int COUNT>
__device__ __forceinline__ int element_of_turn(int turn)
{
    return min(turn * THREADS + int(threadIdx.x), COUNT - 1);
}
constexpr int turns_of(int count) { return (count + THREADS - 1) / THREADS; }

// Computes the queries, and what is new among keys and values, beside each other. No branch stands between the loads, so
// that all of them are on their way before the first is waited for.
__device__ __forceinline__ void compute_inputs(
    tile_t* queries, tile_t* fresh, int batch, int group, OPERAND_PARAMETERS const Params& p)
{
    constexpr int QUERIES = ROWS * HEAD_SIZE, NEW = HEAD_SIZE + VALUE_SIZE;
    constexpr int KEYS = FRESH * HEAD_SIZE, VALUES = FRESH * VALUE_SIZE;
    float query[turns_of(QUERIES)], key[turns_of(KEYS) + 1], value[turns_of(VALUES) + 1];
    #pragma unroll
    for (int turn = 0; turn < turns_of(QUERIES); ++turn) {
        int index = element_of_turn<QUERIES>(turn), row = index / HEAD_SIZE, head = group * SHARED + row / OWN_ROWS;
        query[turn] = query_value(batch, head, row % OWN_ROWS, index % HEAD_SIZE, OPERAND_ARGUMENTS p);
    }
#if FRESH
    #pragma unroll
    for (int turn = 0; turn < turns_of(KEYS); ++turn) {
        int index = element_of_turn<KEYS>(turn);
        key[turn] = key_value(batch, group / HEAD_PARTS, index / HEAD_SIZE, index % HEAD_SIZE, OPERAND_ARGUMENTS p);
    }
    #pragma unroll
    for (int turn = 0; turn < turns_of(VALUES); ++turn) {
        int index = element_of_turn<VALUES>(turn);
        value[turn] = value_value(batch, group / HEAD_PARTS, index / VALUE_SIZE, index % VALUE_SIZE, OPERAND_ARGUMENTS p);
    }
#endif
    #pragma unroll
    for (int turn = 0; turn < turns_of(QUERIES); ++turn) {
        int index = element_of_turn<QUERIES>(turn);
        queries[index / HEAD_SIZE * Q_PITCH + index % HEAD_SIZE] = tile_t(query[turn]);
    }
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
// Writes what is new among keys or values to its place in memory.
template <int SIZE, int STEP>
__device__ __forceinline__ void write_fresh(tile_t* target, const tile_t* fresh, const int (&places)[FRESH])
{
    for (int index = int(threadIdx.x); index < FRESH * SIZE; index += THREADS) {
        int row = index / SIZE, column = index % SIZE;
        if (places[row] >= 0) { // else there is no such place
            target[(long long)places[row] * STEP + column] = fresh[row * (HEAD_SIZE + VALUE_SIZE) + column];
        }
    }
}

// Puts what is new where it belongs in a piece, which may have been read before it was in memory.
template <int SIZE, int PITCH>
__device__ __forceinline__ void patch(unsigned char* tile, const tile_t* fresh, const int (&places)[FRESH], int position)
{
    bool changed = false;
    #pragma unroll
    for (int row = 0; row < FRESH; ++row) {
        int at = places[row] - position;
        if (0 <= at && at < PIECE) {
            for (int column = int(threadIdx.x) % 32 * 8; column < SIZE; column += 256) {
                *reinterpret_cast<uint4*>(tile + at * PITCH + column * 2) =
                    *reinterpret_cast<const uint4*>(fresh + row * (HEAD_SIZE + VALUE_SIZE) + column);
            }
            changed = true;
        }
    }
    if (changed) {
        __syncwarp();
    }
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 2) attention_decode(
    OPERAND_PARAMETERS KEPT_T* k, KEPT_T* v, const mask_t* mask, SINK_PARAMETER const unsigned char* states, float* partial,
    OUT_T* out, EPILOGUE_PARAMETERS const Params p)
{
    extern __shared__ __align__(128) unsigned char ring[]; // slots of a piece each, DEPTH for each warp
    __shared__ Parts parts;
    __shared__ __align__(16) tile_t queries[SETS * 8 * Q_PITCH], fresh[FRESH ? FRESH * (HEAD_SIZE + VALUE_SIZE) : 8];
    __shared__ unsigned short list[TILES];
    int batch = int(blockIdx.z) / GROUPS, group = int(blockIdx.z) % GROUPS;
    int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32, rank = int(blockIdx.x) % CLUSTER;
    if (EARLY) {
        hurry_next_grid();
    }
    announce_to_cluster();
    if (!EARLY) {
        wait_for_previous_grid();
    }
    for (int index = int(threadIdx.x); index < SETS * 8 * Q_PITCH / 2; index += THREADS) {
        reinterpret_cast<uint*>(queries)[index] = 0; // rows and columns that there are none of
    }
    int pieces = list_open(list, states, batch, group, p) * (BLOCK / PIECE);
    int clusters = pieces <= ALONE ? 1 : min(CLUSTERS, (pieces + ENOUGH - 1) / ENOUGH);
    int split = int(blockIdx.x), splits = clusters * CLUSTER;
    if (split >= splits) {
        wait_for_cluster();
        return;
    }
    int mine = max(0, (pieces - split + splits - 1) / splits); // pieces of this block
    enter_group<HEAD_PARTS>(k, v, mask, batch, group, p);
    auto position_of = [&](int turn) {
        int piece = split + (warp + turn * WARPS) * splits;
        return (list[piece / (BLOCK / PIECE)] >> 1) * BLOCK + piece % (BLOCK / PIECE) * PIECE;
    };
    auto is_masked = [&](int turn) { return !(list[(split + (warp + turn * WARPS) * splits) / (BLOCK / PIECE)] & 1); };
    auto slot = [&](int turn) { return ring + (warp * DEPTH + turn % DEPTH) * SLOT_BYTES; };
    auto copy = [&](int turn) {
        if (warp + turn * WARPS < mine) {
            int position = position_of(turn), count = LENGTH - position;
            const tile_t *keys = k + (long long)position * K_ROW, *values = v + (long long)position * V_ROW;
            copy_rows<HEAD_SIZE, QK_WIDTH, K_PITCH, K_ROW>(slot(turn), keys, count);
            copy_rows<VALUE_SIZE, V_WIDTH, V_PITCH, V_ROW>(slot(turn) + K_BYTES, values, count);
        }
        commit_copies();
    };
    #pragma unroll 1
    for (int turn = 0; turn < DEPTH; ++turn) {
        copy(turn);
    }
    Scores added = {};
    if (warp < mine) {
        load_mask(added, mask, position_of(0), is_masked(0), p);
    }
    if (EARLY) {
        wait_for_previous_grid();
    }
#if FRESH
    int key_places[FRESH], value_places[FRESH];
    #pragma unroll
    for (int row = 0; row < FRESH; ++row) {
        key_places[row] = key_place(batch, group / HEAD_PARTS, row, 0, OPERAND_ARGUMENTS p);
        value_places[row] = value_place(batch, group / HEAD_PARTS, row, 0, OPERAND_ARGUMENTS p);
    }
#endif
    compute_inputs(queries, fresh, batch, group, OPERAND_ARGUMENTS p);
    __syncthreads();
#if FRESH
    if (split == 0 && group % HEAD_PARTS == 0) {
        write_fresh<HEAD_SIZE, K_ROW>(k, fresh, key_places);
        write_fresh<VALUE_SIZE, V_ROW>(v, fresh + HEAD_SIZE, value_places);
    }
#endif
    Rows rows = {};
    Queries query;
    #pragma unroll
    for (int set = 0; set < SETS; ++set) {
        rows.top[set][0] = rows.top[set][1] = CLOSED;
        #pragma unroll
        for (int d = 0; d < QK_WIDTH / 8; ++d) {
            const tile_t* source = queries + (set * 8 + lane / 4) * Q_PITCH + d * 8 + lane % 4 * 2;
            query[set][d / 2][d % 2] = *reinterpret_cast<const uint*>(source);
        }
    }
    for (int turn = 0; warp + turn * WARPS < mine; ++turn) {
        int position = position_of(turn);
        Scores score;
        wait_for_copies<DEPTH - 1>();
        __syncwarp();
#if FRESH
        patch<HEAD_SIZE, K_PITCH>(slot(turn), fresh, key_places, position);
        patch<VALUE_SIZE, V_PITCH>(slot(turn) + K_BYTES, fresh + HEAD_SIZE, value_places, position);
#endif
        multiply_keys(score, query, slot(turn));
        soften(rows, score, added, position);
        if (warp + (turn + 1) * WARPS < mine) {
            load_mask(added, mask, position_of(turn + 1), is_masked(turn + 1), p);
        }
        add_values(rows, score, slot(turn) + K_BYTES);
        __syncwarp();
        copy(turn + DEPTH);
    }
    if (warp < mine) {
        leave_rows(rows, ring, parts);
    }
    __syncthreads();
    wait_for_cluster();
    hand_over(parts, ring, rank, min(mine, WARPS));
    arrive_at_cluster();
    wait_for_cluster();
    finish_slice(parts, rank, clusters, batch, group, SINK_ARGUMENT partial, out, EPILOGUE_ARGUMENTS p);
#if FRESH
    if (split == 0 && group % HEAD_PARTS == 0 && threadIdx.x == 0) {
        for (int row = 0; row < FRESH; ++row) {
            report_key_place(batch, group / HEAD_PARTS, row, 0, OPERAND_ARGUMENTS p);
            report_value_place(batch, group / HEAD_PARTS, row, 0, OPERAND_ARGUMENTS p);
        }
    }
#endif
}
