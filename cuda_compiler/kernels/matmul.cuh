// Matrix products: a[m, k] by b[k, n]. Grid: tiles (see `place_of`, then the batch) in x, splits in y.
__device__ Part part_of(int tile, const Params& p)
{
    int batch = tile / (p.tiles_m * p.tiles_n);
    Place place = place_of(tile % (p.tiles_m * p.tiles_n), p.tiles_m, p.tiles_n);
    return {batch, place.row, place.col, 0};
}

struct Copier {
    const Params& p;
    int first; // tile along k
    const tile_t *a_source, *b_source;
    OperandCopier<TILE_M, A_ALONG_K> a;
    OperandCopier<TILE_N, B_ALONG_K, TEAMS != 0> b;

    __device__ __forceinline__ Copier(const tile_t* a, const tile_t* b, int first, const Params& p)
        : p(p), first(first), a_source(a), b_source(b)
    {
    }

    // Goes to a tile of results.
    __device__ __forceinline__ void begin(int tile)
    {
        Part part = part_of(tile, p);
        a = {a_source + a_offset(part.batch, p), part.row, p.m, p.a_row, p.a_k, first, p.k};
        b = {b_source + b_offset(part.batch, p), part.col, p.n, p.b_col, p.b_k, first, p.k};
    }

    __device__ __forceinline__ void copy_a(unsigned char* tile) { a.copy(tile); }
    __device__ __forceinline__ void copy_b(unsigned char* tile) { b.copy(tile); }
};

extern "C" __global__ void KERNEL_ATTRIBUTES __launch_bounds__(THREADS, BLOCKS) matmul(
    const tile_t* a, const tile_t* b, float* partial, OUT_T* out, EPILOGUE_PARAMETERS const Params p)
{
    extern __shared__ __align__(1024) unsigned char shared[];
    int split = int(blockIdx.y), steps = (p.k + TILE_K - 1) / TILE_K;
    int first = steps * split / SPLITS, last = steps * (split + 1) / SPLITS;
    Copier copier(a, b, first, p);
    compute_tiles(copier, last - first, shared, partial, p.m, p.n, out, EPILOGUE_ARGUMENTS p);
}
