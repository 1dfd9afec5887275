// Codes of four or eight bits as 16-bit numbers in their order along k, times their scales: where these and zero points
// and biases are, and what becomes of an octet.

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

// The numbers of an octet of four or eight bits, less the zero, in their order.
template <int WORDS>
__device__ __forceinline__ void octet_in_order(
    uint (&pairs)[4], const uint (&word)[WORDS], int octet, uint zero, const Codebook& codebook)
{
#if CODEBOOK
    codebook.numbers_of(pairs, word[octet]);
#else
    if (BITS == 8) { // pairs are of bytes 0 and 2, 1 and 3
        uint first = __byte_perm(word[octet * 2 % WORDS], 0, 0x3120);
        uint second = __byte_perm(word[(octet * 2 + 1) % WORDS], 0, 0x3120);
        bytes_as_numbers(pairs, first, second, zero);
    } else { // of codes 0 and 4, 1 and 5...
        uint found[4];
        octet_as_numbers(found, word, octet, zero, codebook);
        pairs[0] = __byte_perm(found[0], found[1], 0x5410), pairs[1] = __byte_perm(found[2], found[3], 0x5410);
        pairs[2] = __byte_perm(found[0], found[1], 0x7632), pairs[3] = __byte_perm(found[2], found[3], 0x7632);
    }
#endif
}

// The same behind a zero point that has been loaded.
template <int WORDS>
__device__ __forceinline__ void octet_less_zero(
    uint (&pairs)[4], const uint (&word)[WORDS], int octet, zero_t zero, int group, const Codebook& codebook)
{
    uint subtracted = zero_pair(float(ZERO));
    if (ZEROS) {
        subtracted = zero_pair(float(zero_of(zero, group)));
    }
    octet_in_order(pairs, word, octet, subtracted, codebook);
}

// The numbers of a pair times their scale, and with the bias, rounded once.
__device__ __forceinline__ uint exactly_scaled_pair(uint pair, float scale, float bias)
{
    vector_t low(number_in_pair<vector_t>(pair, 0) * scale + bias);
    vector_t high(number_in_pair<vector_t>(pair, 1) * scale + bias);
    return uint(high.bits) << 16 | low.bits;
}

// The same, of numbers in a unit that is a power of two; a scale of 16 bits is rounded to the numbers' type, too.
__device__ __forceinline__ uint scaled_pair(uint pair, scale_t scale, bias_t bias, float unit = 1.0f)
{
    if (sizeof(scale_t) == 2 && !BIASES) {
        return Numbers::mul(pair, pair_of(float(scale) / unit));
    }
    return exactly_scaled_pair(pair, float(scale) / unit, BIASES ? float(bias) : 0.0f);
}
