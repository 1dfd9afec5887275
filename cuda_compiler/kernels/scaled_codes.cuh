// Codes of four or eight bits as 16-bit numbers in their order along k, times their scales: where these and zero points
// and biases are, and what becomes of an octet.

template <typename A, typename B>
constexpr bool ARE_SAME = false;
template <typename A>
constexpr bool ARE_SAME<A, A> = true;

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

// Codes of four bits come in their order where a byte goes to both halves of a word, of which each keeps one code; the
// upper one is 16 times as large. One instruction then takes the zero point and that factor out: of codes above 1024, or
// of subnormal numbers, which become multiples of IN_ORDER_UNIT. So in bfloat16 scales must be below 2^122.
constexpr bool NIBBLES = BITS == 4 && !CODEBOOK, ARE_SUBNORMAL = Numbers::MANTISSA == 7;
constexpr float IN_ORDER_UNIT = NIBBLES && ARE_SUBNORMAL ? SUBNORMAL_UNIT : 1.0f;

__device__ __forceinline__ void nibbles_in_order(uint (&pairs)[4], uint octet, float zero)
{
    constexpr uint FACTORS = ARE_SUBNORMAL ? 0x7d007f00u : 0x2c003c00u, ABOVE_CODES = ARE_SUBNORMAL ? 0u : Numbers::BASE;
    float base = ARE_SUBNORMAL ? 0.0f : float(Numbers::BASE_VALUE);
    vector_t lower((base + zero) * -IN_ORDER_UNIT), upper((base / 16.0f + zero) * -IN_ORDER_UNIT);
    uint offset = as_pair(lower, upper);
    #pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
        uint codes = and_or(__byte_perm(octet, 0, pair * 0x1111), 0x00f0000fu, ABOVE_CODES);
        pairs[pair] = Numbers::fma(codes, FACTORS, offset);
    }
}

// The numbers of an octet in their order, less the zero point as loaded, in units of IN_ORDER_UNIT.
template <int WORDS>
__device__ __forceinline__ void octet_less_zero(
    uint (&pairs)[4], const uint (&word)[WORDS], int octet, zero_t zero, int group, const Codebook& codebook)
{
    float subtracted = float(ZEROS ? zero_of(zero, group) : ZERO);
#if CODEBOOK
    codebook.numbers_of(pairs, word[octet]);
#else
    if (NIBBLES) {
        nibbles_in_order(pairs, word[octet % WORDS], subtracted);
    } else { // pairs are of bytes 0 and 2, 1 and 3
        uint first = __byte_perm(word[octet * 2 % WORDS], 0, 0x3120);
        uint second = __byte_perm(word[(octet * 2 + 1) % WORDS], 0, 0x3120);
        bytes_as_numbers(pairs, first, second, zero_pair(subtracted));
    }
#endif
}

// The numbers of a pair, in a unit that is a power of two, times their scale, and with the bias, rounded once.
__device__ __forceinline__ uint exactly_scaled_pair(uint pair, scale_t scale, bias_t bias, float unit = 1.0f)
{
    float factor = float(scale) / unit, added = BIASES ? float(bias) : 0.0f;
    if (!BIASES && ARE_SAME<scale_t, vector_t>) {
        return Numbers::mul(pair, pair_of(factor));
    }
    vector_t low(number_in_pair<vector_t>(pair, 0) * factor + added);
    vector_t high(number_in_pair<vector_t>(pair, 1) * factor + added);
    return as_pair(low, high);
}

// The same, but that a scale of 16 bits is rounded to the numbers' type, too.
__device__ __forceinline__ uint scaled_pair(uint pair, scale_t scale, bias_t bias, float unit = 1.0f)
{
    if (sizeof(scale_t) == 2 && !BIASES) {
        return Numbers::mul(pair, pair_of(float(scale) / unit));
    }
    return exactly_scaled_pair(pair, scale, bias, unit);
}
