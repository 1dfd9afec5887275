// How kernels with an epilogue store what they computed. The epilogue itself, and where its results lie, are generated:
//   result_t epilogue(float value, int batch, int row, int col, EPILOGUE_PARAMETERS constant Params& p)
//   int output_index(int batch, int row, int col, constant Params& p)

// Results that one thread handles together: neighbours in a row.
constant constexpr int GROUP = 8;

// Applies the epilogue to up to GROUP neighbouring sums and stores them. All are computed before any is stored, so that
// the loops vectorise.
METAL_FUNC void store_group(
    thread const float* sums, int count, int batch, int row, int col, device out_t* out,
    EPILOGUE_PARAMETERS constant Params& p)
{
    if (count >= GROUP) {
        result_t results[GROUP];
        for (int c = 0; c < GROUP; ++c) {
            results[c] = epilogue(sums[c], batch, row, col + c, EPILOGUE_ARGUMENTS p);
        }
        for (int c = 0; c < GROUP; ++c) {
            out[output_index(batch, row, col + c, p)] = out_t(results[c]);
        }
    } else {
        for (int c = 0; c < count; ++c) {
            out[output_index(batch, row, col + c, p)] = out_t(epilogue(sums[c], batch, row, col + c, EPILOGUE_ARGUMENTS p));
        }
    }
}
