// Matrix-vector product of a matrix whose rows are not contiguous: out[batch, i] = epilogue(sum over k of
// matrix[batch, i, k] * vector[batch, k]). A lane computes CHUNK neighbouring sums, each simdgroup every eighth k. Where
// PAIRS is 2, two neighbouring sums make one result.
// Grid: groups of sums, 1, batch. Block: 256.

constant constexpr int SLICES = 8;
constant constexpr int WIDTH = 32 * CHUNK;

kernel void matvec_columns(
    device const matrix_t* matrix [[buffer(0)]],
    device const vector_t* vector [[buffer(1)]],
    device out_t* out [[buffer(OUT_BUFFER)]],
    EPILOGUE_BUFFERS
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
            sum += float(x[k * p.vector_k]) * float4(*(device const vec<matrix_t, 4>*)source);
        }
    }
    for (int c = 0; c < CHUNK; ++c) {
        partial[int(slice) * WIDTH + int(lane) * CHUNK + c] = sum[c];
    }
#else
    float sum = 0.0f;
    if (own < p.outputs) {
        for (int k = int(slice); k < p.k; k += SLICES) {
            sum += float(x[k * p.vector_k]) * float(columns[k * p.matrix_k + own * p.matrix_row]);
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
