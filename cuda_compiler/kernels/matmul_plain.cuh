// Matrix products of any strides and data types, in float. A block computes 64 x 64 results, a thread 4 x 4 of them.
// With CODES b holds codes of a byte, of which the generated number_of makes numbers.
// Grid: tiles (columns first, then rows, then the batch) in x. Block: 256.
#if CODES
__device__ __forceinline__ float right_number(b_t code, int col, const Codes& codes, const Params& p)
{
    return number_of(int(code), col, codes, p);
}
#else
__device__ __forceinline__ float right_number(b_t element, int col, const Codes& codes, const Params& p)
{
    return float(element);
}
#endif

extern "C" __global__ void __launch_bounds__(256) matmul_plain(
    const a_t* a, const b_t* b, CODE_PARAMETERS OUT_T* out, EPILOGUE_PARAMETERS const Params p)
{
    constexpr int SIDE = 64, DEPTH = 16;
    __shared__ float a_tile[DEPTH][SIDE + 1], b_tile[DEPTH][SIDE + 1];
    int batch = int(blockIdx.x) / (p.tiles_m * p.tiles_n), inside = int(blockIdx.x) % (p.tiles_m * p.tiles_n);
    int row = inside / p.tiles_n * SIDE, col = inside % p.tiles_n * SIDE;
    int y = int(threadIdx.x) / 16, x = int(threadIdx.x) % 16;
    wait_for_previous_grid();
    a += a_offset(batch, p);
    b += b_offset(batch, p);
    const Codes codes = {CODE_ARGUMENTS};
    float sum[4][4] = {};
    for (int base = 0; base < p.k; base += DEPTH) {
        for (int index = int(threadIdx.x); index < DEPTH * SIDE; index += 256) {
            int at = A_ALONG_K ? index / DEPTH : index % SIDE, k = A_ALONG_K ? index % DEPTH : index / SIDE;
            bool valid = row + at < p.m && base + k < p.k;
            a_tile[k][at] = valid ? float(a[(long long)(row + at) * p.a_row + (long long)(base + k) * p.a_k]) : 0.0f;
        }
        for (int index = int(threadIdx.x); index < DEPTH * SIDE; index += 256) {
            int at = B_ALONG_K ? index / DEPTH : index % SIDE, k = B_ALONG_K ? index % DEPTH : index / SIDE;
            bool valid = col + at < p.n && base + k < p.k;
            const b_t* element = b + (valid ? (long long)(base + k) * p.b_k + (long long)(col + at) * p.b_col : 0);
            b_tile[k][at] = valid ? right_number(*element, col + at, codes, p) : 0.0f;
        }
        __syncthreads();
        #pragma unroll
        for (int k = 0; k < DEPTH; ++k) {
            #pragma unroll
            for (int i = 0; i < 4; ++i) {
                #pragma unroll
                for (int j = 0; j < 4; ++j) {
                    sum[i][j] += a_tile[k][y + i * 16] * b_tile[k][x * PAIRS + j / PAIRS * (16 * PAIRS) + j % PAIRS];
                }
            }
        }
        __syncthreads();
    }
    for (int i = 0; i < 4; ++i) {
        for (int j = 0; j < 4; j += PAIRS) {
            int r = row + y + i * 16, c = col + x * PAIRS + j * 16;
            if (r < p.m && c < p.n) {
                float value[PAIRS];
                for (int u = 0; u < PAIRS; ++u) {
                    value[u] = sum[i][j + u];
                }
                finish(value, batch, r, c / PAIRS, out, EPILOGUE_ARGUMENTS p);
            }
        }
    }
}
