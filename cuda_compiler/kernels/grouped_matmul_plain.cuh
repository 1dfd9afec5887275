// Products of groups of rows, each by a matrix of its own, of any strides and data types, in float. A block computes 32
// x 32 results of one group, a thread 2 x 2 of them. Grid: tiles (columns first, then rows) in x. Block: 256.
extern "C" __global__ void __launch_bounds__(256) grouped_matmul_plain(
    const a_t* a, const a_t* b, const end_t* ends, OUT_T* out, EPILOGUE_PARAMETERS const Params p)
{
    constexpr int SIDE = 32, DEPTH = 32;
    __shared__ float a_tile[DEPTH][SIDE + 1], b_tile[DEPTH][SIDE + 1];
    wait_for_previous_grid();
    int col = int(blockIdx.x) % p.tiles_n * SIDE, y = int(threadIdx.x) / 16, x = int(threadIdx.x) % 16;
    Rows rows = rows_of(int(blockIdx.x) / p.tiles_n, SIDE, ends, p);
    if (rows.first >= rows.end) {
        return;
    }
    float sum[2][2] = {};
    int depth = rows.group < p.groups ? p.k : 0;
    for (int base = 0; base < depth; base += DEPTH) {
        for (int index = int(threadIdx.x); index < DEPTH * SIDE; index += 256) {
            int line = index / DEPTH, k = base + index % DEPTH, row = rows.first + line;
            bool valid = row < rows.end && k < depth;
            a_tile[index % DEPTH][line] = valid ? float(a[(long long)row * p.a_row + (long long)k * p.a_k]) : 0.0f;
        }
        for (int index = int(threadIdx.x); index < DEPTH * SIDE; index += 256) {
            int at = B_ALONG_K ? index / DEPTH : index % SIDE, deep = B_ALONG_K ? index % DEPTH : index / SIDE;
            bool valid = col + at < p.n && base + deep < depth;
            long long place = (long long)rows.group * p.b_group + (long long)(base + deep) * p.b_k;
            b_tile[deep][at] = valid ? float(b[place + (long long)(col + at) * p.b_col]) : 0.0f;
        }
        __syncthreads();
        #pragma unroll 8
        for (int k = 0; k < DEPTH; ++k) {
            #pragma unroll
            for (int i = 0; i < 4; ++i) {
                sum[i / 2][i % 2] += a_tile[k][y + i / 2 * 16] * b_tile[k][x + i % 2 * 16];
            }
        }
        __syncthreads();
    }
    for (int i = 0; i < 4; ++i) {
        int r = rows.first + y + i / 2 * 16, c = col + x + i % 2 * 16;
        if (r < rows.end && c < p.n) {
            float value[1] = {sum[i / 2][i % 2]};
            finish(value, 0, r, c, out, EPILOGUE_ARGUMENTS p);
        }
    }
}
