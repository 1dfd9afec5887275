// Codes of a few bits as pairs of 16-bit floating-point numbers, by arithmetic on their bits. Eight codes, an octet,
// become four pairs; which codes meet in a pair depends on how they lie, and place_in_octet says so.
constexpr int CODES_UNSIGNED = 0, CODES_SIGNED = 1, CODES_FLOAT = 2;

template <typename T>
struct Pairs;

template <>
struct Pairs<half> {
    static constexpr uint SIXTEEN = 0x4c004c00u, BASE = 0x64006400u, ONE = 0x3c003c00u;
    static constexpr int MANTISSA = 10, BASE_VALUE = 1024;

    __device__ __forceinline__ static uint fma(uint a, uint b, uint c)
    {
        uint result;
        asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
        return result;
    }
    __device__ __forceinline__ static uint sub(uint a, uint b)
    {
        uint result;
        asm("sub.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
        return result;
    }
    __device__ __forceinline__ static uint mul(uint a, uint b)
    {
        uint result;
        asm("mul.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
        return result;
    }
};

template <>
struct Pairs<bfloat> {
    static constexpr uint SIXTEEN = 0x41804180u, BASE = 0x43004300u, ONE = 0x3f803f80u;
    static constexpr int MANTISSA = 7, BASE_VALUE = 128;

    __device__ __forceinline__ static uint sub(uint a, uint b) { return fma(b, 0xbf80bf80u, a); }
    __device__ __forceinline__ static uint mul(uint a, uint b) { return fma(a, b, 0x80008000u); }
    __device__ __forceinline__ static uint fma(uint a, uint b, uint c)
    {
        uint result;
#if __CUDA_ARCH__ >= 800
        asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
#else
        bfloat low(part(a, 0) * part(b, 0) + part(c, 0)), high(part(a, 1) * part(b, 1) + part(c, 1));
        result = uint(high.bits) << 16 | low.bits;
#endif
        return result;
    }

private:
    __device__ __forceinline__ static float part(uint pair, int which)
    {
        return __uint_as_float(which ? pair & 0xffff0000u : pair << 16);
    }
};

typedef Pairs<vector_t> Numbers;

// Two copies of a number.
__device__ __forceinline__ uint pair_of(float value) { return uint(vector_t(value).bits) * 0x10001u; }

// (a & mask) | b, which is one instruction.
__device__ __forceinline__ uint and_or(uint a, uint mask, uint b)
{
    uint result;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(a), "r"(mask), "r"(b));
    return result;
}

__device__ __forceinline__ constexpr int place_in_octet(int index)
{
    return CODEBOOK || BITS != 4 && BITS != 8 ? index
           : BITS == 4                        ? index / 2 + index % 2 * 4
                                              : index / 4 * 4 + index % 4 / 2 + index % 2 * 2;
}

// Eight neighbours of a vector, two of 16 bits in a word, in the order in which an octet's codes become pairs.
__device__ __forceinline__ void order_octet(uint (&pairs)[4], const uint (&word)[4])
{
    #pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
        int low = place_in_octet(pair * 2), high = place_in_octet(pair * 2 + 1);
        int select = (low % 2 ? 0x32 : 0x10) | (high % 2 ? 0x7600 : 0x5400);
        pairs[pair] = __byte_perm(word[low / 2], word[high / 2], select);
    }
}

// The codebook of four bits as planes of bytes, for look-ups by byte permutations.
struct Codebook {
#if CODEBOOK
    uint low[4], high[4];

    __device__ __forceinline__ void load(const codebook_t* entries)
    {
        #pragma unroll
        for (int word = 0; word < 4; ++word) {
            low[word] = high[word] = 0;
            #pragma unroll
            for (int byte = 0; byte < 4; ++byte) {
                uint bits = vector_t(float(entries[word * 4 + byte])).bits;
                low[word] |= (bits & 255u) << byte * 8;
                high[word] |= (bits >> 8) << byte * 8;
            }
        }
    }

    __device__ __forceinline__ void numbers_of(uint (&pairs)[4], uint word) const
    {
        uint place = word & 0x77777777u, side = (word & 0x88888888u) >> 1 | 0x32103210u;
        #pragma unroll
        for (int part = 0; part < 2; ++part) {
            uint first = __byte_perm(__byte_perm(low[0], low[1], place), __byte_perm(low[2], low[3], place), side);
            uint second = __byte_perm(__byte_perm(high[0], high[1], place), __byte_perm(high[2], high[3], place), side);
            pairs[part * 2] = __byte_perm(first, second, 0x5140);
            pairs[part * 2 + 1] = __byte_perm(first, second, 0x7362);
            place >>= 16;
            side >>= 16;
        }
    }
#else
    __device__ __forceinline__ void load(const void*) {}
#endif
};

// What is subtracted from the pairs that bit tricks make: the zero point, and what these add themselves.
__device__ __forceinline__ uint zero_pair(float zero)
{
    int added = CODE_KIND == CODES_FLOAT                  ? 0
                : BITS == 4                               ? 16
                : BITS == 8 && Numbers::MANTISSA == 7     ? (CODE_KIND == CODES_UNSIGNED ? -128 : 0)
                : BITS == 8 && CODE_KIND == CODES_SIGNED ? Numbers::BASE_VALUE + 128
                                                          : Numbers::BASE_VALUE;
    return pair_of(zero + float(added));
}

// Two words of four bytes as four pairs.
__device__ __forceinline__ void bytes_as_numbers(uint (&pairs)[4], uint first, uint second, uint zero)
{
    #pragma unroll
    for (int half_octet = 0; half_octet < 2; ++half_octet) {
        uint word = half_octet ? second : first;
        #pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
            uint& pair = pairs[half_octet * 2 + odd];
            // Sign, exponent and mantissa move to their places; a multiplication changes the exponent's bias.
            if (CODE_KIND == CODES_FLOAT) {
                constexpr int SHIFT = Numbers::MANTISSA - FLOAT_MANTISSA;
                constexpr uint BODY = 0x007f007fu << SHIFT;
                uint moved = odd ? (SHIFT <= 8 ? word >> (8 - SHIFT) : word << (SHIFT - 8)) : word << SHIFT;
                uint sign = odd ? word : word << 8;
                pair = Numbers::mul(and_or(sign, 0x80008000u, moved & BODY), FLOAT_SCALE);
            } else if (Numbers::MANTISSA == 10) {
                uint shifted = CODE_KIND == CODES_SIGNED ? word ^ 0x80808080u : word;
                pair = Numbers::sub(__byte_perm(shifted, Numbers::BASE, odd ? 0x7351 : 0x7250), zero);
            } else { // 128 + the lower seven bits, less 128, or 256 where the highest bit is set
                uint moved = odd ? word >> 8 : word;
                uint top = CODE_KIND == CODES_SIGNED ? moved : ~moved;
                pair = Numbers::sub(and_or(moved, 0x007f007fu, Numbers::BASE), and_or(top, 0x00800080u, Numbers::BASE));
                if (ZEROS || ZERO != (CODE_KIND == CODES_UNSIGNED ? 128 : 0)) {
                    pair = Numbers::sub(pair, zero);
                }
            }
        }
    }
}

// Codes are bfloat16 AS_THEY_ARE, 2^-133 times as large, since the least normal numbers follow the subnormal ones without
// a gap: signed bytes are ABOVE what they stand for; of four bits those of the upper halves of bytes, the odd pairs of
// an octet, are 16 times as large. Where tensor cores take bytes so, what they are multiplied by is RAISED, so that
// products do not vanish, and must be below 2^80; products are in units of CODE_UNIT.
constexpr bool AS_THEY_ARE =
    Numbers::MANTISSA == 7 && CODE_KIND != CODES_FLOAT && !CODEBOOK && (BITS == 8 || BITS == 4);
constexpr int ABOVE = AS_THEY_ARE && BITS == 8 && CODE_KIND == CODES_SIGNED ? 128 : 0;
constexpr float RAISED = AS_THEY_ARE ? 0x1p48f : 1.0f, CODE_UNIT = AS_THEY_ARE ? 0x1p-85f : 1.0f;
constexpr bool is_upper_half(int pair) { return AS_THEY_ARE && BITS == 4 && pair % 2; }

// Two equal codes as they are, in a pair of an octet; from 0 to 255, or 15.
constexpr uint equal_codes(int code, int pair) { return uint(is_upper_half(pair) ? code * 16 : code) * 0x10001u; }

// The operand that two words of four bytes are.
__device__ __forceinline__ void bytes_as_operand(uint (&pairs)[4], uint first, uint second)
{
    if (!AS_THEY_ARE) {
        bytes_as_numbers(pairs, first, second, zero_pair(0.0f));
        return;
    }
    #pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
        uint word = (pair < 2 ? first : second) ^ (ABOVE ? 0x80808080u : 0u);
        pairs[pair] = __byte_perm(word, 0, pair % 2 ? 0x4341 : 0x4240);
    }
}

// Or such codes become numbers in this unit, less their zero point, by one instruction more: times 2^127, or 2^123.
constexpr float SUBNORMAL_UNIT = 0.015625f;
constexpr uint factor_of_codes(int pair) { return is_upper_half(pair) ? 0x7d007d00u : 0x7f007f00u; }

// What is added to codes that become numbers in units, or subtracted from other numbers.
__device__ __forceinline__ uint offset_pair(float zero, bool in_units)
{
    return in_units ? pair_of((zero + float(ABOVE)) * -SUBNORMAL_UNIT) : zero_pair(zero);
}

// The operand that an octet of four bits in a word is.
__device__ __forceinline__ void octet_as_operand(uint (&pairs)[4], uint octet)
{
    #pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
        pairs[pair] = (pair < 2 ? octet : octet >> 8) & equal_codes(15, pair);
    }
}

// Two codes of four bits of an octet, each added to 16: their bits are the highest of the mantissa.
__device__ __forceinline__ uint sixteen_and_codes(uint octet, int pair)
{
    constexpr int PLACE = Numbers::MANTISSA - 4;
    uint moved = pair * 4 <= PLACE ? octet << (PLACE - pair * 4) : octet >> (pair * 4 - PLACE);
    return and_or(moved, 0x000f000fu << PLACE, Numbers::SIXTEEN);
}

// The numbers of an octet, less the zero.
template <int WORDS>
__device__ __forceinline__ void octet_as_numbers(
    uint (&pairs)[4], const uint (&word)[WORDS], int octet, uint zero, const Codebook& codebook)
{
#if CODEBOOK
    codebook.numbers_of(pairs, word[octet]);
#else
    if (BITS == 8) {
        bytes_as_numbers(pairs, word[octet * 2 % WORDS], word[(octet * 2 + 1) % WORDS], zero);
    } else if (BITS == 4) {
        #pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
            pairs[pair] = Numbers::sub(sixteen_and_codes(word[octet % WORDS], pair), zero);
        }
    } else {
        #pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
            uint code[2];
            #pragma unroll
            for (int side = 0; side < 2; ++side) {
                int first = (octet * 8 + pair * 2 + side) * BITS, place = first / 32, shift = first % 32;
                code[side] = word[place] >> shift;
                if (shift + BITS > 32) {
                    code[side] |= word[(place + 1) % WORDS] << (32 - shift);
                }
                code[side] &= (1u << BITS) - 1u;
            }
            pairs[pair] = Numbers::sub(code[0] | code[1] << 16 | Numbers::BASE, zero);
        }
    }
#endif
}

// The same of codes of four bits in a word, or of bytes in two; in units where codes are AS_THEY_ARE.
__device__ __forceinline__ void octet_in_units(
    uint (&pairs)[4], const uint (&word)[2], uint offset, const Codebook& codebook)
{
    if (!AS_THEY_ARE) {
        octet_as_numbers(pairs, word, 0, offset, codebook);
        return;
    }
    if (BITS == 8) {
        bytes_as_operand(pairs, word[0], word[1]);
    } else {
        octet_as_operand(pairs, word[0]);
    }
    #pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
        pairs[pair] = Numbers::fma(pairs[pair], factor_of_codes(pair), offset);
    }
}

// sum[16 x 8] += a[16 x 16] * b[16 x 8], in the register layout of mma.m16n8k16, on any device.
__device__ __forceinline__ void multiply_pairs(float (&sum)[4], const uint (&a)[4], uint b0, uint b1)
{
    if (TensorCores<vector_t>::available) {
        TensorCores<vector_t>::multiply(sum, a, b0, b1);
        return;
    }
    int lane = int(threadIdx.x) % 32, row = lane / 4, column = lane % 4 * 2;
    for (int quad = 0; quad < 4; ++quad) {
        uint left[4], right[2][2];
        for (int part = 0; part < 4; ++part) {
            left[part] = __shfl_sync(0xffffffffu, a[part], row * 4 + quad);
        }
        for (int side = 0; side < 2; ++side) {
            right[side][0] = __shfl_sync(0xffffffffu, b0, (column + side) * 4 + quad);
            right[side][1] = __shfl_sync(0xffffffffu, b1, (column + side) * 4 + quad);
        }
        for (int index = 0; index < 16; ++index) { // of a result, which part of k, and which of a pair
            int result = index / 4, part = index / 2 % 2, shift = index % 2 * 16;
            vector_t x, y;
            x.bits = (unsigned short)(left[part * 2 + result / 2] >> shift);
            y.bits = (unsigned short)(right[result % 2][part] >> shift);
            sum[result] += float(x) * float(y);
        }
    }
}
