// Attention of many rows on compute capability 9.0. The scores are never stored: each block of positions updates a
// running maximum, sum and result (Milakov and Gimelshein, 2018; Dao et al., FlashAttention, 2022), products are
// `wgmma`'s, the copy engine brings keys and values while warpgroups compute, and the scores of the next block are
// multiplied while the weights of this one meet their values (Shah et al., FlashAttention-3, 2024).
//
// A block of threads computes TILE_M rows of the SHARED query heads that read one head of keys: the same row of all of
// them, then the next, so that they are open at the same positions. Blocks of positions that the mask closes are not
// read. The open ones may be shared by up to SPLITS blocks of threads, in turns; the last block to finish adds up what
// they have. A row that is closed everywhere gives zeros. Grid: tiles of rows (the last, which a causal mask leaves the
// most to, first), each for all heads of keys, in x; splits in y.
extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_prefill(
    const tile_t* q, const __grid_constant__ TensorMap k, const __grid_constant__ TensorMap v, const mask_t* mask,
    SINK_PARAMETER const unsigned char* states, float* partial, PAGE_PARAMETERS OUT_T* out,
    EPILOGUE_PARAMETERS const Params p)
{
    extern __shared__ __align__(1024) unsigned char shared[];
    Tile tile;
    tile.layer = int(blockIdx.x) % LAYERS;
    tile.row = (RESULT_TILES / LAYERS - 1 - int(blockIdx.x) / LAYERS) * TILE_M;
    int batch = tile.batch(), group = tile.group();
    int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
    Ring ring(shared_address(shared));
    if (threadIdx.x == 0) {
        ring.make();
        publish_barriers();
        prefetch_map(k);
        prefetch_map(v);
    }
    if (!STATES_READY) {
        wait_for_previous_grid();
    }
    unsigned short* list = reinterpret_cast<unsigned short*>(shared + LIST_AT);
    tile.list = list;
    tile.open = list_tiles(list, reinterpret_cast<int*>(shared + FLAG_AT), tile.row, states, batch, group, p);
    tile.splits = max(1, min(SPLITS, tile.open / SPLIT_TILES));
    tile.split = int(blockIdx.y);
    tile.count = (tile.open - tile.split + tile.splits - 1) / tile.splits;
    if (tile.split >= tile.splits) {
        return;
    }
    if (STATES_READY && !(PAGES_READY && warpgroup == GROUPS_OF_WARPS)) {
        wait_for_previous_grid();
    }
    if (warpgroup == GROUPS_OF_WARPS) {
        leave_registers<COPY_REGISTERS>();
        if (threadIdx.x < MULTIPLYING + 32) {
            copy_positions(ring, tile, k, v, PAGE_ARGUMENTS p);
        }
    } else {
        allow_registers<PRODUCT_REGISTERS>();
        q += (long long)batch * p.q_batch + (long long)group * SHARED * p.q_head;
        copy_queries(ring, tile, q, p);
        enter_mask(mask, batch, group, p);
        Rows rows;
        multiply_tiles(rows, ring, tile, warpgroup, mask, p);
        finish_rows(rows, tile, warpgroup, shared, SINK_ARGUMENT partial, out, EPILOGUE_ARGUMENTS p);
    }
}
