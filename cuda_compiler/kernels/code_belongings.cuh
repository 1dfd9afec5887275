// What belongs to groups of packed codes: scales, zero points and biases.
// Scales, zero points and biases of groups of codes.
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

// The scale, zero point and bias of a group of such a row, as loaded.
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

// The zero point of a group, whose byte may have those of others.
__device__ __forceinline__ int zero_of(zero_t zero, int group)
{
    int bits = int(zero);
    return ZERO_BITS < 8 ? bits >> group * ZERO_BITS % 8 & ((1 << ZERO_BITS) - 1) : bits;
}
