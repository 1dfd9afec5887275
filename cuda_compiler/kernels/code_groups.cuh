// What belongs to groups of packed codes: scales, zero points and biases, as they lie in memory.
struct Groups {
    const scale_t* scales;
    const zero_t* zeros;
    const bias_t* biases;
};

// The row of scales, zero points or biases that a row of the matrix has; the last row's behind that.
__device__ __forceinline__ long long row_of_scales(int row, const Params& p)
{
    return (row < p.outputs ? row : p.outputs - 1) / ROWS;
}

// What belongs to the codes of a group of such a row, as it lies in memory.
__device__ __forceinline__ void load_belonging(
    scale_t& scale, zero_t& zero, bias_t& bias, const Groups& b, long long own, int group, const Params& p)
{
    if (!ONE_GROUP) {
        scale = b.scales[own * p.scale_row + group * SCALE_GROUP];
    }
    if (ZEROS) {
        zero = b.zeros[own * p.zero_row + group * ZERO_BITS / 8 * ZERO_GROUP];
    }
    if (BIASES) {
        bias = b.biases[own * p.bias_row + group * BIAS_GROUP];
    }
}

// A zero point of what was loaded for a group.
__device__ __forceinline__ float zero_of_group(zero_t zero, int group)
{
    int bits = int(zero);
    return float(ZERO_BITS < 8 ? bits >> group * ZERO_BITS % 8 & ((1 << ZERO_BITS) - 1) : bits);
}
