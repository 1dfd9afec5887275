// What a warpgroup does with 64 rows of queries: scores, weights and results stay in registers. Lane l of a warp has
// rows l / 4 and l / 4 + 8 of its warp's 16, and of eight columns 2 * (l % 4) and the next.
constexpr float FACTOR = binary_exponent(SCALE);

struct Rows {
    float result[VALUE_SIZE / 8][4] = {}, top[2] = {CLOSED, CLOSED}, sum[2] = {0.0f, 0.0f};
};

// Starts score = query * keys.
__device__ __forceinline__ void start_scores(float (&score)[BLOCK / 8][4], uint64 query, uint64 keys)
{
    #pragma unroll
    for (int d = 0; d < HEAD_SIZE / 16; ++d) {
        uint64 column = d % 4 * 2;
        multiply_keys(
            score, query + d / 4 * (TILE_M * 128 >> 4) + column, keys + d / 4 * (BLOCK * 128 >> 4) + column, d != 0);
    }
}

// Starts result += weight * values.
__device__ __forceinline__ void start_results(Rows& rows, const uint (&weight)[BLOCK / 16][4], uint64 values)
{
    #pragma unroll
    for (int n = 0; n < BLOCK / 16; ++n) {
        multiply_values(rows.result, weight[n], values + n * (16 * 128 >> 4));
    }
}

// The mask of a thread's two rows in a block that is partly open: where its part of the lines begins, and bits for what
// is closed. Bit b of word w is for the position 32 * w + b of those from the thread's first on.
struct Mask {
    const mask_t* line[2];
    uint closed[2][BLOCK / 32];
    __device__ __forceinline__ bool is_closed(int half_row, int offset) const
    {
        return closed[half_row][offset / 32] >> offset % 32 & 1;
    }
};
static_assert(BLOCK % 64 == 0, "four lanes have whole chunks of a line of the mask");

// The position of a thread's number i of a row, from its first on.
__device__ __forceinline__ constexpr int offset_of(int i) { return i / 2 * 8 + i % 2; }

// Bits from `count` on.
__device__ __forceinline__ uint bits_from(int count) { return count >= 32 ? 0 : ~0u << max(count, 0); }

// A bit for each byte of a word that is zero.
__device__ __forceinline__ uint zero_bytes(uint word)
{
    uint zero = ~(((word & 0x7f7f7f7fu) + 0x7f7f7f7fu) | word) >> 7 & 0x01010101u;
    return zero * 0x01020408u >> 24;
}

#if MASK == 1 && MASK_CHUNKS
// Adds what a line of the mask closes, of which each of four lanes reads a fourth.
__device__ __forceinline__ void read_line(uint (&closed)[BLOCK / 32], const mask_t* line, int position)
{
    constexpr int EACH = BLOCK / 4;
    int lane = int(threadIdx.x) % 32, first = lane % 4 * EACH;
    uint own = 0;
    #pragma unroll
    for (int at = 0; at < EACH; at += 16) {
        Pack<uint8, 16> chunk = {};
        if (LENGTH % BLOCK == 0 || position + first + at < LENGTH) {
            chunk = load_pack<16>(reinterpret_cast<const uint8*>(line) + first + at);
        }
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
            own |= zero_bytes(chunk.words[i]) << (at + i * 4);
        }
    }
    #pragma unroll
    for (int i = 0; i < 4; ++i) {
        closed[i * EACH / 32] |= __shfl_sync(0xffffffffu, own, lane / 4 * 4 + i) << i * EACH % 32;
    }
}
#endif

// Finds what is closed, by booleans, by order, or past the last position.
__device__ __forceinline__ void find_closed(Mask& found, const mask_t* mask, int row, int position, const Params& p)
{
    int lane = int(threadIdx.x) % 32, own_offset = lane % 4 * 2;
    #pragma unroll
    for (int half_row = 0; half_row < 2; ++half_row) {
        int r = min(row + lane / 4 + half_row * 8, p.rows * SHARED - 1), own = r / SHARED;
        const mask_t* line =
            mask + (long long)(r % SHARED) * p.mask_head + (long long)own * p.mask_row + position * MASK_STEP;
        uint(&closed)[BLOCK / 32] = found.closed[half_row];
        #pragma unroll
        for (int word = 0; word < BLOCK / 32; ++word) {
            int first = position + word * 32;
            closed[word] = LENGTH % BLOCK == 0 ? 0 : bits_from(LENGTH - first);
            closed[word] |= CAUSAL ? bits_from(own + 1 - first) : 0;
        }
#if MASK == 1 && MASK_CHUNKS
        read_line(closed, line, position);
#endif
        #pragma unroll
        for (int word = 0; word < BLOCK / 32; ++word) {
            closed[word] >>= own_offset;
        }
        line += own_offset * MASK_STEP;
#if MASK == 1 && !MASK_CHUNKS
        #pragma unroll
        for (int i = 0; i < BLOCK / 4; ++i) {
            bool past = LENGTH % BLOCK != 0 && position + own_offset + offset_of(i) >= LENGTH;
            closed[offset_of(i) / 32] |= uint(!past && !line[offset_of(i) * MASK_STEP]) << offset_of(i) % 32;
        }
#endif
        found.line[half_row] = line;
    }
}

// What the mask does to the scores. Minus infinity closes a position.
__device__ __forceinline__ void mask_scores(float (&score)[BLOCK / 8][4], const Mask& found)
{
    #pragma unroll
    for (int half_row = 0; half_row < 2; ++half_row) {
        #pragma unroll
        for (int i = 0; i < BLOCK / 4; ++i) {
            float& value = score[i / 2][half_row * 2 + i % 2];
            bool closed = found.is_closed(half_row, offset_of(i));
#if MASK == 2
            float added = closed ? 0.0f : mask_value(found.line[half_row][offset_of(i) * MASK_STEP]);
            closed |= added <= MASK_CLOSED;
            value += added * (1.0f / SCALE);
#endif
            value = closed ? -__int_as_float(0x7f800000) : value;
        }
    }
}

// Scores become weights relative to the largest score so far; earlier sums have to be multiplied by `shrink`. Maxima
// and sums are computed in several chains, because there are too few warps to hide the latency of one.
__device__ __forceinline__ void soften(Rows& rows, float (&score)[BLOCK / 8][4], float (&shrink)[2])
{
    float top[4], sum[4] = {}, base[2];
    #pragma unroll
    for (int u = 0; u < 4; ++u) {
        top[u] = score[0][u];
        #pragma unroll
        for (int n = 1; n < BLOCK / 8; ++n) {
            top[u] = fmaxf(top[u], score[n][u]);
        }
    }
    #pragma unroll
    for (int half_row = 0; half_row < 2; ++half_row) {
        float largest = quad_max(fmaxf(fmaxf(top[half_row * 2], top[half_row * 2 + 1]), rows.top[half_row]));
        // One while all positions are closed, and all sums zero.
        shrink[half_row] = power_of_two((rows.top[half_row] - largest) * FACTOR);
        base[half_row] = largest * FACTOR;
        rows.top[half_row] = largest;
    }
    #pragma unroll
    for (int n = 0; n < BLOCK / 8; ++n) {
        #pragma unroll
        for (int u = 0; u < 4; ++u) {
            score[n][u] = power_of_two(fmaf(score[n][u], FACTOR, -base[u / 2]));
            sum[u] += score[n][u];
        }
    }
    #pragma unroll
    for (int half_row = 0; half_row < 2; ++half_row) {
        rows.sum[half_row] = rows.sum[half_row] * shrink[half_row] + (sum[half_row * 2] + sum[half_row * 2 + 1]);
    }
}

__device__ __forceinline__ void scale_results(Rows& rows, const float (&factor)[2])
{
    #pragma unroll
    for (int e = 0; e < VALUE_SIZE / 8; ++e) {
        #pragma unroll
        for (int u = 0; u < 4; ++u) {
            rows.result[e][u] *= factor[u / 2];
        }
    }
}

__device__ __forceinline__ void pack_scores(uint (&weight)[BLOCK / 16][4], const float (&score)[BLOCK / 8][4])
{
    #pragma unroll
    for (int n = 0; n < BLOCK / 16; ++n) {
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
            weight[n][i] = pack_pair(score[2 * n + i / 2][i % 2 * 2], score[2 * n + i / 2][i % 2 * 2 + 1]);
        }
    }
}

// Where a warpgroup is in the ring: its turn, the turn's stage, and the parity of the stage's phase.
struct Turn {
    int number, stage, parity;
    __device__ explicit Turn(int first) : number(first), stage(first % STAGES), parity(first / STAGES & 1) {}
    __device__ void next()
    {
        number += WARPGROUPS_L;
        stage += WARPGROUPS_L;
        if (stage >= STAGES) {
            stage -= STAGES;
            parity ^= 1;
        }
    }
};
static_assert(WARPGROUPS_L <= STAGES, "a turn goes around the ring at most once");

// What a warpgroup holds from turn to turn: the scores of a block of positions, and the weights of the block before
// until they have been multiplied by its values.
struct Multiplier {
    // Of two warpgroups one computes weights while the other multiplies. They wait for their turns at barriers FIRST
    // and the next.
    static constexpr int FIRST = 3;
    static constexpr bool ALTERNATING = WARPGROUPS_M == 2;
    const Ring& ring;
    const Tile& tile;
    const mask_t* mask;
    const Params& p;
    int warpgroup, row;
    bool is_open;
    uint64 query, keys, values;
    Turn turn;
    Mask found;
    float score[BLOCK / 8][4], shrink[2];
    uint weight[BLOCK / 16][4];

    __device__ Multiplier(const Ring& ring, const Tile& tile, int warpgroup, const mask_t* mask, const Params& p)
        : ring(ring), tile(tile), mask(mask), p(p), warpgroup(warpgroup), turn(warpgroup / WARPGROUPS_M)
    {
        int own = warpgroup % WARPGROUPS_M * 64;
        row = tile.row + own + int(threadIdx.x) / 32 % 4 * 16;
        query = matrix_descriptor(ring.base + own * 128);
        keys = matrix_descriptor(ring.keys(0));
        values = matrix_descriptor(ring.values(0), BLOCK * 128);
    }

    __device__ bool has_turn() const { return turn.number < tile.count; }

    __device__ void multiply_by_keys()
    {
        wait_for_phase(ring.keys_full(turn.stage), turn.parity);
        begin_products();
        start_scores(score, query, keys + turn.stage * (K_BYTES >> 4));
        commit_products();
    }

    __device__ void multiply_by_values(Rows& rows, const Turn& of)
    {
        wait_for_phase(ring.values_full(of.stage), of.parity);
        begin_products();
        start_results(rows, weight, values + of.stage * (V_BYTES >> 4));
        commit_products();
    }

    // Finds out what the mask does in this turn.
    __device__ void look_at_mask()
    {
        int listed = tile.entry(turn.number);
        is_open = listed & 1;
        if (!is_open) {
            find_closed(found, mask, row, (listed >> 1) * BLOCK, p);
        }
    }

    // Waits for the scores, with PENDING later groups of products on their way, and makes weights of them.
    template <int PENDING>
    __device__ void weigh(Rows& rows)
    {
        wait_for_products<PENDING>();
        arrive_by_warp(ring.keys_empty(turn.stage));
        if (!is_open) {
            mask_scores(score, found);
        }
        soften(rows, score, shrink);
    }

    __device__ void let_other_go_first() const
    {
        if (ALTERNATING && warpgroup == 1 && turn.number + 1 < tile.count) {
            arrive_at(FIRST, 256);
        }
    }

    __device__ void wait_for_other() const
    {
        if (ALTERNATING) {
            synchronize(FIRST + warpgroup, 256);
        }
    }

    __device__ void let_other_go() const
    {
        if (ALTERNATING && (warpgroup == 0 || turn.number + 1 < tile.count)) {
            arrive_at(FIRST + 1 - warpgroup, 256);
        }
    }
};

// Multiplies the open blocks of positions that are the warpgroup's turn.
__device__ __forceinline__ void multiply_tiles(
    Rows& rows, const Ring& ring, const Tile& tile, int warpgroup, const mask_t* mask, const Params& p)
{
    Multiplier work(ring, tile, warpgroup, mask, p);
    if (work.has_turn()) {
        work.look_at_mask();
    }
    wait_for_phase(ring.queries_full(), 0);
    publish_to_products();
    if (!work.has_turn()) {
        return;
    }
    work.let_other_go_first();
    work.multiply_by_keys();
    work.weigh<0>(rows);
    pack_scores(work.weight, work.score);
    Turn before = work.turn;
    for (work.turn.next(); work.has_turn(); work.turn.next()) {
        work.wait_for_other();
        work.multiply_by_keys();
        work.multiply_by_values(rows, before);
        work.let_other_go();
        work.look_at_mask();
        work.weigh<1>(rows);
        wait_for_products<0>();
        arrive_by_warp(ring.values_empty(before.stage));
        if (__any_sync(0xffffffffu, work.shrink[0] != 1.0f || work.shrink[1] != 1.0f)) {
            scale_results(rows, work.shrink);
        }
        pack_scores(work.weight, work.score);
        before = work.turn;
    }
    work.multiply_by_values(rows, before);
    wait_for_products<0>();
}
