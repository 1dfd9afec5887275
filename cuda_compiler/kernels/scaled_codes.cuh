// Codes of four or eight bits as 16-bit numbers in their order along k, times their scales.

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

// The numbers of a pair, in a unit that is a power of two, times their scale, and with the bias where there are biases.
__device__ __forceinline__ uint scaled_pair(uint pair, scale_t scale, bias_t bias, float unit = 1.0f)
{
    if (sizeof(scale_t) == 2 && !BIASES) {
        return Numbers::mul(pair, pair_of(float(scale) / unit));
    }
    float factor = float(scale) / unit, added = BIASES ? float(bias) : 0.0f;
    vector_t low(number_in_pair<vector_t>(pair, 0) * factor + added);
    vector_t high(number_in_pair<vector_t>(pair, 1) * factor + added);
    return uint(high.bits) << 16 | low.bits;
}
