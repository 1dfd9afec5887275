// Where queries, keys and values lie in shared memory, who copies them there, and which blocks of positions are worth
// it.
constexpr int GROUPS_OF_WARPS = WARPGROUPS_M * WARPGROUPS_L, MULTIPLYING = 128 * GROUPS_OF_WARPS;
constexpr int THREADS = MULTIPLYING + 128; // the last warpgroup copies: a whole one, which leaves others its registers
constexpr int TILE_M = 64 * WARPGROUPS_M, TILES = (LENGTH + BLOCK - 1) / BLOCK;
constexpr int STATES = (LENGTH + STATE_BLOCK - 1) / STATE_BLOCK, STATES_EACH = BLOCK / STATE_BLOCK;
constexpr int QK_PANELS = (HEAD_SIZE + 63) / 64, V_PANELS = (VALUE_SIZE + 63) / 64; // of 64 columns, 128 bytes
constexpr int COPY_REGISTERS = 40, PRODUCT_REGISTERS = 232; // of 168 that threads begin with
static_assert(GROUPS_OF_WARPS == 2, "registers are for three warpgroups");
constexpr int Q_BYTES = QK_PANELS * TILE_M * 128, K_BYTES = QK_PANELS * BLOCK * 128, V_BYTES = V_PANELS * BLOCK * 128;
constexpr int K_AT = Q_BYTES, V_AT = K_AT + STAGES * K_BYTES, BARRIERS_AT = V_AT + STAGES * V_BYTES;
constexpr int FLAG_AT = BARRIERS_AT + (1 + 4 * STAGES) * 8, LIST_AT = FLAG_AT + 8;
static_assert(BLOCK % STATE_BLOCK == 0, "a block of positions has whole blocks of the mask");
static_assert(TILES < 1 << 15, "tiles are listed in 15 bits");

// What a block of threads computes: the tile's first row, its head of keys, and its share of the open blocks of
// positions. The last come first: they are those that a causal mask closes in part, and what it closes is read while
// the first operands are on their way.
struct Tile {
    int row, layer, open, split, splits, count;
    const unsigned short* list;

    __device__ int batch() const { return layer / GROUPS; }
    __device__ int group() const { return layer % GROUPS; }

    // The entry of the list for a turn.
    __device__ int entry(int turn) const { return list[open - 1 - split - turn * splits]; }
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
        make_barrier(queries_full(), MULTIPLYING);
        for (int stage = 0; stage < STAGES; ++stage) {
            make_barrier(keys_full(stage), 1);
            make_barrier(values_full(stage), 1);
            make_barrier(keys_empty(stage), 4 * WARPGROUPS_M);
            make_barrier(values_empty(stage), 4 * WARPGROUPS_M);
        }
    }
};

// Starts copying the tile's queries into panels, by all warps that multiply, in chunks of 16 bytes. Rows past the last
// are zeros.
__device__ __forceinline__ void copy_queries(const Ring& ring, const Tile& tile, const tile_t* q, const Params& p)
{
    constexpr int LANES = HEAD_SIZE > 64 ? 16 : HEAD_SIZE > 32 ? 8 : 4, STEP = MULTIPLYING / LANES;
    static_assert(STEP % 8 == 0, "all lines of a thread are permuted alike");
    int first = int(threadIdx.x) / LANES, chunk = int(threadIdx.x) % LANES;
    if (chunk < HEAD_SIZE / 8) {
        uint target = ring.base + chunk / 8 * (TILE_M * 128) + place_in_panel(first, chunk % 8);
        #pragma unroll 4
        for (int line = first; line < TILE_M; line += STEP) {
            int r = tile.row + line;
            bool valid = r < p.rows * SHARED;
            long long from = (long long)(r % SHARED) * p.q_head + (long long)(r / SHARED) * p.q_row + chunk * 8;
            copy_chunk_to(target + (line - first) * 128, q + (valid ? from : 0), valid);
        }
    }
    arrive_with_copies(ring.queries_full());
}

// Where keys and values are for the copy engine: a layer of lines of one position each, of an element of the batch or
// of a page. What all elements of the batch or all heads share is there once.
struct Lines {
    const TensorMap& map;
    int layer, outer;

    template <int PANELS>
    __device__ __forceinline__ void copy(uint target, uint barrier, int page, int line) const
    {
        arrive_and_expect(barrier, PANELS * BLOCK * 128);
        #pragma unroll
        for (int panel = 0; panel < PANELS; ++panel) {
            copy_panel(target + panel * BLOCK * 128, map, barrier, panel * 64, line, layer, page < 0 ? outer : page);
        }
    }
};

// Where the blocks of positions of 32 turns lie, of which each lane looks up one.
struct Places {
    int own_line, own_page = -1;
    __device__ __forceinline__ void look_up(const Tile& tile, int turn, PAGE_PARAMETERS const Params& p)
    {
        turn += int(threadIdx.x) % 32;
        own_line = turn < tile.count ? (tile.entry(turn) >> 1) * BLOCK : 0;
#ifdef PAGE
        own_page = turn < tile.count ? int(page_of(0, 0, tile.batch(), own_line / PAGE, PAGE_ARGUMENTS p)) : 0;
        own_line %= PAGE;
#endif
    }
    __device__ __forceinline__ int line(int turn) const { return __shfl_sync(0xffffffffu, own_line, turn % 32); }
    __device__ __forceinline__ int page(int turn) const { return __shfl_sync(0xffffffffu, own_page, turn % 32); }
};

// What one warp does: it asks for the keys and values of open blocks of positions, as stages become free.
__device__ __forceinline__ void copy_positions(
    const Ring& ring, const Tile& tile, const TensorMap& k, const TensorMap& v, PAGE_PARAMETERS const Params& p)
{
    Lines keys{k, p.k_head ? tile.group() : 0, p.k_batch ? tile.batch() : 0};
    Lines values{v, p.v_head ? tile.group() : 0, p.v_batch ? tile.batch() : 0};
    Places places;
    places.look_up(tile, 0, PAGE_ARGUMENTS p);
    if (PAGES_READY) {
        wait_for_previous_grid();
    }
    int stage = 0, parity = 1; // the first time around, everything is free
    for (int turn = 0; turn < tile.count; ++turn) {
        if (turn > 0 && turn % 32 == 0) {
            places.look_up(tile, turn, PAGE_ARGUMENTS p);
        }
        int line = places.line(turn), page = places.page(turn);
        if (threadIdx.x % 32 == 0) {
            wait_for_phase(ring.keys_empty(stage), parity);
            keys.copy<QK_PANELS>(ring.keys(stage), ring.keys_full(stage), page, line);
            wait_for_phase(ring.values_empty(stage), parity);
            values.copy<V_PANELS>(ring.values(stage), ring.values_full(stage), page, line);
        }
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
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
