// Such a convolution, then the greatest of its results in windows of two or three, two apart: results are compared in
// registers, and only maxima go to memory. A tile is TILE_Y lines of two columns of eight results, which give POOLED_Y
// lines of POOLED_X maxima. A thread has two neighbours of a line and all lines, of two channels; a window's third
// result lies with the lane behind it, or in the other column. Blocks stay and take tiles in turn. Grid: blocks in x,
// 64 output channels in y. Block: 128.
constexpr int POOLED_TILES_X = (POOLED_WIDTH + POOLED_X - 1) / POOLED_X;
constexpr int POOLED_TILES_Y = (POOLED_HEIGHT + POOLED_Y - 1) / POOLED_Y;
constexpr int SLOTS_X = 8; // of staged maxima in a line

// A result's 16 bits as they compare, and the pair that is less than any other.
__device__ __forceinline__ uint comparable(half result) { return result.bits; }
__device__ __forceinline__ uint comparable(bfloat result) { return result.bits; }
__device__ __forceinline__ uint comparable(uint8 code) { return code; }
__device__ __forceinline__ uint comparable(int8 code) { return uint(int(code)) & 0xffffu; }
constexpr uint LEAST_PAIR = LEAST * 0x10001u;

// The greater of each of two; NaN stays.
__device__ __forceinline__ uint greater_pair(uint a, uint b)
{
    uint result = a;
#if __CUDA_ARCH__ >= 900
    asm(GREATER_PAIR " %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
#endif
    return result;
}

// A tile: the image, and its first maximum there.
struct PooledTile {
    int image, y, x;

    __device__ __forceinline__ PooledTile(int place, const Params& p)
    {
        int number = p.backwards ? p.tiles - 1 - place : place;
        image = number / (POOLED_TILES_X * POOLED_TILES_Y);
        y = number / POOLED_TILES_X % POOLED_TILES_Y * POOLED_Y;
        x = number % POOLED_TILES_X * POOLED_X;
    }

    // The first result under it, which may lie outside of the image.
    __device__ __forceinline__ int result_y() const { return y * 2 - POOL_PAD_Y; }
    __device__ __forceinline__ int result_x() const { return x * 2 - POOL_PAD_X; }
};

// The sums of a tile: 64 outputs for each of its columns, the right one first. Products go on in the background until
// they are waited for.
struct Sums {
    float at[2][TILE_Y][4];

    __device__ __forceinline__ void start(const Weights& weights, uint window)
    {
        begin_products();
        #pragma unroll
        for (int column = 1; column >= 0; --column) {
            #pragma unroll
            for (int step = 0; step < STEPS; ++step) {
                multiply_64_rows(
                    at[column], weights.at[step], window_descriptor(window + column * 128, step), step > 0);
            }
            commit_products();
        }
    }
};

// A column's maxima, of both of a thread's channels in each word.
struct Maxima {
    uint first[POOLED_Y]; // of the lines of a window at its place's first result
    uint both[POOLED_Y];  // and at both of its results

    __device__ __forceinline__ Maxima(
        const float (&sum)[TILE_Y][4], PooledTile tile, int column, int output, EPILOGUE_PARAMETERS const Params& p)
    {
        int x = tile.result_x() + column * 8 + int(threadIdx.x) % 4 * 2;
        uint outside = (uint(x) < uint(OUT_WIDTH) ? 0u : 0xffffu) | (uint(x + 1) < uint(OUT_WIDTH) ? 0u : 0xffff0000u);
        uint of_lines[2][POOLED_Y];
        #pragma unroll
        for (int line = 0; line < TILE_Y; ++line) {
            uint cut = uint(tile.result_y() + line) < uint(OUT_HEIGHT) ? outside : 0xffffffffu;
            #pragma unroll
            for (int upper = 0; upper < 2; ++upper) {
                int col = COLUMNS % OUTPUTS == 0 || output + upper * 8 < COLUMNS ? output + upper * 8 : 0;
                uint left = comparable(element(sum[line][upper * 2], 0, 0, col, EPILOGUE_ARGUMENTS p));
                uint right = comparable(element(sum[line][upper * 2 + 1], 0, 0, col, EPILOGUE_ARGUMENTS p));
                uint pair = ((left | right << 16) & ~cut) | (LEAST_PAIR & cut);
                #pragma unroll
                for (int window = 0; window < POOLED_Y; ++window) {
                    if (line >= window * 2 && line < window * 2 + POOL_TAPS_Y) {
                        uint& greatest = of_lines[upper][window];
                        greatest = line == window * 2 ? pair : greater_pair(greatest, pair);
                    }
                }
            }
        }
        #pragma unroll
        for (int window = 0; window < POOLED_Y; ++window) {
            first[window] = __byte_perm(of_lines[0][window], of_lines[1][window], 0x5410);
            uint second = __byte_perm(of_lines[0][window], of_lines[1][window], 0x7632);
            both[window] = greater_pair(first[window], second);
        }
    }

    // Takes in the third result of windows of three: the first result of the next lane, or, for a last lane, that of
    // `further`.
    __device__ __forceinline__ void reach(const uint (&further)[POOLED_Y])
    {
        int lane = int(threadIdx.x) % 32, next = lane / 4 * 4 + (lane + 1) % 4;
        #pragma unroll
        for (int window = 0; window < POOLED_Y && POOL_TAPS_X == 3; ++window) {
            uint given = lane % 4 == 0 ? further[window] : first[window];
            both[window] = greater_pair(both[window], __shfl_sync(0xffffffffu, given, next));
        }
    }
};

// Brings maxima to shared memory, the channels of each side by side.
__device__ __forceinline__ void stage_maxima(const Maxima& left, const Maxima& right, unsigned char* staged)
{
    int lane = int(threadIdx.x) % 32, channel = int(threadIdx.x) / 32 * 16;
    int slot = lane / 16 * SLOTS_X + lane % 2 * 4 + lane % 8 / 2; // words alternate between the columns
    uint at = shared_address(staged) + slot * STAGED_BYTES + (channel + lane / 8 % 2 * 8) * 2;
    #pragma unroll
    for (int window = 0; window < POOLED_Y; window += 2) {
        uint word[4];
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
            word[i] = __byte_perm(left.both[window + i / 2], right.both[window + i / 2], i % 2 ? 0x7632 : 0x5410);
        }
        store_matrices(at + window * SLOTS_X * STAGED_BYTES, word);
    }
}

__device__ __forceinline__ void store_maxima(const unsigned char* staged, PooledTile tile, OUT_T* out, const Params& p)
{
    constexpr int PACKS = OUTPUTS / STORE_SIZE;
    int channel = int(threadIdx.x) % PACKS * STORE_SIZE, col = int(blockIdx.y) * OUTPUTS + channel;
    #pragma unroll
    for (int round = 0; round < POOLED_Y * SLOTS_X * PACKS / THREADS; ++round) {
        int slot = round * (THREADS / PACKS) + int(threadIdx.x) / PACKS;
        int y = tile.y + slot / SLOTS_X, x = tile.x + slot % SLOTS_X;
        bool inside = y < POOLED_HEIGHT && x < POOLED_WIDTH && (POOLED_X == SLOTS_X || slot % SLOTS_X < POOLED_X);
        if (inside && (COLUMNS % OUTPUTS == 0 || col < COLUMNS)) {
            int row = (tile.image * POOLED_HEIGHT + y) * POOLED_WIDTH + x;
            store_pack(out + place(0, row, col, p), staged_pack<OUT_T>(staged + slot * STAGED_BYTES, channel));
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) conv2d_window_pool(
    const tile_t* image, const tile_t* weight, OUT_T* out, EPILOGUE_PARAMETERS const Params p)
{
    extern __shared__ __align__(128) unsigned char shared[];
    unsigned char* staged = shared + WINDOW_BYTES;
    int output = int(blockIdx.y) * OUTPUTS + int(threadIdx.x) / 32 * 16 + int(threadIdx.x) % 32 / 4;
    Weights weights(weight);
    wait_for_previous_grid();
    PooledTile tile(int(blockIdx.x), p);
    Pixels pixels;
    pixels.load(image, tile.image, tile.result_y(), tile.result_x());
    pixels.store(shared);
    for (int number = int(blockIdx.x); number < p.tiles; number += int(gridDim.x)) {
        int next = number + int(gridDim.x);
        __syncthreads(); // the pixels are there, and the last tile's maxima have been read
        Sums sums;
        sums.start(weights, shared_address(shared));
        PooledTile ahead(next, p);
        if (next < p.tiles) {
            pixels.load(image, ahead.image, ahead.result_y(), ahead.result_x());
        }
        wait_for_products<1>();
        Maxima right(sums.at[1], tile, 1, output, EPILOGUE_ARGUMENTS p);
        wait_for_products<0>();
        Maxima left(sums.at[0], tile, 0, output, EPILOGUE_ARGUMENTS p);
        left.reach(right.first);
        right.reach(right.first);
        stage_maxima(left, right, staged);
        __syncthreads(); // the maxima are there, and the pixels have been read
        if (next < p.tiles) {
            pixels.store(shared); // before maxima are stored: it waits for what is being written
        }
        store_maxima(staged, tile, out, p);
        tile = ahead;
    }
}
