// What a warp does with a piece of 16 positions whose keys and values are codes of a byte, with a scale for each
// position: the scale of a key multiplies its scores, that of a value the weight of its position, by VALUE_UNIT more,
// so that half precision holds what it would of the values themselves; results are in units of RESULT_UNIT.
//
// Codes become the operands of tensor cores in registers. The terms of a sum may come in any order: a lane takes
// neighbours of a row, which one load brings, and queries and weights are arranged in the same order.

// Words of four codes that a lane has of a row, and how many of them are neighbours.
constexpr int KEY_WORDS = HEAD_SIZE / 16, KEY_RUN = KEY_WORDS % 4 ? 2 : 4;
constexpr int VALUE_WORDS = VALUE_SIZE / 32, VALUE_RUN = VALUE_WORDS % 4 ? VALUE_WORDS % 2 ? 1 : 2 : 4;
constexpr float RESULT_UNIT = 1.0f / (VALUE_UNIT * NUMBER_UNIT);
static_assert(HEAD_SIZE % 32 == 0 && VALUE_SIZE % 32 == 0, "a lane has whole words of each row");

// A lane's part of a piece: of keys, rows l / 4 and l / 4 + 8; of values, rows 2 * (l % 4) and the next, and those 8
// further on.
struct Keys {
    uint key[2][KEY_WORDS];
    float scale[2];
};
struct Values {
    uint value[4][VALUE_WORDS];
    float scale[2];
};

template <int RUN>
struct alignas(RUN * 4) Words {
    uint at[RUN];
};

// A lane's words of a row in shared memory, in runs that lie STEP bytes apart.
template <int RUN, int STEP, int COUNT>
__device__ __forceinline__ void read_row(uint (&words)[COUNT], const unsigned char* source)
{
    #pragma unroll
    for (int run = 0; run < COUNT / RUN; ++run) {
        Words<RUN> found = *reinterpret_cast<const Words<RUN>*>(source + run * STEP);
        #pragma unroll
        for (int i = 0; i < RUN; ++i) {
            words[run * RUN + i] = found.at[i];
        }
    }
}

__device__ __forceinline__ void read_key(Keys& keys, int half_piece, const unsigned char* row)
{
    read_row<KEY_RUN, KEY_RUN * 16>(keys.key[half_piece], row + threadIdx.x % 4 * (KEY_RUN * 4));
}

__device__ __forceinline__ void read_value(Values& values, int which, const unsigned char* row)
{
    read_row<VALUE_RUN, VALUE_RUN * 4>(values.value[which], row + threadIdx.x % 32 / 4 * (VALUE_WORDS * 4));
}

// Which position of a piece a lane's number `which` of values is.
__device__ __forceinline__ int value_place_of(int which)
{
    return int(threadIdx.x) % 4 * 2 + which % 2 + which / 2 * 8;
}

// The first element of a row of keys that a lane has in a word; its four numbers make two pairs of every other one.
__device__ __forceinline__ int first_of_word(int word)
{
    return word / KEY_RUN * (KEY_RUN * 16) + int(threadIdx.x) % 4 * (KEY_RUN * 4) + word % KEY_RUN * 4;
}

__device__ __forceinline__ void load_coded_queries(Queries& query, const tile_t* queries)
{
    #pragma unroll
    for (int set = 0; set < SETS; ++set) {
        #pragma unroll
        for (int word = 0; word < KEY_WORDS; ++word) {
            const tile_t* source = queries + (set * 8 + int(threadIdx.x) % 32 / 4) * Q_PITCH + first_of_word(word);
            query[set][word][0] = uint(source[0].bits) | uint(source[2].bits) << 16;
            query[set][word][1] = uint(source[1].bits) | uint(source[3].bits) << 16;
        }
    }
}

__device__ __forceinline__ void multiply_coded_keys(Scores& score, const Queries& query, const Keys& keys)
{
    uint offset = offset_pair(0.0f);
    Scores chain[2] = {}; // of products that do not wait for each other
    #pragma unroll
    for (int word = 0; word < KEY_WORDS; word += 2) {
        uint upper[4], lower[4];
        bytes_in_units(upper, keys.key[0][word], keys.key[0][word + 1], offset);
        bytes_in_units(lower, keys.key[1][word], keys.key[1][word + 1], offset);
        #pragma unroll
        for (int i = 0; i < 2; ++i) {
            uint part[4] = {upper[2 * i], lower[2 * i], upper[2 * i + 1], lower[2 * i + 1]};
            #pragma unroll
            for (int set = 0; set < SETS; ++set) {
                TensorCores<tile_t>::multiply(chain[i][set], part, query[set][word + i][0], query[set][word + i][1]);
            }
        }
    }
    #pragma unroll
    for (int set = 0; set < SETS; ++set) {
        #pragma unroll
        for (int u = 0; u < 4; ++u) {
            score[set][u] = (chain[0][set][u] + chain[1][set][u]) * (keys.scale[u / 2] / NUMBER_UNIT);
        }
    }
}

// result += values * weight. A lane's results i are those of the elements 2 * i and 2 * i + 1 of its run of each row.
__device__ __forceinline__ void add_coded_values(Rows& rows, const Scores& weight, const Values& values)
{
    uint offset = offset_pair(0.0f), part[SETS][2];
    #pragma unroll
    for (int set = 0; set < SETS; ++set) {
        #pragma unroll
        for (int half_piece = 0; half_piece < 2; ++half_piece) {
            float scale = values.scale[half_piece] * VALUE_UNIT;
            float left = weight[set][half_piece * 2] * scale, right = weight[set][half_piece * 2 + 1] * scale;
            part[set][half_piece] = transposed(pack_pair(left, right));
        }
    }
    #pragma unroll
    for (int word = 0; word < VALUE_WORDS; ++word) {
        uint pairs[2][4]; // of two neighbouring positions: the elements of a word
        #pragma unroll
        for (int half_piece = 0; half_piece < 2; ++half_piece) {
            uint first = values.value[half_piece * 2][word], second = values.value[half_piece * 2 + 1][word];
            bytes_in_units(
                pairs[half_piece], __byte_perm(first, second, 0x5410), __byte_perm(first, second, 0x7632), offset);
        }
        #pragma unroll
        for (int i = 0; i < 2; ++i) {
            uint value[4] = {pairs[0][2 * i], pairs[0][2 * i + 1], pairs[1][2 * i], pairs[1][2 * i + 1]};
            #pragma unroll
            for (int set = 0; set < SETS; ++set) {
                TensorCores<tile_t>::multiply(rows.result[set][word * 2 + i], value, part[set][0], part[set][1]);
            }
        }
    }
}

// The column of a lane's results, by their numbers: of each row they are neighbours.
__device__ __forceinline__ int coded_lane_column(int i, int u)
{
    return int(threadIdx.x) % 32 / 4 * (VALUE_WORDS * 4) + i * 2 + u / 2;
}

// Rounds a row to codes, with all lanes of a warp, and returns the scale, by which its largest number becomes the
// largest code. Without their sign, the bits of floats are in the order of the numbers, NaN last.
template <int SIZE, typename Number>
__device__ __forceinline__ float round_row(unsigned char* code, Number number_at)
{
    int lane = int(threadIdx.x) % 32, largest = 0;
    float number[SIZE / 32];
    #pragma unroll
    for (int i = 0; i < SIZE / 32; ++i) {
        number[i] = number_at(lane + i * 32);
        largest = max(largest, __float_as_int(number[i]) & 0x7fffffff);
    }
    #pragma unroll
    for (int distance = 16; distance; distance /= 2) {
        largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, distance));
    }
    float scale = __int_as_float(largest) * (1.0f / LARGEST_CODE);
    scale = scale < LEAST_SCALE ? LEAST_SCALE : scale;
    #pragma unroll
    for (int i = 0; i < SIZE / 32; ++i) {
        float rounded = number[i] * (1.0f / scale);
        code[lane + i * 32] =
            (unsigned char)(CODE_KIND == CODES_FLOAT ? float8_e4m3_code(rounded) : int(rintf(rounded)));
    }
    return scale;
}
