// Codes of CODE_BITS bits, 4 or 8, in units of UNIT neighbours along k, and what makes weights of them:
// (number - zero) * scale + bias, which here is number * scale + offset. A unit lies within one group, and is 8 bytes
// or 16. CODE_IS_SIGNED, CODE_IS_FLOAT (e4m3 or e5m2, by HALF_SHIFT) and CODEBOOK say what the number of a code is;
// SCALES, BIASES, ZEROS and CODEBOOK name pointers among CODE_PARAMETERS.

constant constexpr int UNIT_BYTES = UNIT * CODE_BITS / 8;
constant constexpr int FOURS = UNIT / 4;

#ifdef CODEBOOK
#define BOOK_PARAMETER threadgroup const float* book,
#define BOOK_ARGUMENT book,
#else
#define BOOK_PARAMETER
#define BOOK_ARGUMENT
#endif

#if UNIT * CODE_BITS == 128
typedef uint4 words_t;
#else
typedef uint2 words_t;
#endif

// Four neighbours of a unit of codes as numbers. An 8-bit float becomes a half with the same bits but for its
// exponent's bias, which is a factor of the scale.
METAL_FUNC float4 four_numbers(words_t words, BOOK_PARAMETER int four)
{
#if CODE_BITS == 4
    int4 codes = int4(uint4(words[four / 2]) >> (uint4(0, 4, 8, 12) + uint4(16 * (four % 2)))) & 15;
#ifdef CODEBOOK
    return float4(book[codes.x], book[codes.y], book[codes.z], book[codes.w]);
#else
    return float4(codes);
#endif
#elif CODE_IS_FLOAT
    ushort4 bits = ushort4(as_type<uchar4>(words[four]));
    return float4(as_type<half4>(ushort4(((bits & ushort(0x80)) << 8) | ((bits & ushort(0x7f)) << HALF_SHIFT))));
#elif CODE_IS_SIGNED
    return float4(as_type<char4>(words[four]));
#else
    return float4(as_type<uchar4>(words[four]));
#endif
}

// Where the group of a unit begins that starts at k.
METAL_FUNC int group_of(int k)
{
    return GROUP_SIZE == 0 ? 0 : k / GROUP_SIZE;
}

METAL_FUNC float scale_of(CODE_PARAMETERS int row, int group, constant Params& p)
{
    return float(SCALES[row / BLOCK_ROWS * p.scale_row + group * p.scale_group]) * SCALE_FACTOR;
}

#if HAS_OFFSET
// What is added to the product of number and scale.
METAL_FUNC float offset_of(float scale, CODE_PARAMETERS int row, int group, constant Params& p)
{
#ifdef BIASES
    float bias = float(BIASES[row / BLOCK_ROWS * p.bias_row + group * p.bias_group]);
#else
    float bias = 0.0f;
#endif
#if ZERO_BITS == 4
    int place = group * p.zero_group;
    int pair = int(ZEROS[row / BLOCK_ROWS * p.zero_row + place / 2]);
    return fma(-scale, float((pair >> (place % 2 * 4)) & 15), bias);
#elif ZERO_BITS == 8
    return fma(-scale, float(ZEROS[row / BLOCK_ROWS * p.zero_row + group * p.zero_group]), bias);
#else
    return fma(-scale, ZERO, bias);
#endif
}
#endif
