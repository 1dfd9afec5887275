// Convolution of channels-last images as a tiled product (implicit GEMM): a row is an output pixel of the batch, a
// column an output channel of a group, and k runs over kernel rows, kernel columns and the group's input channels.
// Grid: tiles of pixels, tiles of channels, groups. Block: 128.

constant constexpr int A_PITCH = TILE_K + PAD, B_PITCH = TILE_N + PAD;
constant constexpr int A_BYTES = staged_bytes(TILE_M, TILE_K), B_BYTES = staged_bytes(TILE_K, TILE_N);
constant constexpr int MEMORY_BYTES = larger(A_BYTES + B_BYTES, TILE_M * TILE_N * 4);
constant constexpr int TAPS = TILE_K / A_CHUNK;

// A coordinate for what does not exist: no sum with another coordinate lies inside of an image.
constant constexpr int NOWHERE = -(1 << 29);

METAL_FUNC bool is_inside(int y, int x, constant Params& p)
{
    return (uint(y) < uint(p.height)) & (uint(x) < uint(p.width));
}

kernel void conv2d(
    device const a_t* image [[buffer(0)]],
    device const b_t* weight [[buffer(1)]],
    device out_t* out [[buffer(2)]],
    EPILOGUE_BUFFERS
    constant Params& p [[buffer(PARAMS_BUFFER)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]])
{
    threadgroup uint4 memory[MEMORY_BYTES / 16];
    threadgroup tile_t* a_tile = (threadgroup tile_t*)memory;
    threadgroup tile_t* b_tile = (threadgroup tile_t*)(memory + A_BYTES / 16);
    threadgroup float* sums_tile = (threadgroup float*)memory; // once the operands are done with

    // Element (row, k) of A lies at the sum of the row's window corner and the tap of k: coordinates and addresses
    // alike.
    threadgroup int corner_y[TILE_M];
    threadgroup int corner_x[TILE_M];
    threadgroup int corner_at[TILE_M];
    threadgroup int tap_y[TAPS];
    threadgroup int tap_x[TAPS];
    threadgroup int tap_at[TAPS];

    int row0 = int(group.x) * TILE_M;
    int col0 = int(group.y) * TILE_N;
    device const a_t* channels = image + int(group.z) * p.channels * p.channel_stride;
    device const b_t* columns = weight + (int(group.z) * p.columns + col0) * p.weight_col;

    if (thread_index < TILE_M) {
        int pixel = row0 + int(thread_index);
        int line = pixel / p.out_width;
        int x = pixel % p.out_width * p.step_x - p.pad_x;
        int y = line % p.out_height * p.step_y - p.pad_y;
        corner_y[thread_index] = pixel < p.pixels ? y : NOWHERE;
        corner_x[thread_index] = x;
        corner_at[thread_index] = line / p.out_height * p.image_stride + y * p.y_stride + x * p.x_stride;
    }

    simdgroup_float8x8 sums[MATRICES_M][MATRICES_N];
    for (int i = 0; i < MATRICES_M; ++i) {
        for (int j = 0; j < MATRICES_N; ++j) {
            sums[i][j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
        }
    }

    for (int k0 = 0; k0 < p.depth; k0 += TILE_K) {
        if (thread_index < TAPS) {
            int k = k0 + int(thread_index) * A_CHUNK;
            int tap = k / p.channels;
            int y = tap / p.kernel_width * p.dilation_y;
            int x = tap % p.kernel_width * p.dilation_x;
            tap_y[thread_index] = k < p.depth ? y : NOWHERE;
            tap_x[thread_index] = x;
            tap_at[thread_index] = y * p.y_stride + x * p.x_stride + k % p.channels * p.channel_stride;
        }
        stage<TILE_K, TILE_N, B_CHUNK>(
            b_tile, columns + k0 * p.weight_row, p.depth - k0, p.weight_columns - col0, p.weight_row, p.weight_col,
            thread_index);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        // What lies outside is read at the first pixel instead, and dropped, so that threads do not diverge.
#if A_CHUNK > 1
        for (uint i = thread_index; i < TILE_M * TAPS; i += THREADS) {
            uint row = i / TAPS;
            uint tap = i % TAPS;
            bool inside = is_inside(corner_y[row] + tap_y[tap], corner_x[row] + tap_x[tap], p);
            uint4 chunk = *(device const uint4*)(channels + (inside ? corner_at[row] + tap_at[tap] : 0));
            *(threadgroup uint4*)(a_tile + row * A_PITCH + tap * A_CHUNK) = inside ? chunk : uint4(0);
        }
#else
        for (uint first = 0; first < TILE_M; first += THREADS / TAPS) {
            uint row = first + thread_index / TAPS;
            uint tap = thread_index % TAPS;
            bool inside = is_inside(corner_y[row] + tap_y[tap], corner_x[row] + tap_x[tap], p);
            tile_t value = tile_t(channels[inside ? corner_at[row] + tap_at[tap] : 0]);
            a_tile[row * A_PITCH + tap] = inside ? value : tile_t(0);
        }
#endif
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (int k = 0; k < TILE_K; k += 8) {
            simdgroup_matrix<tile_t, 8, 8> a_matrices[MATRICES_M];
            for (int i = 0; i < MATRICES_M; ++i) {
                simdgroup_load(a_matrices[i], a_tile + i * 8 * A_PITCH + k, A_PITCH);
            }
            for (int j = 0; j < MATRICES_N; ++j) {
                simdgroup_matrix<tile_t, 8, 8> b_matrix;
                simdgroup_load(b_matrix, b_tile + k * B_PITCH + simdgroup * SIMDGROUP_COLUMNS + j * 8, B_PITCH);
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
        if (row < p.pixels && col < p.columns) {
            float values[GROUP];
            for (int c = 0; c < GROUP; ++c) {
                values[c] = sums_tile[i * GROUP + c];
            }
            int channel = int(group.z) * p.columns + col;
            store_group(values, p.columns - col, 0, row, channel, out, EPILOGUE_ARGUMENTS p);
        }
    }
}
