// Matrix-vector product: out[batch, i] = epilogue(sum over k of matrix[batch, i, k] * vector[batch, k]), rows of the
// matrix contiguous in k. A simdgroup computes OUTPUTS neighbouring sums at a time, ROUNDS times; its lanes stride over
// k. Where PAIRS is 2, two neighbouring sums make one result. With a PROLOGUE the vector is not read: each threadgroup
// computes it first, by the generated statements of COMPUTE_VECTOR. With CODES the matrix holds codes of a byte, of
// which the generated number_of makes numbers.
// Grid: groups of sums, 1, batch. Block: 32 * SIMDGROUPS.

constant constexpr int OUTPUTS = 4;

#if PROLOGUE
#define VECTOR_SPACE threadgroup
constant constexpr int ROW_SIMDGROUPS = SIMDGROUPS;
constant constexpr int ROW_THREADS = 32 * SIMDGROUPS;
#else
#define VECTOR_SPACE device
#endif

#if CHUNK > 1
typedef float4 sum_t;
METAL_FUNC float4 load_matrix(device const matrix_t* source)
{
    return float4(*(device const vec<matrix_t, 4>*)source);
}
METAL_FUNC float4 load_vector(VECTOR_SPACE const vector_t* source)
{
    return float4(*(VECTOR_SPACE const vec<vector_t, 4>*)source);
}
METAL_FUNC float total_of(float4 sum)
{
    return (sum.x + sum.y) + (sum.z + sum.w);
}
#else
typedef float sum_t;
METAL_FUNC float load_matrix(device const matrix_t* source)
{
    return float(*source);
}
METAL_FUNC float load_vector(VECTOR_SPACE const vector_t* source)
{
    return float(*source);
}
METAL_FUNC float total_of(float sum)
{
    return sum;
}
#endif

#ifdef CODES
#define MATRIX(source, row) numbers(source, min(row, last), CODE_ARGUMENTS p)
METAL_FUNC sum_t numbers(device const matrix_t* source, int row, CODE_PARAMETERS constant Params& p)
{
#if CHUNK > 1
    vec<matrix_t, 4> codes = *(device const vec<matrix_t, 4>*)source;
    return float4(
        number_of(codes.x, row, CODE_ARGUMENTS p), number_of(codes.y, row, CODE_ARGUMENTS p),
        number_of(codes.z, row, CODE_ARGUMENTS p), number_of(codes.w, row, CODE_ARGUMENTS p));
#else
    return number_of(*source, row, CODE_ARGUMENTS p);
#endif
}
#else
#define MATRIX(source, row) load_matrix(source)
#endif

kernel void matvec(
    device const matrix_t* matrix [[buffer(0)]],
#if !PROLOGUE
    device const vector_t* vector [[buffer(1)]],
#endif
    device out_t* out [[buffer(OUT_BUFFER)]],
    EPILOGUE_BUFFERS
    PROLOGUE_BUFFERS
    constant Params& p [[buffer(PARAMS_BUFFER)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simd_lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]])
{
    int batch = p.batch_start + int(group.z);
    int outer = batch / p.batch_inner;
    int inner = batch % p.batch_inner;
    device const matrix_t* rows = matrix + outer * p.matrix_outer + inner * p.matrix_inner;
#if PROLOGUE
    threadgroup vec<vector_t, 4> vector[VECTOR_CAPACITY / 4];
    threadgroup vector_t* x = (threadgroup vector_t*)vector;
    int lane = int(thread_index);
    COMPUTE_VECTOR
    threadgroup_barrier(mem_flags::mem_threadgroup);
#else
    device const vector_t* x = vector + outer * p.vector_outer + inner * p.vector_inner;
#endif

    for (int round = 0; round < ROUNDS; ++round) {
        int first = ((int(group.x) * ROUNDS + round) * SIMDGROUPS + int(simdgroup)) * OUTPUTS;
        int last = p.outputs - 1;
        device const matrix_t* row0 = rows + min(first, last) * p.matrix_row;
        device const matrix_t* row1 = rows + min(first + 1, last) * p.matrix_row;
        device const matrix_t* row2 = rows + min(first + 2, last) * p.matrix_row;
        device const matrix_t* row3 = rows + min(first + 3, last) * p.matrix_row;

        sum_t sum0 = 0.0f, sum1 = 0.0f, sum2 = 0.0f, sum3 = 0.0f;
        for (int k = int(simd_lane) * CHUNK; k < p.k; k += 32 * CHUNK) {
            sum_t value = load_vector(x + k * p.vector_k);
            sum0 += value * MATRIX(row0 + k, first);
            sum1 += value * MATRIX(row1 + k, first + 1);
            sum2 += value * MATRIX(row2 + k, first + 2);
            sum3 += value * MATRIX(row3 + k, first + 3);
        }
        float total0 = simd_sum(total_of(sum0));
        float total1 = simd_sum(total_of(sum1));
        float total2 = simd_sum(total_of(sum2));
        float total3 = simd_sum(total_of(sum3));
        int own = first + int(simd_lane) * PAIRS;
        if (simd_lane < OUTPUTS / PAIRS && own < p.outputs) {
            int i = own / PAIRS;
#if PAIRS == 2
            float total = simd_lane < 1 ? total0 : total2;
            float odd = simd_lane < 1 ? total1 : total3;
            out[output_index(p.batch_base + batch, ROW(i), COL(i), p)] =
                out_t(epilogue(total, odd, p.batch_base + batch, ROW(i), COL(i), EPILOGUE_ARGUMENTS p));
#else
            float total = simd_lane < 2 ? (simd_lane < 1 ? total0 : total1) : (simd_lane < 3 ? total2 : total3);
            out[output_index(p.batch_base + batch, ROW(i), COL(i), p)] =
                out_t(epilogue(total, p.batch_base + batch, ROW(i), COL(i), EPILOGUE_ARGUMENTS p));
#endif
        }
    }
}
