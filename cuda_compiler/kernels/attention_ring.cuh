// Where queries, keys and values lie in shared memory, who copies them there, and which blocks of positions are worth
// it.
constexpr int GROUPS_OF_WARPS = WARPGROUPS_M * WARPGROUPS_L, THREADS = 128 * (1 + GROUPS_OF_WARPS);
constexpr int TILE_M = 64 * WARPGROUPS_M, TILES = (LENGTH + BLOCK - 1) / BLOCK;
constexpr int STATES = (LENGTH + STATE_BLOCK - 1) / STATE_BLOCK, STATES_EACH = BLOCK / STATE_BLOCK;
constexpr int QK_PANELS = (HEAD_SIZE + 63) / 64, V_PANELS = (VALUE_SIZE + 63) / 64; // of 64 columns, 128 bytes
constexpr int COPY_REGISTERS = GROUPS_OF_WARPS == 2 ? 40 : 32, PRODUCT_REGISTERS = GROUPS_OF_WARPS == 2 ? 232 : 160;
constexpr int Q_BYTES = QK_PANELS * TILE_M * 128, K_BYTES = QK_PANELS * BLOCK * 128, V_BYTES = V_PANELS * BLOCK * 128;
constexpr int K_AT = Q_BYTES, V_AT = K_AT + STAGES * K_BYTES, BARRIERS_AT = V_AT + STAGES * V_BYTES;
constexpr int FLAG_AT = BARRIERS_AT + (1 + 4 * STAGES) * 8, LIST_AT = FLAG_AT + 8;
static_assert(BLOCK % STATE_BLOCK == 0, "a block of positions has whole blocks of the mask");
static_assert(TILES < 1 << 15, "tiles are listed in 15 bits");

// What a block of threads computes: the tile's first row, its head of keys, and which of the open blocks of positions.
struct Tile {
    int row, layer, split, splits, count;
};

// Barriers of the operands in shared memory: when they are there, and when they are no longer needed.
struct Ring {
    uint base;
    __device__ explicit Ring(uint shared) : base(shared) {}
    __device__ uint keys(int stage) const { return base + K_AT + stage * K_BYTES; }
    __device__ uint values(int stage) const { return base + V_AT + stage * V_BYTES; }
    __device__ uint queries_full() const { return base + BARRIERS_AT; }
    __device__ uint keys_full(int stage) const { return base + BARRIERS_AT + 8 + stage * 32; }
    __device__ uint values_full(int stage) const { return keys_full(stage) + 8; }
    __device__ uint keys_empty(int stage) const { return keys_full(stage) + 16; }
    __device__ uint values_empty(int stage) const { return keys_full(stage) + 24; }
    __device__ void make() const
    {
        make_barrier(queries_full(), 128);
        for (int stage = 0; stage < STAGES; ++stage) {
            make_barrier(keys_full(stage), 128);
            make_barrier(values_full(stage), 128);
            make_barrier(keys_empty(stage), 4 * WARPGROUPS_M);
            make_barrier(values_empty(stage), 4 * WARPGROUPS_M);
        }
    }
};

// Starts copying LINES rows of SIZE elements into panels, in chunks of 16 bytes: those from `count` on are zeros.
template <int LINES, int SIZE, typename Row>
__device__ __forceinline__ void copy_to_panels(uint target, const tile_t* source, int count, Row row_start)
{
    constexpr int LANES = SIZE > 64 ? 16 : SIZE > 32 ? 8 : 4, STEP = 128 / LANES;
    int first = int(threadIdx.x) % 128 / LANES, chunk = int(threadIdx.x) % LANES;
    if (chunk >= SIZE / 8) {
        return;
    }
    target += chunk / 8 * (LINES * 128) + place_in_panel(first, chunk % 8);
    #pragma unroll 4
    for (int line = first; line < LINES; line += STEP) {
        bool valid = line < count;
        const tile_t* from = source + (valid ? row_start(line) + chunk * 8 : 0);
        copy_chunk_to(target + (line - first) * 128, from, valid);
    }
    static_assert(STEP % 8 == 0, "all lines of a thread are permuted alike");
}

// What the copying warpgroup does.
__device__ __forceinline__ void copy_operands(
    const Ring& ring, const Tile& tile, const unsigned short* list, const tile_t* q, const tile_t* k, const tile_t* v,
    int batch, PAGE_PARAMETERS const Params& p)
{
    copy_to_panels<TILE_M, HEAD_SIZE>(ring.base, q, p.rows * SHARED - tile.row, [&](int i) {
        int r = tile.row + i;
        return (long long)(r % SHARED) * p.q_head + (long long)(r / SHARED) * p.q_row;
    });
    arrive_with_copies(ring.queries_full());
    int stage = 0, parity = 1; // the first time around, everything is free
    for (int turn = 0; turn < tile.count; ++turn) {
        int position = (list[tile.split + turn * tile.splits] >> 1) * BLOCK;
        Place at = place_of(batch, position, p.k_row, p.v_row, PAGE_ARGUMENTS p);
        const tile_t *keys = k + at.key, *values = v + at.value;
        wait_for_phase(ring.keys_empty(stage), parity);
        copy_to_panels<BLOCK, HEAD_SIZE>(
            ring.keys(stage), keys, LENGTH - position, [&](int i) { return (long long)i * p.k_row; });
        arrive_with_copies(ring.keys_full(stage));
        wait_for_phase(ring.values_empty(stage), parity);
        copy_to_panels<BLOCK, VALUE_SIZE>(
            ring.values(stage), values, LENGTH - position, [&](int i) { return (long long)i * p.v_row; });
        arrive_with_copies(ring.values_full(stage));
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
    wait_for_copies<0>();
}

// Whether some, or all, of a tile's rows are open at a block of positions: 0 for none, 2 for all, else 1.
__device__ __forceinline__ int state_of(
    int block, int row, const unsigned char* states, int batch, int group, const Params& p)
{
    int first = row / SHARED, last = (min(row + TILE_M, p.rows * SHARED) - 1) / SHARED;
    bool any = true, all = (block + 1) * BLOCK <= LENGTH;
#if MASK && !MASK_STATES
    all = false;
#elif MASK
    any = false;
    int heads = p.state_head == 0 ? 1 : SHARED; // one stands for all where they are the same
    for (int head = 0; head < heads; ++head) {
        int above = masked_as(batch) * p.state_batch + (group * SHARED + head) * p.state_head;
        for (int part = first / STATE_ROWS; part <= last / STATE_ROWS; ++part) {
            const unsigned char* line = states + (above * p.state_parts + part) * STATES;
            #pragma unroll
            for (int i = 0; i < STATES_EACH; ++i) {
                int state = line[min(block * STATES_EACH + i, STATES - 1)];
                any |= state != 0;
                all &= state == 2;
            }
        }
    }
#endif
    if (CAUSAL) {
        any &= block * BLOCK <= last;
        all &= (block + 1) * BLOCK - 1 <= first;
    }
    return any ? all ? 2 : 1 : 0;
}

// Lists the blocks that are open, each times two, plus one where the mask changes nothing.
__device__ __forceinline__ int list_tiles(
    unsigned short* list, int* total, int row, const unsigned char* states, int batch, int group, const Params& p)
{
    unsigned short* known = list + TILES;
    for (int block = int(threadIdx.x); block < TILES; block += THREADS) {
        known[block] = (unsigned short)state_of(block, row, states, batch, group, p);
    }
    return list_open_blocks<TILES>(list, known, total);
}
