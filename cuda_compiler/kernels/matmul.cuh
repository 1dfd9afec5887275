// Matrix products: a[m, k] by b[k, n]. Grid: tiles (columns first, then rows, then the batch) in x, splits in y.
struct Copier {
    const tile_t* a;
    const tile_t* b;
    int row, col;
    const Params& p;

    // One operand's tile: `along` rows or columns from `base` on, below `limit`.
    template <int EXTENT, bool ALONG_K>
    __device__ __forceinline__ void copy_operand(
        const tile_t* source, int tile, int base, int limit, int stride_along, int stride_k, tile_t* target) const
    {
        constexpr int CHUNKS = (ALONG_K ? TILE_K : EXTENT) / CHUNK, LINES = ALONG_K ? EXTENT : TILE_K;
        #pragma unroll
        for (int index = int(threadIdx.x); index < LINES * CHUNKS; index += THREADS) {
            int line = index / CHUNKS, chunk = index % CHUNKS * CHUNK;
            int along = ALONG_K ? line : chunk, k = ALONG_K ? chunk : line;
            int at = base + along, depth = tile * TILE_K + k;
            bool valid = at < limit && depth < p.k;
            long long offset = valid ? (long long)at * stride_along + (long long)depth * stride_k : 0;
            copy_chunk(target + chunk_index<EXTENT, ALONG_K>(along, k) * CHUNK, source + offset, valid);
        }
    }

    __device__ void copy(int tile, tile_t* a_tile, tile_t* b_tile) const
    {
        copy_operand<TILE_M, A_ALONG_K>(a, tile, row, p.m, p.a_row, p.a_k, a_tile);
        copy_operand<TILE_N, B_ALONG_K>(b, tile, col, p.n, p.b_col, p.b_k, b_tile);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS) matmul(
    const tile_t* a, const tile_t* b, float* partial, OUT_T* out, EPILOGUE_PARAMETERS const Params p)
{
    extern __shared__ __align__(128) unsigned char shared[];
    int tile = int(blockIdx.x), split = int(blockIdx.y);
    int batch = tile / (p.tiles_m * p.tiles_n), inside = tile % (p.tiles_m * p.tiles_n);
    int row = inside / p.tiles_n * TILE_M, col = inside % p.tiles_n * TILE_N;
    int steps = (p.k + TILE_K - 1) / TILE_K;
    Copier copier{a + a_offset(batch, p), b + b_offset(batch, p), row, col, p};
    Accumulator sum;
    wait_for_previous_grid();
    multiply_tiles(sum, copier, steps * split / SPLITS, steps * (split + 1) / SPLITS, shared);
#if SPLITS > 1
    if (!add_splits(sum, tile, split, partial)) {
        return;
    }
#endif
    store_tile(sum, shared, batch, row, col, p.m, p.n, 0, out, EPILOGUE_ARGUMENTS p);
}
