// Convolution of channels-last images as a matrix product: a row is an output pixel, the common dimension walks the taps of
// the kernel and, inside of each, the channels. Grid: tiles (columns first, then rows, then the groups of channels) in x,
// splits in y.
constexpr int COMMON = TAPS_Y * TAPS_X * CHANNELS; // of one group

// Copies pieces of A_PIECE channels; each thread has one column of them, whose tap and channel it keeps track of.
struct ImageCopier {
    static constexpr int PIECES = TILE_K / A_PIECE, STEP = THREADS / PIECES, ROUNDS = TILE_M / STEP;
    static_assert(THREADS % PIECES == 0 && TILE_M % STEP == 0 && STEP % 8 == 0, "every thread copies as many pieces");
    const tile_t* image;
    int top[ROUNDS], left[ROUNDS], pixel[ROUNDS]; // of each row's first tap
    int tap_y, tap_x, channel;
    uint target;

    __device__ __forceinline__ ImageCopier(const tile_t* source, int row, int first_tile, const Params& p)
    {
        uint line = threadIdx.x / PIECES, k = first_tile * TILE_K + threadIdx.x % PIECES * A_PIECE;
        image = source;
        channel = int(k % CHANNELS);
        tap_x = int(k / CHANNELS % TAPS_X);
        tap_y = int(k / CHANNELS / TAPS_X);
        target = tile_offset<TILE_M, true>(line, threadIdx.x % PIECES * A_PIECE);
        #pragma unroll
        for (int round = 0; round < ROUNDS; ++round) {
            uint place = row + line + round * STEP, image_line = place / uint(p.out_width);
            left[round] = int(place % uint(p.out_width)) * STEP_X - PAD_X;
            top[round] = int(image_line % uint(p.out_height)) * STEP_Y - PAD_Y;
            pixel[round] = (int(image_line / uint(p.out_height)) * p.height + top[round]) * p.width + left[round];
            if (place >= uint(p.rows)) {
                top[round] = -(1 << 28); // outside of every image
            }
        }
    }

    __device__ __forceinline__ void copy(unsigned char* tile, const Params& p)
    {
        int dy = tap_y * DILATION_Y, dx = tap_x * DILATION_X, further = (dy * p.width + dx) * p.pixel_stride + channel;
        #pragma unroll
        for (int round = 0; round < ROUNDS; ++round) {
            bool inside = uint(top[round] + dy) < uint(p.height) && uint(left[round] + dx) < uint(p.width);
            bool valid = inside && (COMMON % TILE_K == 0 || tap_y < TAPS_Y);
            const tile_t* source = image + (pixel[round] * p.pixel_stride + further);
            copy_piece<A_PIECE>(tile + target + round * STEP * TILE_K * 2, source, valid);
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

// A row of an odd number of small pieces does not end at a border of 16 bytes.
using WeightCopier = OperandCopier<TILE_N, true, COMMON % CHUNK ? A_PIECE : CHUNK>;

struct Copier {
    ImageCopier image;
    WeightCopier weight;
    const Params& p;

    __device__ __forceinline__ void copy_a(unsigned char* tile) { image.copy(tile, p); }
    __device__ __forceinline__ void copy_b(unsigned char* tile) { weight.copy(tile); }
};

extern "C" __global__ void __launch_bounds__(THREADS) conv2d(
    const tile_t* image, const tile_t* weight, float* partial, OUT_T* out, EPILOGUE_PARAMETERS const Params p)
{
    extern __shared__ __align__(128) unsigned char shared[];
    int tile = int(blockIdx.x), split = int(blockIdx.y);
    int group = tile / (p.tiles_m * p.tiles_n), inside = tile % (p.tiles_m * p.tiles_n);
    int row = inside / p.tiles_n * TILE_M, col = inside % p.tiles_n * TILE_N;
    constexpr int TILES = (COMMON + TILE_K - 1) / TILE_K;
    int first = TILES * split / SPLITS, last = TILES * (split + 1) / SPLITS;
    const tile_t* weights = weight + (long long)group * p.columns * COMMON;
    Copier copier{ImageCopier(image + group * CHANNELS, row, first, p),
                  WeightCopier(weights, col, p.columns, COMMON, 1, first, COMMON), p};
    Accumulator sum;
    multiply_tiles(sum, copier, last - first, shared);
#if SPLITS > 1
    if (!add_splits(sum, tile, split, partial)) {
        return;
    }
#endif
    store_tile(sum, shared, 0, row, col, p.rows, p.columns, group * p.columns, out, EPILOGUE_ARGUMENTS p);
}
