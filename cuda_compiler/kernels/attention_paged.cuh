// Attention of few rows over positions in pages, for many texts of very different lengths at once: result[row] = sum over j
// of weight[j] * v[j], the weights being the softmax over j of SCALE * (q[row] . k[j]) + mask[row, j], with a running maximum
// as in FlashAttention (Dao et al., 2022), the positions shared out as in Flash-Decoding (Dao et al., 2023).
//
// A block of threads computes all rows of the SHARED query heads that read one head of keys, over PART positions: however
// long a text is, no block has more to do than another. Positions are taken 16 at a time by single warps, in turns, which
// wait for nobody: each has DEPTH pieces on their way. Parts that the mask closes are not read. The last block of a text to
// finish adds up what all of them have, in order. The queries are computed here. So are FRESH keys and values of each text,
// which this kernel also writes to their pages: wherever a part has such a page, what was read there is replaced. A row that
// is closed everywhere gives zeros.
// Grid: parts in x, batch * heads of keys in z.
constexpr int TILES = (LENGTH + BLOCK - 1) / BLOCK, PART_TILES = PART / BLOCK;
constexpr int PART_PAGES = PART > PAGE ? PART / PAGE : 1, TILE_PIECES = BLOCK / PIECE;
constexpr int RESULTS = ROWS * V_WIDTH;
static_assert(PART % PAGE == 0 || PAGE % PART == 0, "a part is whole pages, or lies in one");
static_assert(PARTS * ROWS * 4 <= WARPS * DEPTH * SLOT_BYTES, "weights of parts lie where pieces were");
static_assert(PAGE % PIECE == 0 && PART_TILES <= 32, "a piece lies in one page, and a lane has a tile");

// What a block has when all of its warps are done.
struct Sums {
    float top[WARPS][SETS * 8], sum[WARPS][SETS * 8];
};

#if PARTS > 1
// Arrivals at each result; the last one leaves zero behind.
__device__ uint arrivals[RESULT_TILES];
#endif

// Where in memory a part has its results, and for each row what they are relative to and the sum of the weights.
__device__ __forceinline__ float2* part_results(float* partial, int part)
{
    return reinterpret_cast<float2*>(partial) + ((long long)blockIdx.z * PARTS + part) * (RESULTS / 2 + ROWS);
}
__device__ __forceinline__ float2* part_sums(float* partial, int part) { return part_results(partial, part) + RESULTS / 2; }

#if FRESH
constexpr int TOKENS = RESULT_TILES / GROUPS * FRESH, NEW = HEAD_SIZE + VALUE_SIZE;
constexpr int AHEAD = 4; // rows that are computed before they are needed: more only where texts write to one page
constexpr int PAGE_PLACES = K_PAGE / K_ROW; // rows from one page to the next
static_assert(V_PAGE / V_ROW == PAGE_PLACES, "keys and values lie alike");

// New keys and values of a token that this part reads: at a place in those of its pages that have a bit.
struct Fresh {
    short token, place;
    uint pages;
};

// An element of the keys and values of a token, side by side.
__device__ __forceinline__ float fresh_value(int token, int group, int column, OPERAND_PARAMETERS const Params& p)
{
    return column < HEAD_SIZE ? key_value(0, token, group, column, OPERAND_ARGUMENTS p)
                              : value_value(0, token, group, column - HEAD_SIZE, OPERAND_ARGUMENTS p);
}

// Writes the keys and values of a text's own tokens to their pages.
__device__ __forceinline__ void write_fresh(tile_t* k, tile_t* v, int batch, int group, OPERAND_PARAMETERS const Params& p)
{
    for (int index = int(threadIdx.x); index < FRESH * NEW; index += THREADS) {
        int token = batch * FRESH + index / NEW, column = index % NEW;
        long long row = fresh_place(0, token, 0, 0, OPERAND_ARGUMENTS p);
        tile_t value = tile_t(fresh_value(token, group, column, OPERAND_ARGUMENTS p));
        if (row >= 0) { // else there is no such place
            *(column < HEAD_SIZE ? k + row * K_ROW + column : v + row * V_ROW + column - HEAD_SIZE) = value;
        }
    }
}

// Lists what this part reads of what is new.
__device__ __forceinline__ void list_fresh(
    Fresh* list, int* count, const int* pages, const unsigned char* known, int part, OPERAND_PARAMETERS const Params& p)
{
    for (int token = int(threadIdx.x); token < TOKENS; token += THREADS) {
        long long row = fresh_place(0, token, 0, 0, OPERAND_ARGUMENTS p);
        int page = row < 0 ? -1 : int(row / PAGE_PLACES), place = int(row % PAGE_PLACES);
        uint found = 0;
        #pragma unroll
        for (int number = 0; number < PART_PAGES; ++number) {
            int position = (part * PART / PAGE + number) * PAGE + place;
            bool inside = position / PART == part && position < LENGTH;
            found |= uint(inside && pages[number] == page && known[inside ? position / BLOCK : 0] != 0) << number;
        }
        if (found) {
            list[atomicAdd(count, 1)] = {short(token), short(place), found};
        }
    }
}

// Puts what is new where it belongs in a piece, which may have been read before it was in memory.
__device__ __forceinline__ void patch(
    unsigned char* slot, const Fresh* list, int count, const tile_t* ahead, int part, int position, int group,
    OPERAND_PARAMETERS const Params& p)
{
    bool changed = false;
    for (int number = 0; number < count; ++number) {
        Fresh fresh = list[number];
        int at = position % PAGE; // of the piece in its page
        bool inside = at <= fresh.place && fresh.place < at + PIECE;
        if (!inside || !(fresh.pages >> (position / PAGE - part * PART / PAGE) & 1)) {
            continue;
        }
        unsigned char* keys = slot + (fresh.place - at) * K_PITCH;
        unsigned char* values = slot + K_BYTES + (fresh.place - at) * V_PITCH;
        for (int column = int(threadIdx.x) % 32; column < NEW; column += 32) {
            tile_t value = number < AHEAD ? ahead[number * NEW + column]
                                          : tile_t(fresh_value(fresh.token, group, column, OPERAND_ARGUMENTS p));
            unsigned char* target = column < HEAD_SIZE ? keys + column * 2 : values + (column - HEAD_SIZE) * 2;
            *reinterpret_cast<tile_t*>(target) = value;
        }
        changed = true;
        __syncwarp();
    }
    if (changed) {
        __syncwarp();
    }
}
#endif

// Adds up what `busy` warps have of two neighbouring results.
__device__ __forceinline__ float2 add_warps(const float (&weight)[WARPS], unsigned char* ring, int index, int busy)
{
    float2 total = make_float2(0.0f, 0.0f);
    #pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) {
        if (warp < busy) {
            const float* source = warp_results(ring, warp) + index / V_WIDTH * RESULT_PITCH + index % V_WIDTH;
            float2 part = *reinterpret_cast<const float2*>(source);
            total.x += weight[warp] * part.x;
            total.y += weight[warp] * part.y;
        }
    }
    return total;
}

__device__ __forceinline__ float add_sums(const float (&weight)[WARPS], const Sums& sums, int row, int busy)
{
    float sum = 0.0f;
    #pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) {
        sum += warp < busy ? weight[warp] * sums.sum[warp][row] : 0.0f;
    }
    return sum;
}

#if PARTS > 1
// Puts together what so many open parts of a text have left in memory.
__device__ __forceinline__ void finish_parts(
    const unsigned short* open, int parts, float (&weight)[PARTS][ROWS], float* partial, int batch, int group,
    SINK_PARAMETER OUT_T* out, EPILOGUE_PARAMETERS const Params& p)
{
    constexpr int SOONER = PARTS < 8 ? PARTS : 8; // parts of which a thread reads its first results beside the sums
    int lane = int(threadIdx.x) % 32, own_index = min(int(threadIdx.x) * 2, RESULTS - 2);
    float2 sooner[SOONER];
    #pragma unroll
    for (int part = 0; part < SOONER; ++part) {
        sooner[part] = __ldcg(part_results(partial, open[min(part, parts - 1)]) + own_index / 2);
    }
    for (int row = int(threadIdx.x) / 32; row < ROWS; row += WARPS) {
        float top = CLOSED, sum = 0.0f;
        for (int part = lane; part < parts; part += 32) {
            float2 own = __ldcg(part_sums(partial, open[part]) + row);
            float larger = fmaxf(top, own.x);
            sum = sum * exp2f(top - larger) + own.y * exp2f(own.x - larger);
            top = larger;
            weight[part][row] = own.x;
        }
        float largest = warp_max<32>(top);
        sum = warp_sum<32>(sum * exp2f(top - largest));
        sum = whole_sum(sum, largest, group * SHARED + row / OWN_ROWS, SINK_ARGUMENT p);
        float factor = sum == 0.0f ? 0.0f : 1.0f / sum;
        for (int part = lane; part < parts; part += 32) {
            weight[part][row] = weight[part][row] == CLOSED ? 0.0f : exp2f(weight[part][row] - largest) * factor;
        }
    }
    __syncthreads();
    for (int index = int(threadIdx.x) * 2; index < RESULTS; index += THREADS * 2) {
        int row = index / V_WIDTH;
        float2 total = make_float2(0.0f, 0.0f);
        bool is_first = index == int(threadIdx.x) * 2;
        #pragma unroll
        for (int part = 0; part < SOONER; ++part) {
            if (is_first && part < parts) {
                total.x += weight[part][row] * sooner[part].x;
                total.y += weight[part][row] * sooner[part].y;
            }
        }
        #pragma unroll 4
        for (int part = is_first ? SOONER : 0; part < parts; ++part) {
            float2 own = __ldcg(part_results(partial, open[part]) + index / 2);
            total.x += weight[part][row] * own.x;
            total.y += weight[part][row] * own.y;
        }
        store_pair(row, index % V_WIDTH, total.x, total.y, batch, group, out, EPILOGUE_ARGUMENTS p);
    }
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS) attention_paged(
    OPERAND_PARAMETERS KEPT_T* k, KEPT_T* v, const mask_t* mask, SINK_PARAMETER const unsigned char* states, float* partial,
    PAGE_PARAMETERS OUT_T* out, EPILOGUE_PARAMETERS const Params p)
{
    extern __shared__ __align__(128) unsigned char ring[]; // slots of a piece each, DEPTH for each warp
    __shared__ Sums sums;
    __shared__ __align__(16) tile_t queries[SETS * 8 * Q_PITCH];
    __shared__ unsigned char known[PARTS * PART_TILES]; // the state of each tile
    __shared__ unsigned short list[PART_TILES], open_parts[PARTS];
    __shared__ int pages[PART_PAGES], open_tiles;
#if FRESH
    __shared__ Fresh fresh[TOKENS];
    __shared__ int fresh_count;
    __shared__ tile_t ahead[AHEAD * NEW];
    if (threadIdx.x == 0) {
        fresh_count = 0;
    }
#endif
    int batch = int(blockIdx.z) / GROUPS, group = int(blockIdx.z) % GROUPS, part = int(blockIdx.x);
    int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
    if (EARLY) {
        hurry_next_grid();
    } else {
        wait_for_previous_grid();
    }
    if (int(threadIdx.x) < PART_PAGES) {
        int number = part * PART / PAGE + int(threadIdx.x);
        pages[threadIdx.x] = number * PAGE < LENGTH ? int(page_of(0, 0, batch, number, PAGE_ARGUMENTS p)) : 0;
    }
    for (int tile = int(threadIdx.x); tile < PARTS * PART_TILES; tile += THREADS) {
        known[tile] = (unsigned char)state_of<TILES>(tile, states, batch, group, p);
    }
    clear_queries(queries);
    __syncthreads();
    int parts = 0; // that are open
    for (int base = 0; base < PARTS; base += 32) {
        bool any = false;
        for (int tile = (base + lane) * PART_TILES; tile < min(base + lane + 1, PARTS) * PART_TILES; ++tile) {
            any |= known[tile] != 0;
        }
        uint open = __ballot_sync(0xffffffffu, any);
        if (warp == 0 && any) {
            open_parts[parts + __popc(open & ((1u << lane) - 1))] = (unsigned short)(base + lane);
        }
        parts += __popc(open);
    }
    if (warp == WARPS - 1) {
        int state = lane < PART_TILES ? known[part * PART_TILES + lane] : 0;
        uint open = __ballot_sync(0xffffffffu, state != 0);
        if (state) {
            list[__popc(open & ((1u << lane) - 1))] = (unsigned short)((part * PART_TILES + lane) * 2 + (state == 2));
        }
        if (lane == 0) {
            open_tiles = __popc(open);
        }
    }
    __syncthreads();
    bool is_idle = open_tiles == 0 && (parts > 0 || part > 0); // where nothing is open at all, somebody has to say so
    if (is_idle && !(FRESH && part == 0)) {
        return;
    }
    if (EARLY && !FRESH) { // else nobody has written to the pages but this kernel
        wait_for_previous_grid();
    }
    enter_group(k, v, mask, batch, group, p);
    int pieces = open_tiles * TILE_PIECES;
    auto tile_of = [&](int turn) { return int(list[(warp + turn * WARPS) / TILE_PIECES]); };
    auto position_of = [&](int turn) { return (tile_of(turn) >> 1) * BLOCK + (warp + turn * WARPS) % TILE_PIECES * PIECE; };
    auto slot = [&](int turn) { return ring + (warp * DEPTH + turn % DEPTH) * SLOT_BYTES; };
    auto copy = [&](int turn) {
        if (warp + turn * WARPS < pieces) {
            int position = position_of(turn), count = LENGTH - position;
            long long page = pages[PART > PAGE ? (position - part * PART) / PAGE : 0], within = position % PAGE;
            copy_rows<HEAD_SIZE, QK_WIDTH, K_PITCH, K_ROW>(slot(turn), k + page * K_PAGE + within * K_ROW, count);
            copy_rows<VALUE_SIZE, V_WIDTH, V_PITCH, V_ROW>(slot(turn) + K_BYTES, v + page * V_PAGE + within * V_ROW, count);
        }
        commit_copies();
    };
    #pragma unroll 1
    for (int turn = 0; turn < DEPTH; ++turn) {
        copy(turn);
    }
    Scores added = {};
    if (warp < pieces) {
        load_mask(added, mask, position_of(0), !(tile_of(0) & 1), p);
    }
#if FRESH
    list_fresh(fresh, &fresh_count, pages, known, part, OPERAND_ARGUMENTS p);
    if (EARLY) {
        wait_for_previous_grid();
    }
    if (is_idle) {
        write_fresh(k, v, batch, group, OPERAND_ARGUMENTS p);
        return;
    }
#endif
    OwnQueries own; // on their way beside what is new
    compute_queries(own, batch, group, OPERAND_ARGUMENTS p);
#if FRESH
    __syncthreads();
    for (int index = int(threadIdx.x); index < min(fresh_count, AHEAD) * NEW; index += THREADS) {
        ahead[index] = tile_t(fresh_value(fresh[index / NEW].token, group, index % NEW, OPERAND_ARGUMENTS p));
    }
#endif
    leave_queries(queries, own);
    __syncthreads();
    Rows rows;
    Queries query;
    begin_rows(rows);
    load_queries(query, queries);
    for (int turn = 0; warp + turn * WARPS < pieces; ++turn) {
        Scores score;
        wait_for_copies<DEPTH - 1>();
        __syncwarp();
#if FRESH
        patch(slot(turn), fresh, fresh_count, ahead, part, position_of(turn), group, OPERAND_ARGUMENTS p);
#endif
        multiply_keys(score, query, slot(turn));
        soften(rows, score, added, position_of(turn));
        if (warp + (turn + 1) * WARPS < pieces) {
            load_mask(added, mask, position_of(turn + 1), !(tile_of(turn + 1) & 1), p);
        }
        add_values(rows, score, slot(turn) + K_BYTES);
        __syncwarp();
        copy(turn + DEPTH);
    }
    wait_for_copies<0>();
    int busy = min(pieces, WARPS);
    if (warp < busy) {
        leave_rows(rows, ring, sums, 1.0f, lane_column);
    }
    __syncthreads();
    float weight[WARPS];
    for (int index = int(threadIdx.x) * 2; index < RESULTS; index += THREADS * 2) {
        int row = index / V_WIDTH;
        float top = weigh_warps(weight, sums, row, busy), sum = add_sums(weight, sums, row, busy);
        float2 total = add_warps(weight, ring, index, busy);
        if (parts <= 1) {
            float whole = whole_sum(sum, top, group * SHARED + row / OWN_ROWS, SINK_ARGUMENT p);
            float factor = whole == 0.0f ? 0.0f : 1.0f / whole;
            store_pair(row, index % V_WIDTH, total.x * factor, total.y * factor, batch, group, out, EPILOGUE_ARGUMENTS p);
            continue;
        }
        __stcg(part_results(partial, part) + index / 2, total);
        if (index % V_WIDTH == 0) {
            __stcg(part_sums(partial, part) + row, make_float2(top, sum));
        }
    }
#if PARTS > 1
    if (parts > 1 && is_last_of(parts, arrivals[blockIdx.z])) {
        float(&weights)[PARTS][ROWS] = *reinterpret_cast<float(*)[PARTS][ROWS]>(ring);
        finish_parts(open_parts, parts, weights, partial, batch, group, SINK_ARGUMENT out, EPILOGUE_ARGUMENTS p);
    }
#endif
#if FRESH
    if (part == 0) { // last, as no block waits for it
        write_fresh(k, v, batch, group, OPERAND_ARGUMENTS p);
    }
#endif
}
