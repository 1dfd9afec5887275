// A tile of results for each block, all of whose warps copy, multiply and store it. `copier.begin(tile)` goes to a tile
// of results; see tile_copies.cuh for the rest.
template <typename Copier>
__device__ __forceinline__ void compute_tiles(
    Copier& copier, int steps, unsigned char* shared, float* partial, int rows, int columns, OUT_T* out,
    EPILOGUE_PARAMETERS const Params& p)
{
    copier.begin(int(blockIdx.x));
    Accumulator sum;
    multiply_tiles(sum, copier, steps, shared);
    make_numbers(sum);
    finish_tile(sum, shared, partial, rows, columns, out, EPILOGUE_ARGUMENTS p);
}
