// Matrix products: a[m, k] by b[k, n]. Grid: tiles (see `place_of`, then the batch) in x, splits in y.
struct Copier {
    OperandCopier<TILE_M, A_ALONG_K> a;
    OperandCopier<TILE_N, B_ALONG_K> b;

    __device__ __forceinline__ void copy_a(unsigned char* tile) { a.copy(tile); }
    __device__ __forceinline__ void copy_b(unsigned char* tile) { b.copy(tile); }
};

extern "C" __global__ void KERNEL_ATTRIBUTES __launch_bounds__(THREADS, BLOCKS) matmul(
    const tile_t* a, const tile_t* b, float* partial, OUT_T* out, EPILOGUE_PARAMETERS const Params p)
{
    extern __shared__ __align__(1024) unsigned char shared[];
    int tile = int(blockIdx.x), split = int(blockIdx.y);
    int batch = tile / (p.tiles_m * p.tiles_n), inside = tile % (p.tiles_m * p.tiles_n);
    int row = place_of(inside, p.tiles_m, p.tiles_n).row, col = place_of(inside, p.tiles_m, p.tiles_n).col;
    int steps = (p.k + TILE_K - 1) / TILE_K, first = steps * split / SPLITS, last = steps * (split + 1) / SPLITS;
    Copier copier{
        OperandCopier<TILE_M, A_ALONG_K>(a + a_offset(batch, p), row, p.m, p.a_row, p.a_k, first, p.k),
        OperandCopier<TILE_N, B_ALONG_K>(b + b_offset(batch, p), col, p.n, p.b_col, p.b_k, first, p.k)};
    Accumulator sum;
    multiply_tiles(sum, copier, last - first, shared);
    finish_tile(sum, shared, tile, split, partial, batch, row, col, p.m, p.n, 0, out, EPILOGUE_ARGUMENTS p);
}
