// Attention: result[row] = sum over j of weight[j] * v[j], the weights being the softmax over j of
// SCALE * (q[row] . k[j]) + mask[row, j]. The scores are never stored: each block of positions updates a running
// maximum, sum and result (Milakov and Gimelshein, 2018; Dao et al., FlashAttention, 2022).
//
// A block of threads computes TILE_M rows of the SHARED query heads that read one head of keys, counted head by head,
// so that keys and values are read once for all of them. Blocks of positions that the mask closes are not read. The
// open ones may be shared by up to SPLITS blocks of threads, in turns, unless they are ALONE_TILES or fewer; the last
// block to finish adds up what they have. A row that is closed everywhere gives zeros. How keys and values become tiles
// of numbers is a matter of attention_plain_tile.cuh, or of attention_coded_tile.cuh.
// Grid: tiles of rows (the last first) in x, splits in y, batch * heads of keys in z.
extern "C" __global__ void __launch_bounds__(THREADS) attention(
    const tile_t* q, const stored_t* k, const stored_t* v, SCALE_PARAMETERS const mask_t* mask, SINK_PARAMETER
    const unsigned char* states, float* partial, PAGE_PARAMETERS OUT_T* out, EPILOGUE_PARAMETERS const Params p)
{
    extern __shared__ __align__(128) unsigned char shared[];
    __shared__ unsigned short list[TILES];
    int row = (int(gridDim.x) - 1 - int(blockIdx.x)) * TILE_M, batch = int(blockIdx.z) / GROUPS;
    int group = int(blockIdx.z) % GROUPS, warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
    int warp_row = warp / WARPS_L * 16, first = warp % WARPS_L * STEP, split = int(blockIdx.y);
    if (!STATES_READY) {
        wait_for_previous_grid();
    }
    int open = list_tiles(list, row, states, batch, group, p);
    int splits = open <= ALONE_TILES ? 1 : min(SPLITS, (open + SPLIT_TILES - 1) / SPLIT_TILES);
    int count = (open - split + splits - 1) / splits;
    if (split >= splits) {
        return;
    }
    if (STATES_READY) {
        wait_for_previous_grid();
    }
    q += (long long)batch * p.q_batch + (long long)group * SHARED * p.q_head;
    enter_group(k, v, mask, batch, group, p);
    auto query_row = [&](int i) {
        int r = min(row + i, p.rows * SHARED - 1);
        return (long long)(r / p.rows) * p.q_head + (long long)(r % p.rows) * p.q_row;
    };
    auto copy = [&](int piece) {
        if (piece < 2 * count) {
            int position = (list[split + piece / 2 * splits] >> 1) * BLOCK;
            unsigned char* stage = shared + piece % STAGES * STAGE_BYTES;
            Place at = place_of(batch, position, p.k_row, p.v_row, PAGE_ARGUMENTS p);
            if (piece % 2 == 0) {
                load_tile<HEAD_SIZE, QK_WIDTH, K_CHUNK>(stage, k + at.key, p.k_row, p.k_step, LENGTH - position);
            } else {
                load_tile<VALUE_SIZE, V_WIDTH, V_CHUNK>(stage, v + at.value, p.v_row, p.v_step, LENGTH - position);
            }
        }
        commit_copies();
    };
    constexpr bool SMALL = Q_BYTES <= STAGE_BYTES; // so that the first values fit beside the queries
    static_assert(Q_BYTES <= 2 * STAGE_BYTES, "the first keys fit beside the queries");
    unsigned char* queries = shared + STAGES * STAGE_BYTES - Q_BYTES;
    copy_rows<TILE_M, HEAD_SIZE, QK_WIDTH, Q_CHUNK>(queries, q, p.q_step, p.rows * SHARED - row, query_row);
    commit_copies();
    copy(0);
    if (SMALL) {
        copy(1);
    }
    wait_for_copies<SMALL ? 2 : 1>();
    __syncthreads();
    uint query[QK_WIDTH / 16][4];
    #pragma unroll
    for (int d = 0; d < QK_WIDTH / 16; ++d) {
        load_matrices(
            query[d], shared_address(queries) + place<QK_WIDTH>(warp_row + lane % 16, d * 16 + lane / 16 * 8));
    }
    const tile_t *upper_row = q + query_row(warp_row + lane / 4), *lower_row = q + query_row(warp_row + lane / 4 + 8);
    if (!SMALL) {
        __syncthreads();
        copy(1);
    }
    Rows rows = {{}, {CLOSED, CLOSED}, {}};
    for (int turn = 0; turn < count; ++turn) {
        float score[STEP / 8][4];
        wait_for_copies<1>();
        __syncthreads();
        copy(2 * turn + 2);
        const unsigned char* keys = shared + 2 * turn % STAGES * STAGE_BYTES;
        multiply_keys(score, query, upper_row, lower_row, keys, first, p);
        int listed = list[split + turn * splits];
        Scales scales(SCALE_ARGUMENTS batch, group, (listed >> 1) * BLOCK, PAGE_ARGUMENTS p);
        scales.multiply_scores(score, first);
        mask_scores(score, mask, row + warp_row, (listed >> 1) * BLOCK + first, listed & 1, p);
        soften(rows, score);
        scales.multiply_weights(score, first);
        wait_for_copies<1>();
        __syncthreads();
        copy(2 * turn + 3);
        multiply_values(rows, score, shared + (2 * turn + 1) % STAGES * STAGE_BYTES, first);
    }
    wait_for_copies<0>();
    add_up_rows(rows.sum);
    take_unit(rows);
    finish_rows(
        rows, reinterpret_cast<float*>(shared), row, batch, group, splits, SINK_ARGUMENT partial, out,
        EPILOGUE_ARGUMENTS p);
}
