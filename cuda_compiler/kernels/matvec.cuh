// Products of a matrix, whose rows are contiguous, by up to a few vectors: result[v, o] = sum of vector[v, k] * matrix[o, k].
// A group of LANES threads has OUTPUTS rows of the matrix, each read once. Grid: groups of outputs, then the batch, in x.
// Block: 128.
template <int COUNT>
__device__ __forceinline__ void add_products(
    float (&sum)[OUTPUTS][VECTORS], const matrix_t* matrix, const vector_t* vector, int output, int k, const Params& p)
{
    Pack<matrix_t, COUNT> weights[OUTPUTS];
    #pragma unroll
    for (int o = 0; o < OUTPUTS; ++o) {
        int at = output + o < p.outputs ? output + o : p.outputs - 1;
        weights[o] = load_pack<COUNT>(matrix + (long long)at * p.matrix_row + k);
    }
    #pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        Pack<vector_t, COUNT> part = load_pack<COUNT>(vector + (long long)v * p.vector_row + k);
        #pragma unroll
        for (int u = 0; u < COUNT; ++u) {
            #pragma unroll
            for (int o = 0; o < OUTPUTS; ++o) {
                sum[o][v] += float(weights[o][u]) * float(part[u]);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(128) matvec(
    const matrix_t* matrix, const vector_t* vector, OUT_T* out, EPILOGUE_PARAMETERS const Params p)
{
    int group = (int(blockIdx.x) * 128 + int(threadIdx.x)) / LANES, lane = int(threadIdx.x) % LANES;
    int batch = group / p.groups, output = group % p.groups * OUTPUTS;
    wait_for_previous_grid();
    bool alive = batch < p.batches;
    batch = alive ? batch : 0;
    matrix += matrix_offset(batch, p);
    vector += vector_offset(batch, p);
    float sum[OUTPUTS][VECTORS] = {};
    #pragma unroll 2
    for (int k = lane * LOAD; k < p.k; k += LANES * LOAD) {
        add_products<LOAD>(sum, matrix, vector, output, k, p);
    }
    #pragma unroll
    for (int o = 0; o < OUTPUTS; ++o) {
        #pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            float value[1] = {warp_sum<LANES>(sum[o][v])};
            if (alive && lane == (o * VECTORS + v) % LANES && output + o < p.outputs) {
                finish(value, batch, VECTOR_ROW, VECTOR_COL, out, EPILOGUE_ARGUMENTS p);
            }
        }
    }
}
