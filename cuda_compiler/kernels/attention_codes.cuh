// Attention of few rows over many positions whose keys and values are codes of a byte, with a scale for each head and position,
// as in a decode step: the algorithm of attention_decode.cuh. The scale of a key multiplies its scores, that of a value the
// weight of its position, by VALUE_UNIT more, so that half precision holds what it would of the values themselves.
//
// Codes go from memory to registers, where they become the numbers that tensor cores multiply: sums take their terms in any
// order, so a lane reads the neighbours that a row has in 16 bytes, and what it multiplies them by lies accordingly. The next
// keys are on their way once these have been multiplied, and so are the next values. FRESH keys and values are rounded to codes
// here: each block computes them, since whichever has their positions needs them, and one writes them to their places. Grid: as
// in attention_decode.cuh.
constexpr int KEY_WORDS = HEAD_SIZE / 16, KEY_RUN = KEY_WORDS % 4 ? 2 : 4;      // of a row, a lane's; and those side by side
constexpr int VALUE_WORDS = VALUE_SIZE / 32, VALUE_RUN = VALUE_WORDS % 4 ? VALUE_WORDS % 2 ? 1 : 2 : 4;
constexpr int NEW = HEAD_SIZE + VALUE_SIZE;
static_assert(HEAD_SIZE % 32 == 0 && VALUE_SIZE % 32 == 0, "a lane has whole words of each row");

// What a lane has of a piece: of keys the rows l / 4 and l / 4 + 8; of values 2 * (l % 4), the next, and both 8 further on.
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

__device__ __forceinline__ Words<1> load_words(const Words<1>* source) { return {__ldcg(reinterpret_cast<const uint*>(source))}; }
__device__ __forceinline__ Words<2> load_words(const Words<2>* source)
{
    uint2 words = __ldcg(reinterpret_cast<const uint2*>(source));
    return {words.x, words.y};
}
__device__ __forceinline__ Words<4> load_words(const Words<4>* source)
{
    uint4 words = __ldcg(reinterpret_cast<const uint4*>(source));
    return {words.x, words.y, words.z, words.w};
}

// A lane's words of a row, in runs that lie STEP bytes apart; from shared memory, or past the level-1 cache from that of the device.
template <bool SHARED_ROW, int RUN, int STEP, int COUNT>
__device__ __forceinline__ void read_row(uint (&words)[COUNT], const unsigned char* source)
{
    #pragma unroll
    for (int run = 0; run < COUNT / RUN; ++run) {
        const Words<RUN>* from = reinterpret_cast<const Words<RUN>*>(source + run * STEP);
        Words<RUN> found = SHARED_ROW ? *from : load_words(from);
        #pragma unroll
        for (int i = 0; i < RUN; ++i) {
            words[run * RUN + i] = found.at[i];
        }
    }
}

template <bool SHARED_ROW>
__device__ __forceinline__ void read_key(Keys& keys, int half_piece, const unsigned char* row)
{
    read_row<SHARED_ROW, KEY_RUN, KEY_RUN * 16>(keys.key[half_piece], row + threadIdx.x % 4 * (KEY_RUN * 4));
}

template <bool SHARED_ROW>
__device__ __forceinline__ void read_value(Values& values, int which, const unsigned char* row)
{
    read_row<SHARED_ROW, VALUE_RUN, VALUE_RUN * 4>(values.value[which], row + threadIdx.x % 32 / 4 * (VALUE_WORDS * 4));
}

// Which position of a piece a lane's number `which` of values is.
__device__ __forceinline__ int value_place_of(int which) { return int(threadIdx.x) % 4 * 2 + which % 2 + which / 2 * 8; }

// A position, or the last one where there is none any more: the last block may hold pieces behind it.
__device__ __forceinline__ int existing(int position) { return LENGTH % BLOCK == 0 ? position : min(position, LENGTH - 1); }

// Starts reading the keys, or values, of a piece from a position on.
__device__ __forceinline__ void read_keys(
    Keys& keys, const unsigned char* k, const k_scale_t* scales, int position)
{
    #pragma unroll
    for (int half_piece = 0; half_piece < 2; ++half_piece) {
        int at = existing(position + lane_place(half_piece * 2));
        read_key<false>(keys, half_piece, k + (long long)at * K_ROW);
        keys.scale[half_piece] = float(scales[(long long)at * K_SCALE_ROW]);
    }
}

__device__ __forceinline__ void read_values(
    Values& values, const unsigned char* v, const v_scale_t* scales, int position)
{
    #pragma unroll
    for (int which = 0; which < 4; ++which) {
        int at = existing(position + value_place_of(which));
        read_value<false>(values, which, v + (long long)at * V_ROW);
    }
    #pragma unroll
    for (int half_piece = 0; half_piece < 2; ++half_piece) {
        int at = existing(position + lane_place(half_piece * 2));
        values.scale[half_piece] = float(scales[(long long)at * V_SCALE_ROW]);
    }
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
    uint zero = zero_pair(0.0f);
    #pragma unroll
    for (int set = 0; set < SETS; ++set) {
        score[set][0] = score[set][1] = score[set][2] = score[set][3] = 0.0f;
    }
    #pragma unroll
    for (int word = 0; word < KEY_WORDS; word += 2) {
        uint upper[4], lower[4];
        bytes_as_numbers(upper, keys.key[0][word], keys.key[0][word + 1], zero);
        bytes_as_numbers(lower, keys.key[1][word], keys.key[1][word + 1], zero);
        #pragma unroll
        for (int i = 0; i < 2; ++i) {
            uint part[4] = {upper[2 * i], lower[2 * i], upper[2 * i + 1], lower[2 * i + 1]};
            #pragma unroll
            for (int set = 0; set < SETS; ++set) {
                TensorCores<tile_t>::multiply(score[set], part, query[set][word + i][0], query[set][word + i][1]);
            }
        }
    }
    #pragma unroll
    for (int set = 0; set < SETS; ++set) {
        #pragma unroll
        for (int u = 0; u < 4; ++u) {
            score[set][u] *= keys.scale[u / 2];
        }
    }
}

// result += values * weight. Number i of a lane's results is that of the elements 2 * i and the next of its run of each row.
__device__ __forceinline__ void add_coded_values(Rows& rows, const Scores& weight, const Values& values)
{
    uint zero = zero_pair(0.0f), part[SETS][2];
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
            bytes_as_numbers(
                pairs[half_piece], __byte_perm(first, second, 0x5410), __byte_perm(first, second, 0x7632), zero);
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

#if FRESH
// New keys and values, side by side, and what becomes of them.
struct Fresh {
    float number[FRESH][NEW], key_scale[FRESH], value_scale[FRESH];
    alignas(16) unsigned char code[FRESH][NEW];
};

__device__ __forceinline__ void compute_fresh(Fresh& fresh, int batch, int group, OPERAND_PARAMETERS const Params& p)
{
    for (int index = int(threadIdx.x); index < FRESH * NEW; index += THREADS) {
        int row = index / NEW, column = index % NEW;
        fresh.number[row][column] = column < HEAD_SIZE
            ? key_value(batch, group, row, column, OPERAND_ARGUMENTS p)
            : value_value(batch, group, row, column - HEAD_SIZE, OPERAND_ARGUMENTS p);
    }
}

// Rounds a row to codes beside its largest number, with all lanes of a warp; gives the scale. Bits of numbers without a sign
// are in the order of these, NaN last.
template <int SIZE>
__device__ __forceinline__ float round_row(unsigned char* code, const float* number)
{
    int lane = int(threadIdx.x) % 32, largest = 0;
    for (int column = lane; column < SIZE; column += 32) {
        largest = max(largest, __float_as_int(number[column]) & 0x7fffffff);
    }
    #pragma unroll
    for (int distance = 16; distance; distance /= 2) {
        largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, distance));
    }
    float scale = __int_as_float(largest) * (1.0f / LARGEST_CODE);
    scale = scale < LEAST_SCALE ? LEAST_SCALE : scale;
    for (int column = lane; column < SIZE; column += 32) {
        float rounded = number[column] * (1.0f / scale);
        code[column] = (unsigned char)(CODE_KIND == CODES_FLOAT ? float8_e4m3_code(rounded) : int(rintf(rounded)));
    }
    return scale;
}

__device__ __forceinline__ void round_fresh(Fresh& fresh)
{
    for (int row = int(threadIdx.x) / 32; row < FRESH * 2; row += WARPS) {
        unsigned char* code = fresh.code[row / 2];
        const float* number = fresh.number[row / 2];
        if (row % 2 == 0) {
            fresh.key_scale[row / 2] = float(k_scale_t(round_row<HEAD_SIZE>(code, number)));
        } else {
            fresh.value_scale[row / 2] = float(v_scale_t(round_row<VALUE_SIZE>(code + HEAD_SIZE, number + HEAD_SIZE)));
        }
    }
}

// Writes a new row of codes, and its scale, to their place in memory, if there is such a place.
template <int SIZE, int STEP, int SCALE_STEP, typename S>
__device__ __forceinline__ void write_row(unsigned char* target, S* scales, const unsigned char* code, float scale, int place)
{
    if (place < 0) {
        return;
    }
    for (int word = int(threadIdx.x); word < SIZE / 4; word += THREADS) {
        reinterpret_cast<uint*>(target + (long long)place * STEP)[word] = reinterpret_cast<const uint*>(code)[word];
    }
    if (threadIdx.x == 0) {
        scales[(long long)place * SCALE_STEP] = S(scale);
    }
}

// Puts what is new where it belongs in the keys, or values, of a piece, which may have been read before it was in memory.
__device__ __forceinline__ void patch_keys(Keys& keys, const Fresh& fresh, const int (&places)[FRESH], int position)
{
    #pragma unroll
    for (int row = 0; row < FRESH; ++row) {
        #pragma unroll
        for (int half_piece = 0; half_piece < 2; ++half_piece) {
            if (places[row] - position == lane_place(half_piece * 2)) {
                read_key<true>(keys, half_piece, fresh.code[row]);
                keys.scale[half_piece] = fresh.key_scale[row];
            }
        }
    }
}

__device__ __forceinline__ void patch_values(Values& values, const Fresh& fresh, const int (&places)[FRESH], int position)
{
    #pragma unroll
    for (int row = 0; row < FRESH; ++row) {
        int at = places[row] - position;
        #pragma unroll
        for (int half_piece = 0; half_piece < 2; ++half_piece) {
            if (at == lane_place(half_piece * 2)) {
                values.scale[half_piece] = fresh.value_scale[row];
            }
        }
        #pragma unroll
        for (int which = 0; which < 4; ++which) {
            if (at == value_place_of(which)) {
                read_value<true>(values, which, fresh.code[row] + HEAD_SIZE);
            }
        }
    }
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, SETS == 1 ? 2 : 1) attention_codes(
    OPERAND_PARAMETERS KEPT unsigned char* k, KEPT unsigned char* v, KEPT k_scale_t* k_scales, KEPT v_scale_t* v_scales,
    const mask_t* mask, SINK_PARAMETER const unsigned char* states, float* partial, OUT_T* out, EPILOGUE_PARAMETERS const Params p)
{
    extern __shared__ __align__(128) unsigned char ring[]; // what warps leave
    __shared__ Parts parts;
    __shared__ __align__(16) tile_t queries[SETS * 8 * Q_PITCH];
    int batch = int(blockIdx.z) / GROUPS, group = int(blockIdx.z) % GROUPS;
    if (EARLY) {
        hurry_next_grid();
    }
    if (CLUSTER > 1) {
        announce_to_cluster();
    }
    if (!EARLY) {
        wait_for_previous_grid();
    }
    clear_queries(queries);
    Share share(list_open(states, batch, group, p));
    if (share.is_nobodys()) {
        if (CLUSTER > 1) {
            wait_for_cluster();
        }
        return;
    }
    enter_group(k, v, mask, batch, group, p);
    k_scales += (long long)batch * K_SCALE_BATCH + (long long)group * K_SCALE_HEAD;
    v_scales += (long long)batch * V_SCALE_BATCH + (long long)group * V_SCALE_HEAD;
    Keys keys = {};
    Values values = {};
    Scores added = {};
    if (share.has(0)) {
        read_keys(keys, k, k_scales, share.position(0));
        read_values(values, v, v_scales, share.position(0));
        load_mask(added, mask, share.position(0), share.is_masked(0), p);
    }
    if (EARLY) {
        wait_for_previous_grid();
    }
#if FRESH
    __shared__ Fresh fresh;
    int key_places[FRESH], value_places[FRESH];
    find_places(key_places, value_places, batch, group, OPERAND_ARGUMENTS p);
#endif
    OwnQueries own;
    compute_queries(own, batch, group, OPERAND_ARGUMENTS p);
#if FRESH
    compute_fresh(fresh, batch, group, OPERAND_ARGUMENTS p);
#endif
    leave_queries(queries, own);
    __syncthreads();
#if FRESH
    round_fresh(fresh);
    __syncthreads();
    if (share.is_first()) {
        for (int row = 0; row < FRESH; ++row) {
            write_row<HEAD_SIZE, K_ROW, K_SCALE_ROW>(k, k_scales, fresh.code[row], fresh.key_scale[row], key_places[row]);
            write_row<VALUE_SIZE, V_ROW, V_SCALE_ROW>(
                v, v_scales, fresh.code[row] + HEAD_SIZE, fresh.value_scale[row], value_places[row]);
        }
    }
#endif
    Rows rows;
    Queries query;
    begin_rows(rows);
    load_coded_queries(query, queries);
    for (int turn = 0; share.has(turn); ++turn) {
        int position = share.position(turn);
        bool more = share.has(turn + 1);
#if FRESH
        patch_keys(keys, fresh, key_places, position);
#endif
        Scores score;
        multiply_coded_keys(score, query, keys);
        if (more) { // into the registers of those that were just multiplied
            read_keys(keys, k, k_scales, share.position(turn + 1));
        }
        soften(rows, score, added, position);
        if (more) {
            load_mask(added, mask, share.position(turn + 1), share.is_masked(turn + 1), p);
        }
#if FRESH
        patch_values(values, fresh, value_places, position);
#endif
        add_coded_values(rows, score, values);
        if (more) {
            read_values(values, v, v_scales, share.position(turn + 1));
        }
    }
    if (share.has(0)) {
        leave_rows(rows, ring, parts, 1.0f / VALUE_UNIT, coded_lane_column);
    }
    finish_shares(parts, ring, share, batch, group, SINK_ARGUMENT partial, out, EPILOGUE_ARGUMENTS p);
#if FRESH
    if (share.is_first() && threadIdx.x == 0) {
        report_places(batch, group, OPERAND_ARGUMENTS p);
    }
#endif
}
