// Convolution whose windows overlap, on tensor cores of compute capability 9.0: what a tile of results reads is copied
// once, and multiplied where it lies for every tap. The channels of a pixel lie side by side, LINE pixels in each of
// LINES lines, so that the windows of neighbouring results begin a pixel apart, as neighbouring columns do for `wgmma`.
// Chunks of 16 bytes are permuted by their address in the memory of the window, which the tensor cores do likewise
// wherever a tap's pixels begin. The first operand is the weights of 64 output channels, which stay in shared memory, a
// tap behind another.
// Blocks stay; their warpgroups take tiles in turn. Grid: blocks in x, 64 output channels in y. Block: 128 a warpgroup.
constexpr int CHUNK = 8, CHUNKS = CHANNELS / CHUNK, TAPS = TAPS_Y * TAPS_X, SLOTS = LINES * LINE;
constexpr int PIXEL_BYTES = CHANNELS * 2, PIXEL_STEPS = CHUNKS / 2;
static_assert(PIXEL_BYTES == 32 || PIXEL_BYTES == 64 || PIXEL_BYTES == 128, "what the tensor cores permute");
constexpr uint PERMUTED = PIXEL_BYTES == 128 ? 1 : PIXEL_BYTES == 64 ? 2 : 3;
constexpr int TAP_BYTES = OUTPUTS * PIXEL_BYTES, WEIGHT_BYTES = TAPS * TAP_BYTES;
constexpr int STEPS = TAPS * PIXEL_STEPS, ROUNDS = (SLOTS * CHUNKS + GROUP_THREADS - 1) / GROUP_THREADS;

// Where a chunk of a pixel lies in a window, in bytes, or of the weights of an output for a tap.
__device__ __forceinline__ uint place_of_chunk(uint slot, uint chunk)
{
    uint at = slot * PIXEL_BYTES + chunk * 16;
    return at ^ (at >> 7 & (CHUNKS - 1)) << 4;
}

// Copies the weights of the block's outputs.
__device__ __forceinline__ void copy_weights(const tile_t* weight, unsigned char* target)
{
    #pragma unroll 4
    for (int i = int(threadIdx.x); i < OUTPUTS * TAPS * CHUNKS; i += GROUPS * GROUP_THREADS) {
        int output = i / (TAPS * CHUNKS), tap = i / CHUNKS % TAPS, chunk = i % CHUNKS;
        const tile_t* source = weight + ((int(blockIdx.y) * OUTPUTS + output) * TAPS + tap) * CHANNELS + chunk * CHUNK;
        copy_chunk(target + tap * TAP_BYTES + place_of_chunk(output, chunk), source, true);
    }
    commit_copies();
}

// Copies the pixels that a tile reads.
__device__ __forceinline__ void copy_pixels(const tile_t* image, Tile tile, unsigned char* window)
{
    const tile_t* source = image + (long long)tile.image * HEIGHT * WIDTH * CHANNELS;
    #pragma unroll 6
    for (int round = 0; round < ROUNDS; ++round) {
        int i = round * GROUP_THREADS + group_thread(), slot = i / CHUNKS, chunk = i % CHUNKS;
        int y = tile.y - PAD_Y + slot / LINE, x = tile.x - PAD_X + slot % LINE;
        bool inside = uint(y) < uint(HEIGHT) && uint(x) < uint(WIDTH);
        if (SLOTS * CHUNKS % GROUP_THREADS == 0 || slot < SLOTS) {
            copy_chunk(
                window + place_of_chunk(slot, chunk), source + (y * WIDTH + x) * CHANNELS + chunk * CHUNK, inside);
        }
    }
    commit_copies();
}

// Where wgmma finds 16 channels of lines of shared memory: of eight one after another, the next eight after a distance.
__device__ __forceinline__ uint64 descriptor(uint first, uint distance)
{
    return uint64(PERMUTED) << 62 | uint64(distance >> 4) << 32 | uint64(first >> 4 | 1u << 16);
}

// Starts the products of a tile.
__device__ __forceinline__ void start_products(float (&sum)[TILE_Y][4], uint weights, uint window)
{
    begin_products();
    #pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        int tap = step / PIXEL_STEPS, slot = tap / TAPS_X * DILATION_Y * LINE + tap % TAPS_X * DILATION_X;
        uint along = step % PIXEL_STEPS * 32;
        uint64 a = descriptor(weights + tap * TAP_BYTES + along, 8 * PIXEL_BYTES);
        multiply_64_rows(sum, a, descriptor(window + slot * PIXEL_BYTES + along, LINE * PIXEL_BYTES), step > 0);
    }
    commit_products();
}

// Waits for this thread's copies; behind a barrier, `wgmma` of all threads can read them.
__device__ __forceinline__ void publish_copies()
{
    wait_for_copies<0>();
    publish_to_products();
}

__device__ __forceinline__ void group_barrier()
{
    synchronize(1 + int(threadIdx.x) / GROUP_THREADS, GROUP_THREADS);
}

extern "C" __global__ void __launch_bounds__(GROUPS * GROUP_THREADS, 1) conv2d_overlap(
    const tile_t* image, const tile_t* weight, OUT_T* out, EPILOGUE_PARAMETERS const Params p)
{
    extern __shared__ __align__(1024) unsigned char shared[];
    int group = __shfl_sync(0xffffffffu, int(threadIdx.x) / GROUP_THREADS, 0), workers = GROUPS * int(gridDim.x);
    unsigned char* windows = shared + WEIGHT_BYTES + group * 2 * WINDOW_BYTES;
    copy_weights(weight, shared);
    wait_for_previous_grid();
    int number = int(blockIdx.x) + group * int(gridDim.x), reading = 0;
    if (number < p.tiles) {
        copy_pixels(image, Tile(number, p), windows);
    }
    publish_copies();
    __syncthreads();
    for (; number < p.tiles; number += workers) {
        unsigned char* window = windows + reading;
        float sum[TILE_Y][4];
        start_products(sum, shared_address(shared), shared_address(window));
        group_barrier(); // the last tile's results have been read, which lie where the next pixels go
        reading = WINDOW_BYTES - reading;
        if (number + workers < p.tiles) {
            copy_pixels(image, Tile(number + workers, p), windows + reading);
        }
        wait_for_products<0>();
        group_barrier(); // nobody reads these pixels any more: results take their place
        stage(sum, 0, window, Tile(number, p), EPILOGUE_ARGUMENTS p);
        publish_copies(); // before results are stored: it waits for what is being written
        group_barrier();
        store_results(window, Tile(number, p), out, p);
    }
}
