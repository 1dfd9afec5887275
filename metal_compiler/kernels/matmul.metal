// Tiled matrix product: out[batch, row, col] = epilogue(sum over k of a[batch, row, k] * b[batch, k, col]).
// With CODES b holds codes of a byte, of which the generated number_of makes numbers where they are staged; with UNIT
// codes as grouped_codes.metal describes.
// Grid: tiles of rows, tiles of columns, batch. Block: 128.

// A staged operand has rows along the dimension that is not contiguous in memory: of A either [row][k] or [k][row], of
// B either [k][col] or [col][k]. What does not lie as a matrix wants it is transposed on its way into the matrix.
#if A_ALONG_K
constant constexpr int A_ROWS = TILE_M, A_COLUMNS = TILE_K;
#else
constant constexpr int A_ROWS = TILE_K, A_COLUMNS = TILE_M;
#endif
#if B_ALONG_K
constant constexpr int B_ROWS = TILE_N, B_COLUMNS = TILE_K;
#else
constant constexpr int B_ROWS = TILE_K, B_COLUMNS = TILE_N;
#endif
constant constexpr int A_PITCH = A_COLUMNS + PAD, B_PITCH = B_COLUMNS + PAD;
constant constexpr int A_BYTES = staged_bytes(A_ROWS, A_COLUMNS), B_BYTES = staged_bytes(B_ROWS, B_COLUMNS);
constant constexpr int MEMORY_BYTES = larger(A_BYTES + B_BYTES, TILE_M * TILE_N * 4);

#ifdef CODES
// As `stage`, for codes: the number that one stands for depends on the column of the result that it counts for.
METAL_FUNC void stage_codes(
    threadgroup tile_t* tile, device const b_t* source, int columns, int depth, int column_stride, int k_stride,
    int first_column, uint thread_index, CODE_PARAMETERS constant Params& p)
{
    constexpr uint chunks = B_COLUMNS / B_CHUNK;
    for (uint i = thread_index; i < B_ROWS * chunks; i += THREADS) {
        int line = int(i / chunks);
        int place = int(i % chunks * B_CHUNK);
        int column = B_ALONG_K ? line : place;
        int k = B_ALONG_K ? place : line;
        bool inside = (column < columns) & (k < depth);
        device const b_t* codes = source + (inside ? column * column_stride + k * k_stride : 0);
        threadgroup tile_t* target = tile + line * B_PITCH + place;
        for (int c = 0; c < B_CHUNK; ++c) {
            int own = inside ? first_column + column + (B_ALONG_K ? 0 : c) : 0;
            float number = number_of(codes[inside ? c : 0], own, CODE_ARGUMENTS p);
            target[c] = tile_t(inside ? number : 0.0f);
        }
    }
}
#endif

#ifdef UNIT
// As `stage`, for units of codes along k: weights are rounded to the type of the tile.
METAL_FUNC void stage_units(
    threadgroup tile_t* tile, device const b_t* source, int columns, int first_column, int first_k, int depth,
    uint thread_index, BOOK_PARAMETER CODE_PARAMETERS constant Params& p)
{
    constexpr uint units = TILE_K / UNIT;
    for (uint i = thread_index; i < TILE_N * units; i += THREADS) {
        int column = int(i / units);
        int place = int(i % units) * UNIT;
        bool inside = (column < columns) & (first_k + place < depth);
        int row = inside ? first_column + column : 0;
        int k = inside ? first_k + place : 0;
        words_t words = *(device const words_t*)(source + row * p.code_row + k / UNIT * UNIT_BYTES);
        int part = group_of(k);
        float scale = scale_of(CODE_ARGUMENTS row, part, p);
#if HAS_OFFSET
        float offset = offset_of(scale, CODE_ARGUMENTS row, part, p);
#else
        float offset = 0.0f;
#endif
        threadgroup tile_t* target = tile + column * B_PITCH + place;
        for (int four = 0; four < FOURS; ++four) {
            float4 weights = fma(four_numbers(words, BOOK_ARGUMENT four), float4(scale), float4(offset));
            *(threadgroup vec<tile_t, 4>*)(target + 4 * four) = vec<tile_t, 4>(inside ? weights : float4(0.0f));
        }
    }
}
#endif

kernel void matmul(
    device const a_t* a [[buffer(0)]],
    device const b_t* b [[buffer(1)]],
    device out_t* out [[buffer(2)]],
    EPILOGUE_BUFFERS
    PROLOGUE_BUFFERS
    constant Params& p [[buffer(PARAMS_BUFFER)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]])
{
    threadgroup uint4 memory[MEMORY_BYTES / 16];
    threadgroup tile_t* a_tile = (threadgroup tile_t*)memory;
    threadgroup tile_t* b_tile = (threadgroup tile_t*)(memory + A_BYTES / 16);
    threadgroup float* sums_tile = (threadgroup float*)memory; // once the operands are done with
#ifdef CODEBOOK
    threadgroup float book[16];
    if (thread_index < 16) {
        book[thread_index] = float(CODEBOOK[thread_index]);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
#endif

    int row0 = int(group.x) * TILE_M;
    int col0 = int(group.y) * TILE_N;
    int batch = p.batch_start + int(group.z);
    int outer = batch / p.batch_inner;
    int inner = batch % p.batch_inner;
    device const a_t* a_rows = a + outer * p.a_outer + inner * p.a_inner + row0 * p.a_row;
    device const b_t* b_cols = b + outer * p.b_outer + inner * p.b_inner + col0 * p.b_col;

    simdgroup_float8x8 sums[MATRICES_M][MATRICES_N];
    for (int i = 0; i < MATRICES_M; ++i) {
        for (int j = 0; j < MATRICES_N; ++j) {
            sums[i][j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
        }
    }

    for (int k0 = 0; k0 < p.k; k0 += TILE_K) {
#if A_ALONG_K
        stage<A_ROWS, A_COLUMNS, A_CHUNK>(
            a_tile, a_rows + k0 * p.a_k, p.m - row0, p.k - k0, p.a_row, p.a_k, thread_index);
#else
        stage<A_ROWS, A_COLUMNS, A_CHUNK>(
            a_tile, a_rows + k0 * p.a_k, p.k - k0, p.m - row0, p.a_k, p.a_row, thread_index);
#endif
#ifdef UNIT
        stage_units(b_tile, b, p.n - col0, col0, k0, p.k, thread_index, BOOK_ARGUMENT CODE_ARGUMENTS p);
#elif defined(CODES)
        stage_codes(
            b_tile, b_cols + k0 * p.b_k, p.n - col0, p.k - k0, p.b_col, p.b_k, col0, thread_index, CODE_ARGUMENTS p);
#elif B_ALONG_K
        stage<B_ROWS, B_COLUMNS, B_CHUNK>(
            b_tile, b_cols + k0 * p.b_k, p.n - col0, p.k - k0, p.b_col, p.b_k, thread_index);
#else
        stage<B_ROWS, B_COLUMNS, B_CHUNK>(
            b_tile, b_cols + k0 * p.b_k, p.k - k0, p.n - col0, p.b_k, p.b_col, thread_index);
#endif
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (int k = 0; k < TILE_K; k += 8) {
            simdgroup_matrix<tile_t, 8, 8> a_matrices[MATRICES_M];
            for (int i = 0; i < MATRICES_M; ++i) {
#if A_ALONG_K
                simdgroup_load(a_matrices[i], a_tile + i * 8 * A_PITCH + k, A_PITCH);
#else
                simdgroup_load(a_matrices[i], a_tile + k * A_PITCH + i * 8, A_PITCH, ulong2(0, 0), true);
#endif
            }
            for (int j = 0; j < MATRICES_N; ++j) {
                simdgroup_matrix<tile_t, 8, 8> b_matrix;
#if B_ALONG_K
                simdgroup_load(
                    b_matrix, b_tile + (simdgroup * SIMDGROUP_COLUMNS + j * 8) * B_PITCH + k, B_PITCH, ulong2(0, 0),
                    true);
#else
                simdgroup_load(b_matrix, b_tile + k * B_PITCH + simdgroup * SIMDGROUP_COLUMNS + j * 8, B_PITCH);
#endif
                for (int i = 0; i < MATRICES_M; ++i) {
                    simdgroup_multiply_accumulate(sums[i][j], a_matrices[i], b_matrix, sums[i][j]);
                }
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }

    for (int i = 0; i < MATRICES_M; ++i) {
        for (int j = 0; j < MATRICES_N; ++j) {
            simdgroup_store(sums[i][j], sums_tile + i * 8 * TILE_N + simdgroup * SIMDGROUP_COLUMNS + j * 8, TILE_N);
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    for (uint i = thread_index; i < TILE_M * TILE_N / GROUP; i += THREADS) {
        int row = row0 + int(i / (TILE_N / GROUP));
        int col = col0 + int(i % (TILE_N / GROUP) * GROUP);
        if (row < p.m) {
            float values[GROUP];
            for (int c = 0; c < GROUP; ++c) {
                values[c] = sums_tile[i * GROUP + c];
            }
            store_group(values, p.n - col, p.batch_base + batch, row, col, out, EPILOGUE_ARGUMENTS p);
        }
    }
}
