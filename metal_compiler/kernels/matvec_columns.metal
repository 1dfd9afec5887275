// Matrix-vector product of a matrix whose rows are not contiguous: out[batch, i] = epilogue(sum over k of
// matrix[batch, i, k] * vector[batch, k]). A lane computes CHUNK neighbouring sums, each simdgroup every eighth k.
// Where PAIRS is 2, two neighbouring sums make one result. With CODES the matrix holds codes of a byte, of which the
// generated number_of makes numbers.
// Grid: groups of sums, 1, batch. Block: 256.

#ifndef CODES
#define CODE_PARAMETERS
#define CODE_ARGUMENTS
#endif

constant constexpr int SLICES = 8;
constant constexpr int WIDTH = 32 * CHUNK;

#if CHUNK > 1
METAL_FUNC float4 load_columns(device const matrix_t* source, int column, CODE_PARAMETERS constant Params& p)
{
    vec<matrix_t, 4> found = *(device const vec<matrix_t, 4>*)source;
#ifdef CODES
    return float4(
        number_of(found.x, column, CODE_ARGUMENTS p), number_of(found.y, column + 1, CODE_ARGUMENTS p),
        number_of(found.z, column + 2, CODE_ARGUMENTS p), number_of(found.w, column + 3, CODE_ARGUMENTS p));
#else
    return float4(found);
#endif
}
#else
METAL_FUNC float load_columns(device const matrix_t* source, int column, CODE_PARAMETERS constant Params& p)
{
#ifdef CODES
    return number_of(*source, column, CODE_ARGUMENTS p);
#else
    return float(*source);
#endif
}
#endif

kernel void matvec_columns(
    device const matrix_t* matrix [[buffer(0)]],
    device const vector_t* vector [[buffer(1)]],
    device out_t* out [[buffer(OUT_BUFFER)]],
    EPILOGUE_BUFFERS
    PROLOGUE_BUFFERS
    constant Params& p [[buffer(PARAMS_BUFFER)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint slice [[simdgroup_index_in_threadgroup]])
{
    threadgroup float partial[SLICES * WIDTH];

    int batch = p.batch_start + int(group.z);
    int outer = batch / p.batch_inner;
    int inner = batch % p.batch_inner;
    int first = int(group.x) * WIDTH;
    int own = first + int(lane) * CHUNK;
    device const vector_t* x = vector + outer * p.vector_outer + inner * p.vector_inner;
    device const matrix_t* columns = matrix + outer * p.matrix_outer + inner * p.matrix_inner;

#if CHUNK > 1
    float4 sum = 0.0f;
    if (own < p.outputs) {
        for (int k = int(slice); k < p.k; k += SLICES) {
            device const matrix_t* source = columns + k * p.matrix_k + own;
            sum += float(x[k * p.vector_k]) * load_columns(source, own, CODE_ARGUMENTS p);
        }
    }
    for (int c = 0; c < CHUNK; ++c) {
        partial[int(slice) * WIDTH + int(lane) * CHUNK + c] = sum[c];
    }
#else
    float sum = 0.0f;
    if (own < p.outputs) {
        for (int k = int(slice); k < p.k; k += SLICES) {
            device const matrix_t* source = columns + k * p.matrix_k + own * p.matrix_row;
            sum += float(x[k * p.vector_k]) * load_columns(source, own, CODE_ARGUMENTS p);
        }
    }
    partial[int(slice) * WIDTH + int(lane)] = sum;
#endif
    threadgroup_barrier(mem_flags::mem_threadgroup);

    int column = int(thread_index) * PAIRS;
    if (column < WIDTH && first + column < p.outputs) {
        float total = 0.0f;
        for (int s = 0; s < SLICES; ++s) {
            total += partial[s * WIDTH + column];
        }
        int i = (first + column) / PAIRS;
#if PAIRS == 2
        float odd = 0.0f;
        for (int s = 0; s < SLICES; ++s) {
            odd += partial[s * WIDTH + column + 1];
        }
        out[output_index(p.batch_base + batch, ROW(i), COL(i), p)] =
            out_t(epilogue(total, odd, p.batch_base + batch, ROW(i), COL(i), EPILOGUE_ARGUMENTS p));
#else
        out[output_index(p.batch_base + batch, ROW(i), COL(i), p)] =
            out_t(epilogue(total, p.batch_base + batch, ROW(i), COL(i), EPILOGUE_ARGUMENTS p));
#endif
    }
}
