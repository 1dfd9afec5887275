// Convolution whose windows overlap, on tensor cores of compute capability 9.0: what a tile of results reads is copied once,
// and multiplied where it lies for every tap. The channels of a pixel lie side by side, LINE pixels in each of LINES lines, so
// that the windows of neighbouring results begin a pixel apart, as neighbouring columns do for `wgmma`. Chunks of 16 bytes are
// permuted by their address in the memory of the window, which the tensor cores do likewise wherever a tap's pixels begin.
// The first operand is the weights of 64 output channels, which stay in registers.
// Blocks stay; their warpgroups take tiles in turn. Grid: blocks in x, 64 output channels in y. Block: 128 a warpgroup.
constexpr int CHUNK = 8, CHUNKS = CHANNELS / CHUNK, TAPS = TAPS_Y * TAPS_X, SLOTS = LINES * LINE;
constexpr int PIXEL_BYTES = CHANNELS * 2, PIXEL_STEPS = CHUNKS / 2;
static_assert(PIXEL_BYTES == 32 || PIXEL_BYTES == 64 || PIXEL_BYTES == 128, "what the tensor cores permute");
constexpr uint PERMUTED = PIXEL_BYTES == 128 ? 1 : PIXEL_BYTES == 64 ? 2 : 3;
constexpr int STEPS = TAPS * PIXEL_STEPS, ROUNDS = (SLOTS * CHUNKS + GROUP_THREADS - 1) / GROUP_THREADS;

// A thread's part of the weights, in the register layout of wgmma's first operand.
struct Weights {
    uint at[STEPS][4];

    __device__ __forceinline__ Weights(const tile_t* weight)
    {
        int lane = group_thread() % 32, output = int(blockIdx.y) * OUTPUTS + group_thread() / 32 * 16 + lane / 4;
        #pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            #pragma unroll
            for (int part = 0; part < 4; ++part) { // eight rows further down, and eight elements further along k
                const tile_t* source = weight + (output + part % 2 * 8) * STEPS * 16 + step * 16 + part / 2 * 8 + lane % 4 * 2;
                at[step][part] = *reinterpret_cast<const uint*>(source);
            }
        }
    }
};

// Where a chunk of a pixel lies in a window, in bytes.
__device__ __forceinline__ uint place_in_window(uint slot, uint chunk)
{
    uint at = slot * PIXEL_BYTES + chunk * 16;
    return at ^ (at >> 7 & (CHUNKS - 1)) << 4;
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
            copy_chunk(window + place_in_window(slot, chunk), source + (y * WIDTH + x) * CHANNELS + chunk * CHUNK, inside);
        }
    }
    commit_copies();
}

// Where wgmma finds 16 channels of the pixels of all results: of eight neighbours one after another, the next results a line
// of pixels further down.
__device__ __forceinline__ uint64 window_descriptor(uint window, int step)
{
    int tap = step / PIXEL_STEPS, slot = tap / TAPS_X * DILATION_Y * LINE + tap % TAPS_X * DILATION_X;
    uint first = window + slot * PIXEL_BYTES + step % PIXEL_STEPS * 32;
    return uint64(PERMUTED) << 62 | uint64(LINE * PIXEL_BYTES >> 4) << 32 | uint64(first >> 4 | 1u << 16);
}

// Starts the products of a tile.
__device__ __forceinline__ void start_products(float (&sum)[TILE_Y][4], const Weights& weights, uint window)
{
    begin_products();
    #pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        multiply_64_rows(sum, weights.at[step], window_descriptor(window, step), step > 0);
    }
    commit_products();
}

// Waits for what this thread copies, and makes it visible to wgmma once a barrier has been passed.
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
    unsigned char* windows = shared + group * GROUP_BYTES;
    unsigned char* staged = windows + 2 * WINDOW_BYTES;
    Weights weights(weight);
    wait_for_previous_grid();
    int number = int(blockIdx.x) + group * int(gridDim.x), reading = 0;
    if (number < p.tiles) {
        copy_pixels(image, Tile(number, p), windows);
    }
    publish_copies();
    group_barrier();
    for (; number < p.tiles; number += workers) {
        float sum[TILE_Y][4];
        start_products(sum, weights, shared_address(windows) + reading * WINDOW_BYTES);
        reading = 1 - reading;
        if (number + workers < p.tiles) {
            copy_pixels(image, Tile(number + workers, p), windows + reading * WINDOW_BYTES);
        }
        wait_for_products<0>();
        group_barrier(); // the last tile's results have been read
        stage(sum, 0, staged, Tile(number, p), EPILOGUE_ARGUMENTS p);
        publish_copies(); // before results are stored: it waits for what is being written
        group_barrier();
        store_results(staged, Tile(number, p), out, p);
    }
}
