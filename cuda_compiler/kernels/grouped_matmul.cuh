// Products of groups of rows, each by a matrix of its own: a[rows, k] by b[group, k, n]. Tiles of results have rows of
// one group; their number is known when the kernel runs, and blocks that find none leave.
// Grid: tiles (columns first, then rows) in x.
__shared__ Part own_part;
__device__ Part part_of(int tile, const Params& p) { return own_part; }

struct Copier {
    OperandCopier<TILE_M, A_ALONG_K> a;
    OperandCopier<TILE_N, B_ALONG_K> b;

    __device__ __forceinline__ void copy_a(unsigned char* tile) { a.copy(tile); }
    __device__ __forceinline__ void copy_b(unsigned char* tile) { b.copy(tile); }
};

extern "C" __global__ void KERNEL_ATTRIBUTES __launch_bounds__(THREADS, BLOCKS) grouped_matmul(
    const tile_t* a, const tile_t* b, const end_t* ends, float* partial, OUT_T* out, EPILOGUE_PARAMETERS const Params p)
{
    extern __shared__ __align__(1024) unsigned char shared[];
    wait_for_previous_grid();
    int col = int(blockIdx.x) % p.tiles_n * TILE_N;
    Rows rows = rows_of(int(blockIdx.x) / p.tiles_n, TILE_M, ends, p);
    if (rows.first >= rows.end) {
        return;
    }
    bool is_group = rows.group < p.groups;
    if (threadIdx.x == 0) {
        own_part = {0, rows.first, col, 0};
    }
    __syncthreads();
    const tile_t* matrix = b + (is_group ? (long long)rows.group * p.b_group : 0);
    Copier copier = {{a, rows.first, rows.end, p.a_row, p.a_k, 0, p.k}, {matrix, col, p.n, p.b_col, p.b_k, 0, p.k}};
    Accumulator sum;
    multiply_tiles(sum, copier, is_group ? (p.k + TILE_K - 1) / TILE_K : 0, shared);
    finish_tile(sum, shared, partial, rows.end, p.n, out, EPILOGUE_ARGUMENTS p);
}
