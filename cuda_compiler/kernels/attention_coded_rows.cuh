// What a warp does with a piece of 16 positions whose keys and values are codes of a byte, with a scale for each
// position: the scale of a key multiplies its scores, that of a value the weight of its position, by VALUE_UNIT more,
// so that half precision holds what it would of the values themselves.
//
// Codes become the operands of tensor cores in registers. Where these take them as they are, signed ones are above what
// they stand for, and the products of the code of zero are subtracted. The terms of a sum may come in any order: a lane
// takes neighbours of a row, which one load brings, and queries and weights are arranged in the same order.

// Words of four codes that a lane has of a row, and how many of them are neighbours.
constexpr int KEY_WORDS = HEAD_SIZE / 16, KEY_RUN = KEY_WORDS % 4 ? 2 : 4;
constexpr int VALUE_WORDS = VALUE_SIZE / 32, VALUE_RUN = VALUE_WORDS % 4 ? VALUE_WORDS % 2 ? 1 : 2 : 4;
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

// A lane's words of a row of a piece in shared memory: from a byte on, in runs that lie STEP bytes apart.
template <int PITCH, int RUN, int STEP, int COUNT>
__device__ __forceinline__ void read_row(uint (&words)[COUNT], const unsigned char* rows, int row, int byte)
{
    #pragma unroll
    for (int run = 0; run < COUNT / RUN; ++run) {
        int place = byte + run * STEP ^ permutation_of<PITCH>(row);
        Words<RUN> found = *reinterpret_cast<const Words<RUN>*>(rows + row * PITCH + place);
        #pragma unroll
        for (int i = 0; i < RUN; ++i) {
            words[run * RUN + i] = found.at[i];
        }
    }
}

__device__ __forceinline__ void read_key(Keys& keys, int half_piece, const unsigned char* rows)
{
    int row = lane_place(half_piece * 2), byte = int(threadIdx.x) % 4 * (KEY_RUN * 4);
    read_row<K_PITCH, KEY_RUN, KEY_RUN * 16>(keys.key[half_piece], rows, row, byte);
}

// Which position of a piece a lane's number `which` of values is.
__device__ __forceinline__ int value_place_of(int which)
{
    return int(threadIdx.x) % 4 * 2 + which % 2 + which / 2 * 8;
}

__device__ __forceinline__ void read_value(Values& values, int which, const unsigned char* rows)
{
    int byte = int(threadIdx.x) % 32 / 4 * (VALUE_WORDS * 4);
    read_row<V_PITCH, VALUE_RUN, VALUE_RUN * 4>(values.value[which], rows, value_place_of(which), byte);
}

// Where a column of queries lies: of every four neighbours, those that meet in a pair.
__device__ __forceinline__ int coded_query_place(int column)
{
    return column / 4 * 4 + column % 2 * 2 + column % 4 / 2;
}

// Puts a thread's part of the queries where all threads can read them.
template <typename Own>
__device__ __forceinline__ void leave_coded(const Own& own, tile_t* queries)
{
    own.each([&](int row, int column, float value) {
        queries[row * Q_PITCH + coded_query_place(column)] = tile_t(value);
    });
}

// Adds what rows of codes that are all zero make, where these are taken as they are.
__device__ __forceinline__ void multiply_zeros(float (&sum)[4], uint b0, uint b1)
{
    if (AS_THEY_ARE) {
        constexpr uint zeros = equal_codes(ABOVE, 0), all[4] = {zeros, zeros, zeros, zeros};
        TensorCores<tile_t>::multiply(sum, all, b0, b1);
    }
}

// The queries, and less what they make of a key whose codes are all zero.
struct CodedQueries {
    Queries query;
    Scores less;

    __device__ __forceinline__ void load(const tile_t* queries)
    {
        int lane = int(threadIdx.x) % 32;
        #pragma unroll
        for (int set = 0; set < SETS; ++set) {
            const tile_t* own = queries + (set * 8 + lane / 4) * Q_PITCH + lane % 4 * (KEY_RUN * 4);
            float found[2][4] = {}; // of two chains of products
            #pragma unroll
            for (int word = 0; word < KEY_WORDS; word += 2) {
                const tile_t* source = own + word / KEY_RUN * (KEY_RUN * 16) + word % KEY_RUN * 4;
                Words<4> pairs = *reinterpret_cast<const Words<4>*>(source);
                #pragma unroll
                for (int i = 0; i < 4; ++i) {
                    uint raised = AS_THEY_ARE ? Numbers::mul(pairs.at[i], pair_of(RAISED)) : pairs.at[i];
                    query[set][word + i / 2][i % 2] = raised;
                }
                #pragma unroll
                for (int i = 0; i < 2; ++i) {
                    multiply_zeros(found[i], query[set][word + i][0], query[set][word + i][1]);
                }
            }
            #pragma unroll
            for (int u = 0; u < 4; ++u) {
                less[set][u] = -(found[0][u] + found[1][u]);
            }
        }
    }
};

__device__ __forceinline__ void multiply_coded_keys(Scores& score, const CodedQueries& queries, const Keys& keys)
{
    const Queries& query = queries.query;
    Scores chain[2]; // of products that do not wait for each other
    #pragma unroll
    for (int index = 0; index < SETS * 4; ++index) {
        chain[0][index / 4][index % 4] = queries.less[index / 4][index % 4];
        chain[1][index / 4][index % 4] = 0.0f;
    }
    #pragma unroll
    for (int word = 0; word < KEY_WORDS; word += 2) {
        uint upper[4], lower[4];
        bytes_as_operand(upper, keys.key[0][word], keys.key[0][word + 1]);
        bytes_as_operand(lower, keys.key[1][word], keys.key[1][word + 1]);
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
            score[set][u] = (chain[0][set][u] + chain[1][set][u]) * (keys.scale[u / 2] / CODE_UNIT);
        }
    }
}

// result += values * weight. A lane's results i are those of the elements 2 * i and 2 * i + 1 of its run of each row.
__device__ __forceinline__ void add_coded_values(Rows& rows, const Scores& weight, const Values& values)
{
    uint part[SETS][2];
    #pragma unroll
    for (int set = 0; set < SETS; ++set) {
        #pragma unroll
        for (int half_piece = 0; half_piece < 2; ++half_piece) {
            float scale = values.scale[half_piece] * (VALUE_UNIT * RAISED);
            float left = weight[set][half_piece * 2] * scale, right = weight[set][half_piece * 2 + 1] * scale;
            part[set][half_piece] = transposed(pack_pair(left, right));
        }
        multiply_zeros(rows.result[set][VALUE_TILES], part[set][0], part[set][1]);
    }
    #pragma unroll
    for (int word = 0; word < VALUE_WORDS; ++word) {
        uint pairs[2][4]; // of two neighbouring positions: the elements of a word
        #pragma unroll
        for (int half_piece = 0; half_piece < 2; ++half_piece) {
            uint first = values.value[half_piece * 2][word], second = values.value[half_piece * 2 + 1][word];
            bytes_as_operand(
                pairs[half_piece], __byte_perm(first, second, 0x5410), __byte_perm(first, second, 0x7632));
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

// A lane's results, by their numbers: what they are, and in which column; of each row they are neighbours.
__device__ __forceinline__ float coded_lane_result(const Rows& rows, int set, int e, int u)
{
    float zero = AS_THEY_ARE ? rows.result[set][VALUE_TILES][u] : 0.0f;
    return (rows.result[set][e][u] - zero) * (1.0f / (VALUE_UNIT * CODE_UNIT));
}
__device__ __forceinline__ int coded_lane_column(int i, int u)
{
    return int(threadIdx.x) % 32 / 4 * (VALUE_WORDS * 4) + i * 2 + u / 2;
}

// Rounds a row to codes, with all lanes of a warp, and returns the scale, by which its largest number becomes the
// largest code; codes lie permuted in a piece. Without their sign, the bits of floats are in the order of the numbers,
// NaN last.
template <int SIZE, typename Number>
__device__ __forceinline__ float round_row(unsigned char* code, Number number_at, int permutation = 0)
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
        code[lane + (i * 32 ^ permutation)] =
            (unsigned char)(CODE_KIND == CODES_FLOAT ? float8_e4m3_code(rounded) : int(rintf(rounded)));
    }
    return scale;
}
