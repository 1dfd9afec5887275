// Product of a few vectors and a matrix in codes: out[m, i] = epilogue(sum over k of x[m, k] * weight[i, k]), rows of
// the matrix contiguous in k, as grouped_codes.metal describes. A simdgroup computes OUTPUTS neighbouring sums of each
// of the VECTORS at a time, ROUNDS times; its lanes stride over units of k, of any number. What is added to all weights
// of a group counts by the sum of the inputs. Where PAIRS is 2, two neighbouring sums make one result. With a PROLOGUE
// the vector is not read: each threadgroup computes it first, by the generated statements of COMPUTE_VECTOR.
// Grid: groups of sums, 1, 1. Block: 32 * SIMDGROUPS.

constant constexpr int OUTPUTS = 4;

#if PROLOGUE
#define VECTOR_SPACE threadgroup
constant constexpr int ROW_SIMDGROUPS = SIMDGROUPS;
constant constexpr int ROW_THREADS = 32 * SIMDGROUPS;
#else
#define VECTOR_SPACE device
#endif

// Four neighbours of a vector.
METAL_FUNC float4 four_inputs(VECTOR_SPACE const vector_t* source, int stride)
{
#if VECTOR_CHUNK == 4
    return float4(*(VECTOR_SPACE const vec<vector_t, 4>*)source);
#else
    return float4(float(source[0]), float(source[stride]), float(source[2 * stride]), float(source[3 * stride]));
#endif
}

METAL_FUNC float total_of(float4 sum)
{
    return (sum.x + sum.y) + (sum.z + sum.w);
}

kernel void grouped_matvec(
    device const uchar* matrix [[buffer(0)]],
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
#ifdef CODEBOOK
    threadgroup float book[16];
    if (thread_index < 16) {
        book[thread_index] = float(CODEBOOK[thread_index]);
    }
#if !PROLOGUE
    threadgroup_barrier(mem_flags::mem_threadgroup);
#endif
#endif
#if PROLOGUE
    threadgroup vec<vector_t, 4> vector[VECTOR_CAPACITY / 4];
    threadgroup vector_t* x = (threadgroup vector_t*)vector;
    int lane = int(thread_index);
    COMPUTE_VECTOR
    threadgroup_barrier(mem_flags::mem_threadgroup);
#else
    device const vector_t* x = vector;
#endif

    for (int round = 0; round < ROUNDS; ++round) {
        int first = ((int(group.x) * ROUNDS + round) * SIMDGROUPS + int(simdgroup)) * OUTPUTS;
        int last = p.outputs - 1;

        float4 sums[OUTPUTS * VECTORS];
        float offsets[OUTPUTS * VECTORS];
        for (int i = 0; i < OUTPUTS * VECTORS; ++i) {
            sums[i] = 0.0f;
            offsets[i] = 0.0f;
        }
        for (int unit = int(simd_lane); unit < p.k / UNIT; unit += 32) {
            int part = group_of(unit * UNIT);
            float4 inputs[VECTORS * FOURS];
            float totals[VECTORS];
            for (int m = 0; m < VECTORS; ++m) {
                float4 total = 0.0f;
                for (int q = 0; q < FOURS; ++q) {
                    inputs[m * FOURS + q] =
                        four_inputs(x + m * p.vector_row + (unit * UNIT + 4 * q) * p.vector_k, p.vector_k);
                    total += inputs[m * FOURS + q];
                }
                totals[m] = total_of(total);
            }
            for (int r = 0; r < OUTPUTS; ++r) {
                int row = min(first + r, last);
                words_t words = *(device const words_t*)(matrix + row * p.code_row + unit * UNIT_BYTES);
                float scale = scale_of(CODE_ARGUMENTS row, part, p);
#if HAS_OFFSET
                float offset = offset_of(scale, CODE_ARGUMENTS row, part, p);
#endif
                float4 products[VECTORS];
                for (int m = 0; m < VECTORS; ++m) {
                    products[m] = 0.0f;
                }
                for (int q = 0; q < FOURS; ++q) {
                    float4 numbers = four_numbers(words, BOOK_ARGUMENT q);
                    for (int m = 0; m < VECTORS; ++m) {
                        products[m] = fma(numbers, inputs[m * FOURS + q], products[m]);
                    }
                }
                for (int m = 0; m < VECTORS; ++m) {
                    sums[r * VECTORS + m] = fma(float4(scale), products[m], sums[r * VECTORS + m]);
#if HAS_OFFSET
                    offsets[r * VECTORS + m] = fma(offset, totals[m], offsets[r * VECTORS + m]);
#endif
                }
            }
        }
        for (int m = 0; m < VECTORS; ++m) {
            float results[OUTPUTS];
            for (int r = 0; r < OUTPUTS; ++r) {
                results[r] = total_of(sums[r * VECTORS + m]) + offsets[r * VECTORS + m];
            }
            float total0 = simd_sum(results[0]);
            float total1 = simd_sum(results[1]);
            float total2 = simd_sum(results[2]);
            float total3 = simd_sum(results[3]);
            int own = first + int(simd_lane) * PAIRS;
            if (simd_lane < OUTPUTS / PAIRS && own < p.outputs) {
                int i = own / PAIRS;
#if PAIRS == 2
                float total = simd_lane < 1 ? total0 : total2;
                float odd = simd_lane < 1 ? total1 : total3;
                out[output_index(0, m, i, p)] = out_t(epilogue(total, odd, 0, m, i, EPILOGUE_ARGUMENTS p));
#else
                float total = simd_lane < 2 ? (simd_lane < 1 ? total0 : total1) : (simd_lane < 3 ? total2 : total3);
                out[output_index(0, m, i, p)] = out_t(epilogue(total, 0, m, i, EPILOGUE_ARGUMENTS p));
#endif
            }
        }
    }
}
