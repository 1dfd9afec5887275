// Matrix-vector product: out[batch, i] = epilogue(sum over k of matrix[batch, i, k] * vector[batch, k]), rows of the
// matrix contiguous in k. A simdgroup computes OUTPUTS neighbouring results; its lanes stride over k.
// Grid: groups of results, 1, batch. Block: 128.
#ifndef GENERATED // by itself: half operands without epilogue, the results one row
#include "common.metal"
typedef half matrix_t;
typedef half vector_t;
typedef half out_t;
#define CHUNK 4
#define ROW(i) 0
#define COL(i) i
#define EPILOGUE_BUFFERS
#define EPILOGUE_PARAMETERS
#define EPILOGUE_ARGUMENTS
#define PARAMS_BUFFER 3
struct Params {
    int outputs, k;
    int matrix_row, matrix_k, vector_k;
    int batch_base, batch_start, batch_inner;
    int matrix_outer, matrix_inner, vector_outer, vector_inner;
};
METAL_FUNC float epilogue(float value, int batch, int row, int col, constant Params& p) { return value; }
METAL_FUNC int output_index(int batch, int row, int col, constant Params& p) { return batch * p.outputs + col; }
#endif

constant constexpr int OUTPUTS = 4;
constant constexpr int SIMDGROUPS = 4;

#if CHUNK > 1
typedef float4 sum_t;
template <typename T>
METAL_FUNC float4 load(device const T* source)
{
    return float4(*(device const vec<T, 4>*)source);
}
METAL_FUNC float total_of(float4 sum)
{
    return (sum.x + sum.y) + (sum.z + sum.w);
}
#else
typedef float sum_t;
template <typename T>
METAL_FUNC float load(device const T* source)
{
    return float(*source);
}
METAL_FUNC float total_of(float sum)
{
    return sum;
}
#endif

kernel void matvec(
    device const matrix_t* matrix [[buffer(0)]],
    device const vector_t* vector [[buffer(1)]],
    device out_t* out [[buffer(2)]],
    EPILOGUE_BUFFERS
    constant Params& p [[buffer(PARAMS_BUFFER)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]])
{
    int batch = p.batch_start + int(group.z);
    int outer = batch / p.batch_inner;
    int inner = batch % p.batch_inner;
    int first = (int(group.x) * SIMDGROUPS + int(simdgroup)) * OUTPUTS;
    int last = p.outputs - 1;
    device const vector_t* x = vector + outer * p.vector_outer + inner * p.vector_inner;
    device const matrix_t* rows = matrix + outer * p.matrix_outer + inner * p.matrix_inner;
    device const matrix_t* row0 = rows + min(first, last) * p.matrix_row;
    device const matrix_t* row1 = rows + min(first + 1, last) * p.matrix_row;
    device const matrix_t* row2 = rows + min(first + 2, last) * p.matrix_row;
    device const matrix_t* row3 = rows + min(first + 3, last) * p.matrix_row;

    sum_t sum0 = 0.0f, sum1 = 0.0f, sum2 = 0.0f, sum3 = 0.0f;
    for (int k = int(lane) * CHUNK; k < p.k; k += 32 * CHUNK) {
        sum_t value = load(x + k * p.vector_k);
        sum0 += value * load(row0 + k);
        sum1 += value * load(row1 + k);
        sum2 += value * load(row2 + k);
        sum3 += value * load(row3 + k);
    }
    float total0 = simd_sum(total_of(sum0));
    float total1 = simd_sum(total_of(sum1));
    float total2 = simd_sum(total_of(sum2));
    float total3 = simd_sum(total_of(sum3));
    int i = first + int(lane);
    if (lane < OUTPUTS && i < p.outputs) {
        float total = lane < 2 ? (lane < 1 ? total0 : total1) : (lane < 3 ? total2 : total3);
        out[output_index(p.batch_base + batch, ROW(i), COL(i), p)] =
            out_t(epilogue(total, p.batch_base + batch, ROW(i), COL(i), EPILOGUE_ARGUMENTS p));
    }
}
