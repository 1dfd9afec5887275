// How kernels with an epilogue store what they computed. The epilogue itself, and where its results lie, are generated:
//   result_t epilogue(float value, int batch, int row, int col, EPILOGUE_PARAMETERS constant Params& p)
//   int output_index(int batch, int row, int col, constant Params& p)
// Where PAIRS is 2, two neighbouring sums make one result, and the epilogue takes both.
#ifndef PAIRS
#define PAIRS 1
#endif
#if PAIRS == 2
#define SUMS_OF(c) sums[2 * (c)], sums[2 * (c) + 1]
#else
#define SUMS_OF(c) sums[c]
#endif

// Sums that one thread handles together: neighbours in a row.
constant constexpr int GROUP = 8;

// Applies the epilogue to up to GROUP neighbouring sums, the first of which is that of column `col`, and stores the
// results. All are computed before any is stored, so that the loops vectorise.
METAL_FUNC void store_group(
    thread const float* sums, int count, int batch, int row, int col, device out_t* out,
    EPILOGUE_PARAMETERS constant Params& p)
{
    int first = col / PAIRS;
    if (count >= GROUP) {
        result_t results[GROUP / PAIRS];
        for (int c = 0; c < GROUP / PAIRS; ++c) {
            results[c] = epilogue(SUMS_OF(c), batch, row, first + c, EPILOGUE_ARGUMENTS p);
        }
        for (int c = 0; c < GROUP / PAIRS; ++c) {
            out[output_index(batch, row, first + c, p)] = out_t(results[c]);
        }
    } else {
        for (int c = 0; c < count / PAIRS; ++c) {
            out[output_index(batch, row, first + c, p)] =
                out_t(epilogue(SUMS_OF(c), batch, row, first + c, EPILOGUE_ARGUMENTS p));
        }
    }
}
