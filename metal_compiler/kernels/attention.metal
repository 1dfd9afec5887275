// Attention: out[batch, row, col] = epilogue(sum over j of weight[j] * v[j, col]), the weights being the softmax over j
// of scale * (q[row] . k[j]) + mask[row, j]. The scores are never stored: each block of positions updates a running
// maximum, sum and result (Milakov and Gimelshein, 2018; Dao et al., FlashAttention, 2022).
//
// A threadgroup computes TILE_M rows of the `heads` query heads that share a key head, counted head by head, so that
// keys and values are read once for all of them. A block of positions that the mask closes for all those rows is not
// read. A row that is closed everywhere gives zeros. Keys and values are staged in threadgroup memory, or, where they
// are DIRECT, read as matrices where they lie: a few rows then take larger blocks and more simdgroups. With a PAGE,
// they lie in pages of so many positions, which the generated page_of looks up; a block of positions lies in one of
// them. With CODES, they are codes of a byte, which the generated number_of reads, and whose scales lie alike: the
// scale of a key's row multiplies its scores, that of a value's row its weights, by VALUE_UNIT more, so that half
// precision holds what it would of the values.
// Grid: tiles of rows, batch * key heads, parts of the positions. Block: 32 * SIMDGROUPS.

// Kinds of MASK.
#define MASK_NONE 0
#define MASK_BOOLEAN 1
#define MASK_ADDED 2

// What is added to a score to close its position: minus infinity, or for want of it a number so low that its weight
// underflows to exactly zero beside any position that is open.
#if MASK == MASK_ADDED
constant constexpr float CLOSED = is_same_v<mask_t, half> ? -65504.0f : -1e37f;
#endif

constant constexpr int K_COLUMNS = (HEAD_SIZE + 7) / 8 * 8;
constant constexpr int K_PITCH = K_COLUMNS + PAD, V_PITCH = TILE_N + PAD;
constant constexpr int SCORE_PITCH = BLOCK + 4, WEIGHT_PITCH = BLOCK + PAD;
constant constexpr int STRIPES = (BLOCK + 31) / 32; // positions of a block that a lane looks after
constant constexpr int OWN_ROWS = (TILE_M + SIMDGROUPS - 1) / SIMDGROUPS; // whose softmax a simdgroup computes

#if DIRECT
constant constexpr int KV_BYTES = 0;
#define K_MATRIX(j, d) block_keys + (j) * p.k_row + (d), p.k_row
#define V_MATRIX(j, column) block_values + (j) * p.v_row + (column), p.v_row
#else
constant constexpr int KV_BYTES = larger(staged_bytes(BLOCK, K_COLUMNS), staged_bytes(BLOCK, TILE_N));
#define K_MATRIX(j, d) kv_tile + (j) * K_PITCH + (d), K_PITCH
#define V_MATRIX(j, column) kv_tile + (j) * V_PITCH + (column), V_PITCH
#endif
constant constexpr int Q_BYTES = staged_bytes(TILE_M, K_COLUMNS);
constant constexpr int TILE_BYTES = larger(KV_BYTES + Q_BYTES, TILE_M * TILE_N * 4);
constant constexpr int SCORE_BYTES = TILE_M * SCORE_PITCH * 4;
constant constexpr int WEIGHT_BYTES = staged_bytes(TILE_M, BLOCK);
constant constexpr int ROW_BYTES = TILE_M * 4;

// Stages the rows of the query heads, one after another.
METAL_FUNC void stage_queries(
    threadgroup tile_t* tile, device const q_t* source, int first, int count, int thread_index, constant Params& p)
{
    for (int i = thread_index; i < TILE_M * K_COLUMNS; i += THREADS) {
        int row = i / K_COLUMNS;
        int column = i % K_COLUMNS;
        int head = (first + row) / p.rows;
        bool inside = row < count && column < HEAD_SIZE;
        int address = head * p.q_head + (first + row - head * p.rows) * p.q_row + column * p.q_step;
        tile[row * K_PITCH + column] = inside ? tile_t(source[address]) : tile_t(0);
    }
}

#ifdef CODES
// Stages rows of codes as numbers, in chunks of CHUNK neighbours; elements beyond `rows` or `columns` become zero.
template <int ROWS, int COLUMNS, int CHUNK, typename T>
METAL_FUNC void stage_rows(
    threadgroup tile_t* tile, device const T* source, int rows, int columns, int row_stride, int column_stride,
    uint thread_index)
{
    constexpr uint chunks = COLUMNS / CHUNK;
    for (uint i = thread_index; i < ROWS * chunks; i += THREADS) {
        int row = int(i / chunks);
        int column = int(i % chunks * CHUNK);
        bool inside = (row < rows) & (column < columns);
        device const T* codes = source + (inside ? row * row_stride + column * column_stride : 0);
        threadgroup tile_t* target = tile + row * (COLUMNS + PAD) + column;
        for (int u = 0; u < CHUNK; ++u) {
            target[u] = inside ? tile_t(number_of(int(codes[u]))) : tile_t(0);
        }
    }
}
#else
#define VALUE_UNIT 1.0f
#define stage_rows stage
#endif

kernel void attention(
    device const q_t* q [[buffer(0)]],
    device const k_t* k [[buffer(1)]],
    device const v_t* v [[buffer(2)]],
#if MASK
    device const mask_t* mask [[buffer(3)]],
#endif
#ifdef SINK_STEP
    device const sink_t* sinks [[buffer(SINKS_AT)]],
#endif
#ifdef CODES
    device const k_scale_t* k_scales [[buffer(K_SCALES_AT)]],
    device const v_scale_t* v_scales [[buffer(V_SCALES_AT)]],
#endif
#if PARTIAL
    device float* part_sums [[buffer(OUT_BUFFER)]],
    device float* part_rows [[buffer(PART_ROWS_BUFFER)]],
#else
    device out_t* out [[buffer(OUT_BUFFER)]],
    EPILOGUE_BUFFERS
#endif
    PROLOGUE_BUFFERS
    constant Params& p [[buffer(PARAMS_BUFFER)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint lane_index [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]])
{
    threadgroup uint4 tiles[TILE_BYTES / 16];
    threadgroup uint4 score_memory[SCORE_BYTES / 16];
    threadgroup uint4 weight_memory[WEIGHT_BYTES / 16];
    threadgroup float kept_tile[8 * ROW_BYTES / 4]; // for every eight rows a diagonal matrix
    threadgroup float row_closed[ROW_BYTES / 4];
    threadgroup int row_mask[ROW_BYTES / 4];
    threadgroup float row_sum[ROW_BYTES / 4];
    threadgroup uint4 open_memory[SIMDGROUPS / 4];
#if !DIRECT
    threadgroup tile_t* kv_tile = (threadgroup tile_t*)tiles;
#endif
    threadgroup tile_t* q_tile = (threadgroup tile_t*)(tiles + KV_BYTES / 16);
    threadgroup float* sums_tile = (threadgroup float*)tiles; // once queries, keys and values are done with
    threadgroup float* scores = (threadgroup float*)score_memory;
    threadgroup tile_t* weights = (threadgroup tile_t*)weight_memory;
    threadgroup int* open = (threadgroup int*)open_memory;

    int lane = int(lane_index);
    int batch = int(group.y) / p.groups;
    int shared_head = int(group.y) % p.groups;
    int first_head = shared_head * p.heads;
    int row0 = int(group.x) * TILE_M;
    int count = min(TILE_M, p.heads * p.rows - row0);
#if CAUSAL
    int last_row = row0 + count - 1;
    int reach = row0 / p.rows == last_row / p.rows ? min(p.length, last_row % p.rows + 1) : min(p.length, p.rows);
#else
    int reach = p.length;
#endif
    int begin = int(group.z) * p.part;
    int end = min(begin + p.part, reach);
    device const k_t* keys = k + batch * p.k_batch + shared_head * p.k_head;
    device const v_t* values = v + batch * p.v_batch + shared_head * p.v_head;
#ifdef CODES
    device const k_scale_t* key_scales = k_scales + batch * K_SCALE_BATCH + shared_head * K_SCALE_HEAD;
    device const v_scale_t* value_scales = v_scales + batch * V_SCALE_BATCH + shared_head * V_SCALE_HEAD;
#endif

    stage_queries(q_tile, q + batch * p.q_batch + first_head * p.q_head, row0, count, int(thread_index), p);
    for (int i = int(thread_index); i < TILE_M * 8; i += THREADS) {
        kept_tile[i] = 0.0f;
    }
#if MASK
    if (int(thread_index) < TILE_M) {
        int row = row0 + min(int(thread_index), count - 1);
#ifdef MASK_PERIOD
        int masked_as = batch % MASK_PERIOD; // the masks of the first ones are those of all, again and again
#else
        int masked_as = batch;
#endif
        row_mask[thread_index] =
            masked_as * p.mask_batch + (first_head + row / p.rows) * p.mask_head + row % p.rows * p.mask_row;
    }
#endif
    threadgroup_barrier(mem_flags::mem_threadgroup);
#if MASK == MASK_ADDED
    // Numbers that are low, but not minus infinity, close positions only in a row that has others open; else all have
    // the same weight.
    for (int r = int(simdgroup); r < TILE_M; r += SIMDGROUPS) {
        int found = 0;
        for (int start = 0; start < p.length && found == 0; start += 32) {
            int looked_at = min(start + lane, p.length - 1);
            found = simd_max(int(mask[row_mask[r] + looked_at * MASK_STEP] > CLOSED / 2));
        }
        if (lane == 0) {
            row_closed[r] = found != 0 ? CLOSED : -INFINITY;
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
#endif

    float highest[OWN_ROWS];
    float total[OWN_ROWS];
    for (int i = 0; i < OWN_ROWS; ++i) {
        highest[i] = -INFINITY;
        total[i] = 0.0f;
    }
    simdgroup_float8x8 sums[MATRICES_M][MATRICES_N];
    for (int i = 0; i < MATRICES_M; ++i) {
        for (int j = 0; j < MATRICES_N; ++j) {
            sums[i][j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
        }
    }

    for (int span = begin; span < end; span += SIMDGROUPS * BLOCK) {
#if MASK
        // Each simdgroup looks at one block.
        int mask_rows = p.mask_head == 0 ? min(count, p.rows) : count;
        int is_open = 0;
        for (int r = 0; r < mask_rows; ++r) {
            for (int s = 0; s < STRIPES; ++s) {
                int in_block = s * 32 + lane;
                int looked_at = span + int(simdgroup) * BLOCK + in_block;
                mask_t value = mask[row_mask[r] + min(looked_at, end - 1) * MASK_STEP];
                int inside = int(in_block < BLOCK && looked_at < end);
#if MASK == MASK_BOOLEAN
                is_open |= inside & int(value);
#else
                is_open |= inside & int(!(float(value) <= row_closed[r]));
#endif
            }
        }
        int any_open = simd_max(is_open);
        if (lane == 0) {
            open[simdgroup] = any_open;
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
#endif
        for (int block = span; block < min(end, span + SIMDGROUPS * BLOCK); block += BLOCK) {
#if MASK
            if (open[(block - span) / BLOCK] != 0)
#endif
            {
#ifdef PAGE
                int page = int(page_of(0, 0, batch, block / PAGE, PAGE_ARGUMENTS p));
                device const k_t* block_keys = keys + page * K_PAGE + block % PAGE * p.k_row;
                device const v_t* block_values = values + page * V_PAGE + block % PAGE * p.v_row;
#else
                device const k_t* block_keys = keys + block * p.k_row;
                device const v_t* block_values = values + block * p.v_row;
#endif
#if defined(CODES) && defined(PAGE)
                device const k_scale_t* block_key_scales =
                    key_scales + page * K_SCALE_PAGE + block % PAGE * K_SCALE_ROW;
                device const v_scale_t* block_value_scales =
                    value_scales + page * V_SCALE_PAGE + block % PAGE * V_SCALE_ROW;
#elif defined(CODES)
                device const k_scale_t* block_key_scales = key_scales + block * K_SCALE_ROW;
                device const v_scale_t* block_value_scales = value_scales + block * V_SCALE_ROW;
#endif
#if !DIRECT
                stage_rows<BLOCK, K_COLUMNS, K_CHUNK>(
                    kv_tile, block_keys, end - block, HEAD_SIZE, p.k_row, p.k_step, thread_index);
                threadgroup_barrier(mem_flags::mem_threadgroup);
#endif
                int positions = min(BLOCK, end - block);
                for (int j = int(simdgroup) * 8; j < positions; j += SIMDGROUPS * 8) {
                    simdgroup_float8x8 products[MATRICES_M];
                    for (int i = 0; i < MATRICES_M; ++i) {
                        products[i] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
                    }
                    for (int d = 0; d < K_COLUMNS; d += 8) {
                        simdgroup_matrix<tile_t, 8, 8> k_matrix;
                        simdgroup_load(k_matrix, K_MATRIX(j, d), ulong2(0, 0), true);
                        for (int i = 0; i < MATRICES_M; ++i) {
                            simdgroup_matrix<tile_t, 8, 8> q_matrix;
                            simdgroup_load(q_matrix, q_tile + i * 8 * K_PITCH + d, K_PITCH);
                            simdgroup_multiply_accumulate(products[i], q_matrix, k_matrix, products[i]);
                        }
                    }
                    for (int i = 0; i < MATRICES_M; ++i) {
                        simdgroup_store(products[i], scores + i * 8 * SCORE_PITCH + j, SCORE_PITCH);
                    }
                }
                threadgroup_barrier(mem_flags::mem_threadgroup);

#if !DIRECT
                stage_rows<BLOCK, TILE_N, V_CHUNK>(
                    kv_tile, block_values, end - block, VALUE_SIZE, p.v_row, p.v_step, thread_index);
#endif
                for (int i = 0; i < OWN_ROWS; ++i) {
                    int r = i * SIMDGROUPS + int(simdgroup);
                    if (r < TILE_M) {
                        float own_scores[STRIPES];
                        float own_highest = -INFINITY;
                        for (int s = 0; s < STRIPES; ++s) {
                            int in_block = s * 32 + lane;
                            int position = block + in_block;
#if CAUSAL
                            bool inside = in_block < positions && position <= (row0 + r) % p.rows;
#else
                            bool inside = in_block < positions;
#endif
                            float score = -INFINITY;
                            if (inside) {
                                score = scores[r * SCORE_PITCH + in_block] * SCALE;
#ifdef CODES
                                score *= float(block_key_scales[in_block * K_SCALE_ROW]);
#endif
#ifdef SOFT_CAP
                                score = precise::tanh(score / SOFT_CAP) * SOFT_CAP;
#endif
#if MASK == MASK_BOOLEAN
                                score = mask[row_mask[r] + position * MASK_STEP] ? score : -INFINITY;
#elif MASK == MASK_ADDED
                                score += float(mask[row_mask[r] + position * MASK_STEP]);
#endif
                            }
                            own_scores[s] = score;
                            own_highest = score > own_highest ? score : own_highest;
                        }
                        float before = highest[i];
                        float block_highest = simd_max(own_highest);
                        float now = block_highest > before ? block_highest : before;
                        float reference = now == -INFINITY ? 0.0f : now;
                        float kept = precise::exp(before - reference);
                        float own_total = 0.0f;
                        for (int s = 0; s < STRIPES; ++s) {
                            float weight = precise::exp(own_scores[s] - reference);
#ifdef CODES
                            // Where this is another position its weight is zero.
                            int scaled_at = min(s * 32 + lane, positions - 1);
                            float factor = float(block_value_scales[scaled_at * V_SCALE_ROW]) * VALUE_UNIT;
                            own_total += factor == 0.0f ? weight : float(tile_t(weight * factor)) / factor;
                            weight *= factor;
#else
                            own_total += float(tile_t(weight));
#endif
                            if (s * 32 + lane < BLOCK) { // NaN stays in the row's sum, and so in its own row
                                weight = weight == weight ? weight : 0.0f;
                                weights[r * WEIGHT_PITCH + s * 32 + lane] = tile_t(weight);
                            }
                        }
                        float block_total = simd_sum(own_total);
                        highest[i] = now;
                        total[i] = total[i] * kept + block_total;
                        if (lane == 0) {
                            kept_tile[r / 8 * 64 + r % 8 * 9] = kept;
                        }
                    }
                }
                threadgroup_barrier(mem_flags::mem_threadgroup);

                for (int i = 0; i < MATRICES_M; ++i) {
                    simdgroup_float8x8 kept_matrix;
                    simdgroup_load(kept_matrix, kept_tile + i * 64, 8);
                    for (int j = 0; j < MATRICES_N; ++j) {
                        simdgroup_multiply(sums[i][j], kept_matrix, sums[i][j]);
                    }
                }
                for (int position = 0; position < positions; position += 8) {
                    simdgroup_matrix<tile_t, 8, 8> weight_matrices[MATRICES_M];
                    for (int i = 0; i < MATRICES_M; ++i) {
                        simdgroup_load(weight_matrices[i], weights + i * 8 * WEIGHT_PITCH + position, WEIGHT_PITCH);
                    }
                    for (int j = 0; j < MATRICES_N; ++j) {
                        simdgroup_matrix<tile_t, 8, 8> v_matrix;
                        simdgroup_load(v_matrix, V_MATRIX(position, simdgroup * SIMDGROUP_COLUMNS + j * 8));
                        for (int i = 0; i < MATRICES_M; ++i) {
                            simdgroup_multiply_accumulate(sums[i][j], weight_matrices[i], v_matrix, sums[i][j]);
                        }
                    }
                }
                threadgroup_barrier(mem_flags::mem_threadgroup);
            }
        }
#if MASK
        threadgroup_barrier(mem_flags::mem_threadgroup);
#endif
    }

    for (int i = 0; i < MATRICES_M; ++i) {
        for (int j = 0; j < MATRICES_N; ++j) {
            simdgroup_store(sums[i][j], sums_tile + i * 8 * TILE_N + simdgroup * SIMDGROUP_COLUMNS + j * 8, TILE_N);
        }
    }
#if !PARTIAL
    for (int i = 0; i < OWN_ROWS; ++i) {
        int r = i * SIMDGROUPS + int(simdgroup);
        if (lane == 0 && r < TILE_M) {
#ifdef SINK_STEP // takes its share of the weights, and brings no value
            int sink_head = first_head + min(row0 + r, p.heads * p.rows - 1) / p.rows;
            float share = precise::exp(min(float(sinks[sink_head * SINK_STEP]) - highest[i], 80.0f)); // finite
            row_sum[r] = total[i] == 0.0f ? 0.0f : total[i] + share;
#else
            row_sum[r] = total[i];
#endif
        }
    }
#endif
    threadgroup_barrier(mem_flags::mem_threadgroup);

    int own_row0 = int(group.y) * p.heads * p.rows + row0;
#if PARTIAL
    int part_row0 = int(group.z) * p.all_rows + own_row0;
    for (int i = int(thread_index); i < TILE_M * TILE_N; i += THREADS) {
        int r = i / TILE_N;
        int col = i % TILE_N;
        if (r < count && col < VALUE_SIZE) {
            part_sums[(part_row0 + r) * VALUE_SIZE + col] = sums_tile[i] / VALUE_UNIT;
        }
    }
    for (int i = 0; i < OWN_ROWS; ++i) {
        int r = i * SIMDGROUPS + int(simdgroup);
        if (lane == 0 && r < count) {
            part_rows[2 * (part_row0 + r)] = highest[i];
            part_rows[2 * (part_row0 + r) + 1] = total[i];
        }
    }
#else
    for (int i = int(thread_index); i < TILE_M * TILE_N / GROUP; i += THREADS) {
        int r = i / (TILE_N / GROUP);
        int col = i % (TILE_N / GROUP) * GROUP;
        if (r < count && col < VALUE_SIZE) {
            int row = own_row0 + r;
            float factor = row_sum[r] == 0.0f ? 0.0f : 1.0f / (row_sum[r] * VALUE_UNIT);
            float results[GROUP];
            for (int c = 0; c < GROUP; ++c) {
                results[c] = sums_tile[i * GROUP + c] * factor;
            }
            store_group(results, VALUE_SIZE - col, row / p.rows, row % p.rows, col, out, EPILOGUE_ARGUMENTS p);
        }
    }
#endif
}
