// What attention kernels by `mma.sync` share: tiles in shared memory, the store of a result.

// Where an element lies in a tile of WIDTH columns, in bytes: rows are permuted or apart so that eight of them lie in
// different banks at any column.
template <int WIDTH>
__device__ __forceinline__ uint place(uint row, uint column)
{
    constexpr uint CHUNKS = WIDTH / 8;
    return CHUNKS % 8 == 0 ? (row * CHUNKS + (column / 8 ^ (row & 7))) * 16 + column % 8 * 2
                           : (row * (CHUNKS + 1) + column / 8) * 16 + column % 8 * 2;
}

constexpr int tile_bytes(int rows, int width) { return rows * (width / 8 % 8 == 0 ? width : width + 8) * 2; }

// Stores two neighbouring results of a row, of so many that each query head has.
__device__ __forceinline__ void store_pair(
    int rows, int row, int column, const float (&pair)[2], int batch, int group, OUT_T* out,
    EPILOGUE_PARAMETERS const Params& p)
{
    if (row >= rows * SHARED || column >= VALUE_SIZE) {
        return;
    }
    int head = (batch * GROUPS + group) * SHARED + row / rows;
    float values[2] = {pair[0], pair[1]};
#if STORE_SIZE == 2
    finish(values, head, row % rows, column, out, EPILOGUE_ARGUMENTS p);
#else
    for (int u = 0; u < 2 && column + u < VALUE_SIZE; ++u) {
        float value[1] = {values[u]};
        finish(value, head, row % rows, column + u, out, EPILOGUE_ARGUMENTS p);
    }
#endif
}

// A score in powers of two, ahead of the mask.
__device__ __forceinline__ float scaled_score(float product)
{
#ifdef SOFT_CAP
    return tanhf(product * (SCALE / SOFT_CAP)) * binary_exponent(SOFT_CAP);
#else
    return product * binary_exponent(SCALE);
#endif
}
