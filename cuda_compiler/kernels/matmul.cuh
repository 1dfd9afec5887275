// Matrix products: a[m, k] by b[k, n]. Grid: tiles (see `place_of`, then the batch) in x, splits in y.
__device__ Part part_of(int tile, const Params& p)
{
    int batch = tile / (p.tiles_m * p.tiles_n);
    Place place = place_of(tile % (p.tiles_m * p.tiles_n), p.tiles_m, p.tiles_n);
    return {batch, place.row, place.col, 0};
}

#if CODES // b holds codes of a byte
typedef code_t b_t;
#else
typedef tile_t b_t;
#endif

struct Copier {
    const Params& p;
    int first; // tile along k
    const tile_t* a_source;
    const b_t* b_source;
    Codes codes;
    OperandCopier<TILE_M, A_ALONG_K> a;
#if CODES
    CodeCopier<TILE_N, B_ALONG_K> b;
#else
    OperandCopier<TILE_N, B_ALONG_K, TEAMS != 0> b;
#endif

    __device__ __forceinline__ Copier(const tile_t* a, const b_t* b, const Codes& codes, int first, const Params& p)
        : p(p), first(first), a_source(a), b_source(b), codes(codes)
    {
    }

    // Goes to a tile of results.
    __device__ __forceinline__ void begin(int tile)
    {
        Part part = part_of(tile, p);
        a = {a_source + a_offset(part.batch, p), part.row, p.m, p.a_row, p.a_k, first, p.k};
#if CODES
        b = {b_source + b_offset(part.batch, p), part.col, p.n, p.b_col, p.b_k, first, p.k, codes};
#else
        b = {b_source + b_offset(part.batch, p), part.col, p.n, p.b_col, p.b_k, first, p.k};
#endif
    }

    __device__ __forceinline__ void copy_a(unsigned char* tile) { a.copy(tile); }
#if CODES
    __device__ __forceinline__ void copy_b(unsigned char* tile) { b.copy(tile, p); }
#else
    __device__ __forceinline__ void copy_b(unsigned char* tile) { b.copy(tile); }
#endif
};

extern "C" __global__ void KERNEL_ATTRIBUTES __launch_bounds__(THREADS, BLOCKS) matmul(
    const tile_t* a, const b_t* b, CODE_PARAMETERS float* partial, OUT_T* out, EPILOGUE_PARAMETERS const Params p)
{
    extern __shared__ __align__(1024) unsigned char shared[];
    int split = int(blockIdx.y), steps = (p.k + TILE_K - 1) / TILE_K;
    int first = steps * split / SPLITS, last = steps * (split + 1) / SPLITS;
    Copier copier(a, b, Codes{CODE_ARGUMENTS}, first, p);
    compute_tiles(copier, last - first, shared, partial, p.m, p.n, out, EPILOGUE_ARGUMENTS p);
}
