// Convolution of channels-last images as a matrix product: a row is an output pixel, the common dimension walks the taps of
// the kernel and, inside of each, the channels. Grid: tiles (see `place_of`, then the groups of channels) in x,
// splits in y.
constexpr int COMMON = TAPS_Y * TAPS_X * CHANNELS; // of one group
constexpr int TILES_N = (COLUMNS + TILE_N - 1) / TILE_N;

// Copies chunks of channels; each thread has one column of them, whose tap and channel it keeps track of.
struct ImageCopier {
    static constexpr int CHUNKS = TILE_K / CHUNK, STEP = THREADS / CHUNKS, ROUNDS = TILE_M / STEP;
    static_assert(THREADS % CHUNKS == 0 && TILE_M % STEP == 0 && STEP % 8 == 0, "every thread copies as many chunks");
    const tile_t* image;
    int top[ROUNDS], left[ROUNDS], pixel[ROUNDS]; // of each row's first tap
    int tap_y, tap_x, channel;
    uint target;

    __device__ __forceinline__ ImageCopier(const tile_t* source, int row, int first_tile, const Params& p)
    {
        uint line = threadIdx.x / CHUNKS, k = first_tile * TILE_K + threadIdx.x % CHUNKS * CHUNK;
        image = source;
        channel = int(k % CHANNELS);
        tap_x = int(k / CHANNELS % TAPS_X);
        tap_y = int(k / CHANNELS / TAPS_X);
        target = tile_offset<TILE_M, true>(line, threadIdx.x % CHUNKS * CHUNK);
        #pragma unroll
        for (int round = 0; round < ROUNDS; ++round) {
            uint place = row + line + round * STEP, image_line = place / uint(OUT_WIDTH);
            left[round] = int(place % uint(OUT_WIDTH)) * STEP_X - PAD_X;
            top[round] = int(image_line % uint(OUT_HEIGHT)) * STEP_Y - PAD_Y;
            pixel[round] = (int(image_line / uint(OUT_HEIGHT)) * HEIGHT + top[round]) * WIDTH + left[round];
            if (place >= uint(p.rows)) {
                top[round] = -(1 << 28); // outside of every image
            }
        }
    }

    __device__ __forceinline__ void copy(unsigned char* tile, const Params& p)
    {
        int dy = tap_y * DILATION_Y, dx = tap_x * DILATION_X, further = (dy * WIDTH + dx) * PIXEL_STRIDE + channel;
        #pragma unroll
        for (int round = 0; round < ROUNDS; ++round) {
            bool inside = uint(top[round] + dy) < uint(HEIGHT) && uint(left[round] + dx) < uint(WIDTH);
            bool valid = inside && (COMMON % TILE_K == 0 || tap_y < TAPS_Y);
            const tile_t* source = image + (pixel[round] * PIXEL_STRIDE + further);
            unsigned char* place = tile + target + round * STEP * TILE_K * 2;
            if (CHANNELS == CHUNK) { // overlapping windows share most of their chunks
                copy_chunk_cached(place, source, valid);
            } else {
                copy_chunk(place, source, valid);
            }
        }
        advance();
    }

    __device__ __forceinline__ void advance()
    {
        if (CHANNELS >= TILE_K) {
            channel += TILE_K;
            int carry = channel >= CHANNELS;
            channel -= carry ? CHANNELS : 0;
            tap_x += carry;
        } else {
            channel += TILE_K % CHANNELS;
            int carry = channel >= CHANNELS;
            channel -= carry ? CHANNELS : 0;
            tap_x += TILE_K / CHANNELS + carry;
        }
        int rows = tap_x / TAPS_X;
        tap_x -= rows * TAPS_X;
        tap_y += rows;
    }
};

struct Copier {
    ImageCopier image;
    OperandCopier<TILE_N, true> weight;
    const Params& p;

    __device__ __forceinline__ void copy_a(unsigned char* tile) { image.copy(tile, p); }
    __device__ __forceinline__ void copy_b(unsigned char* tile) { weight.copy(tile); }
};

extern "C" __global__ void KERNEL_ATTRIBUTES __launch_bounds__(THREADS, BLOCKS) conv2d(
    const tile_t* image, const tile_t* weight, float* partial, OUT_T* out, EPILOGUE_PARAMETERS const Params p)
{
    extern __shared__ __align__(1024) unsigned char shared[];
    int tile = int(blockIdx.x), split = int(blockIdx.y);
    int group = tile / (p.tiles_m * TILES_N), inside = tile % (p.tiles_m * TILES_N);
    int row = place_of(inside, p.tiles_m, TILES_N).row, col = place_of(inside, p.tiles_m, TILES_N).col;
    constexpr int TILES = (COMMON + TILE_K - 1) / TILE_K;
    int first = TILES * split / SPLITS, last = TILES * (split + 1) / SPLITS;
    const tile_t* weights = weight + (long long)group * COLUMNS * COMMON;
    Copier copier{ImageCopier(image + group * CHANNELS, row, first, p),
                  OperandCopier<TILE_N, true>(weights, col, COLUMNS, COMMON, 1, first, COMMON), p};
    Accumulator sum;
    multiply_tiles(sum, copier, last - first, shared);
    finish_tile(
        sum, shared, tile, split, partial, 0, row, col, p.rows, COLUMNS, group * COLUMNS, out, EPILOGUE_ARGUMENTS p);
}
