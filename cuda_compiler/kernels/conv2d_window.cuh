// Convolution whose windows are multiplied where their pixels lie, see `window_pixels.cuh`. Blocks stay and take tiles
// of TILE_X x TILE_Y results in turn. Grid: blocks in x, 64 output channels in y. Block: 128.

// The sums of a tile: 64 outputs for each half of its lines. Products go on in the background until they are waited
// for.
struct Sums {
    float at[2][TILE_Y / 2][4];

    __device__ __forceinline__ void start(const Weights& weights, uint window)
    {
        begin_products();
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            #pragma unroll
            for (int step = 0; step < STEPS; ++step) {
                uint first = window + half * (TILE_Y / 2 * RESULT_LINE_BYTES);
                multiply_64_rows(at[half], weights.at[step], window_descriptor(first, step), step > 0);
            }
            commit_products();
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) conv2d_window(
    const tile_t* image, const tile_t* weight, OUT_T* out, EPILOGUE_PARAMETERS const Params p)
{
    extern __shared__ __align__(128) unsigned char shared[];
    unsigned char* staged = shared + WINDOW_BYTES;
    Weights weights(weight);
    wait_for_previous_grid();
    Pixels pixels;
    Tile first(int(blockIdx.x), p);
    pixels.load(image, first.image, first.y, first.x);
    pixels.store(shared);
    for (int number = int(blockIdx.x); number < p.tiles; number += int(gridDim.x)) {
        int next = number + int(gridDim.x);
        __syncthreads(); // the pixels are there, and the last tile's results have been read
        Sums sums;
        sums.start(weights, shared_address(shared));
        if (next < p.tiles) {
            Tile ahead(next, p);
            pixels.load(image, ahead.image, ahead.y, ahead.x);
        }
        wait_for_products<1>();
        stage(sums.at[0], 0, staged, Tile(number, p), EPILOGUE_ARGUMENTS p);
        wait_for_products<0>();
        stage(sums.at[1], TILE_Y / 2, staged, Tile(number, p), EPILOGUE_ARGUMENTS p);
        __syncthreads(); // the results are there, and the pixels have been read
        if (next < p.tiles) {
            pixels.store(shared); // before results are stored: it waits for what is being written
        }
        store_results(staged, Tile(number, p), out, p);
    }
}
