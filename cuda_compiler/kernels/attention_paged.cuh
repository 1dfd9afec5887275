// Attention of few rows over positions in pages, for many texts of very different lengths at once: result[row] = sum
// over j of weight[j] * v[j], the weights being the softmax over j of SCALE * (q[row] . k[j]) + mask[row, j], with a
// running maximum as in FlashAttention (Dao et al., 2022), the positions shared out as in Flash-Decoding (Dao et al.,
// 2023).
//
// A cluster of blocks of threads, or several where a text is long, computes all rows of the SHARED query heads that
// read one head of keys. Blocks get equal numbers of neighbouring pieces of 16 positions of what is open. Single warps
// take these in turns and do not wait for each other: each copies DEPTH pieces ahead. What the mask closes is not read.
// The queries are computed here. So are FRESH keys and values of each text, which this kernel also writes to their
// pages; a block that has copied such a page replaces them in its copy. How a text is divided depends on its own length
// alone, and so do the bits of its results. A row that is closed everywhere gives zeros. What pages hold, numbers or
// codes, is a matter of attention_pieces.cuh or of attention_coded_pieces.cuh.
// Grid: clusters in x, batch * heads of keys in z.
static_assert(PAGE % BLOCK == 0 && BLOCK % PIECE == 0, "a block of positions lies in one page");

// The pages that open blocks of positions lie in.
__device__ __forceinline__ int* open_pages()
{
    __shared__ int list[TILES];
    return list;
}

// Looks up the page of each block of positions beside its state.
template <typename PageOf>
struct Pages {
    const PageOf& page_of_tile;
    __device__ __forceinline__ int find(int tile) const { return page_of_tile(tile); }
    __device__ __forceinline__ void keep(int place, int page) const { open_pages()[place] = page; }
};

// A block's share of the pieces of what is open. As few clusters work as have enough to do.
struct Share {
    int clusters, first, count, warp;
    bool nobodys;

    __device__ __forceinline__ explicit Share(int open)
    {
        int pieces = open == 0 ? 0 : open * TILE_PIECES - last_closed(), split = int(blockIdx.x);
        clusters = pieces <= ALONE ? 1 : min(CLUSTERS, (pieces + ENOUGH - 1) / ENOUGH);
        int splits = clusters * CLUSTER;
        nobodys = split >= splits;
        first = pieces * split / splits;
        count = nobodys ? 0 : pieces * (split + 1) / splits - first;
        warp = int(threadIdx.x) / 32;
    }
    __device__ __forceinline__ bool is_first() const { return blockIdx.x == 0; }
    __device__ __forceinline__ int busy_warps() const { return min(count, WARPS); }
    __device__ __forceinline__ bool has(int turn) const { return warp + turn * WARPS < count; }

    // The open blocks of positions of which this block of threads has pieces, by their places in the list.
    __device__ __forceinline__ int first_tile() const { return first / TILE_PIECES; }
    __device__ __forceinline__ int end_tile() const { return (first + count + TILE_PIECES - 1) / TILE_PIECES; }
    __device__ __forceinline__ static int tile_position(int place) { return (open_blocks()[place] >> 1) * BLOCK; }

    // Of a turn's piece: its page, and where it lies.
    __device__ __forceinline__ int page(int turn) const { return open_pages()[tile(turn)]; }
    __device__ __forceinline__ Piece piece(int turn) const
    {
        int within = int(number(turn) % TILE_PIECES) * PIECE;
        return {tile_position(tile(turn)) + within, !(open_blocks()[tile(turn)] & 1)};
    }

private:
    __device__ __forceinline__ uint number(int turn) const { return uint(first + warp + turn * WARPS); }
    __device__ __forceinline__ int tile(int turn) const { return int(number(turn) / TILE_PIECES); }
};

#if FRESH
// Lists the new tokens that are among the positions of this block.
__device__ __forceinline__ void list_fresh(
    Fresh* list, int* count, const Share& share, OPERAND_PARAMETERS const Params& p)
{
    for (int token = int(threadIdx.x); token < TOKENS; token += THREADS) {
        long long row = fresh_place(0, token, 0, 0, OPERAND_ARGUMENTS p);
        int page = row < 0 ? -1 : int(row / PAGE_PLACES), place = int(row % PAGE_PLACES);
        bool found = false;
        for (int tile = share.first_tile(); tile < share.end_tile(); ++tile) {
            int at = Share::tile_position(tile) % PAGE; // of the block of positions in its page
            found |= open_pages()[tile] == page && at <= place && place < at + BLOCK;
        }
        if (found) {
            list[atomicAdd(count, 1)] = {short(token), short(place), page};
        }
    }
}

// Replaces new rows in a piece, which may have been copied before these were in memory.
__device__ __forceinline__ void patch(
    unsigned char* stage, const Fresh* list, int count, const NewRows& rows, int page, int position, int batch,
    int group, OPERAND_PARAMETERS const Params& p)
{
    bool changed = false;
    for (int number = 0; number < count; ++number) {
        Fresh fresh = list[number];
        int at = fresh.place - position % PAGE; // in the piece
        if (fresh.page != page || at < 0 || at >= PIECE) {
            continue;
        }
        int row = fresh.token - batch * FRESH; // another text's where they share the page that is written to
        put_new(stage, at, rows, 0 <= row && row < FRESH ? row : -1, [&](int column) {
            return fresh_value(fresh.token, group, column, OPERAND_ARGUMENTS p);
        });
        changed = true;
        __syncwarp();
    }
    if (changed) {
        __syncwarp();
    }
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) attention_paged(
    OPERAND_PARAMETERS KEPT stored_t* k, KEPT stored_t* v, SCALE_PARAMETERS const mask_t* mask,
    SINK_PARAMETER const unsigned char* states, float* partial, PAGE_PARAMETERS OUT_T* out,
    EPILOGUE_PARAMETERS const Params p)
{
    extern __shared__ __align__(128) unsigned char ring[]; // stages of a piece each, DEPTH for each warp
    __shared__ Parts parts;
    __shared__ __align__(16) tile_t queries[SETS * 8 * Q_PITCH];
#if FRESH
    __shared__ Fresh fresh[TOKENS];
    __shared__ int fresh_count;
    __shared__ NewRows new_rows;
    if (threadIdx.x == 0) {
        fresh_count = 0;
    }
#endif
    int batch = int(blockIdx.z) / GROUPS, group = int(blockIdx.z) % GROUPS, warp = int(threadIdx.x) / 32;
    begin_block(queries, parts, EARLY);
    auto page_of_tile = [&](int tile) { return int(page_of(0, 0, batch, tile * BLOCK / PAGE, PAGE_ARGUMENTS p)); };
    Share share(list_open(states, batch, group, p, Pages<decltype(page_of_tile)>{page_of_tile}));
    if (share.nobodys) {
        return;
    }
    if (EARLY && !FRESH) { // else nobody has written to the pages but this kernel
        wait_for_previous_grid();
    }
    enter_group(k, v, mask, batch, group, p);
    Pools pools(k, v, SCALE_ARGUMENTS group);
    auto stage = [&](int turn) { return ring + (warp * DEPTH + turn % DEPTH) * STAGE_BYTES; };
    auto copy = [&](int turn) {
        if (share.has(turn)) {
            int position = share.piece(turn).position;
            pools.copy(stage(turn), share.page(turn), position % PAGE, LENGTH - position);
        }
        commit_copies();
    };
    #pragma unroll 1
    for (int turn = 0; turn < DEPTH; ++turn) {
        copy(turn);
    }
    meet_cluster();
    PieceMask added;
    if (share.has(0)) {
        added.load(mask, share.piece(0), p);
    }
#if FRESH
    OwnNew own_new;
    own_new.find(batch, OPERAND_ARGUMENTS p);
    list_fresh(fresh, &fresh_count, share, OPERAND_ARGUMENTS p);
    if (EARLY) {
        wait_for_previous_grid();
    }
    own_new.compute(batch, group, OPERAND_ARGUMENTS p);
#endif
    OwnQueries<> own;
    own.compute(batch, group, OPERAND_ARGUMENTS p);
    leave_piece_queries(own, queries);
#if FRESH
    leave_new(new_rows, own_new, pools, share.is_first());
#endif
    __syncthreads();
    Rows rows;
    PieceQueries query;
    begin_rows(rows);
    load_piece_queries(query, queries);
    for (int turn = 0; share.has(turn); ++turn) {
        Scores score;
        wait_for_copies<DEPTH - 1>();
        __syncwarp();
#if FRESH
        patch(stage(turn), fresh, fresh_count, new_rows, share.page(turn), share.piece(turn).position, batch, group,
              OPERAND_ARGUMENTS p);
#endif
        multiply_piece_keys(score, query, stage(turn));
        soften(rows, score, added, share.piece(turn).position, turn == 0);
        if (share.has(turn + 1)) {
            added.load(mask, share.piece(turn + 1), p);
        }
        add_piece_values(rows, score, stage(turn));
        __syncwarp();
        copy(turn + DEPTH);
    }
    wait_for_copies<0>();
#if FRESH
    if (share.is_first()) {
        write_new(new_rows, pools);
    }
#endif
    if (share.has(0)) {
        leave_rows(rows, ring, parts, piece_result, piece_column);
    }
    finish_shares(parts, ring, share, batch, group, SINK_ARGUMENT partial, out, EPILOGUE_ARGUMENTS p);
}
