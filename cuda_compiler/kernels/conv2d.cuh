// Convolution of channels-last images as a matrix product: a row is an output pixel, the common dimension walks the taps of
// the kernel and, inside of each, the channels. Grid: tiles (see `place_of`, then the groups of channels) in x,
// splits in y. With ADDED a second convolution of the same outputs is added, further along the common dimension.
// G holds the geometry of an image and of its taps.
template <typename G>
constexpr int COMMON = G::TAPS_Y * G::TAPS_X * G::CHANNELS; // of one group
template <typename G>
constexpr int TILES_K = (COMMON<G> + TILE_K - 1) / TILE_K;
constexpr int TILES_N = (COLUMNS + TILE_N - 1) / TILE_N;

// Copies chunks of channels; each thread has one column of them, whose tap and channel it keeps track of.
template <typename G>
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
        channel = int(k % G::CHANNELS);
        tap_x = int(k / G::CHANNELS % G::TAPS_X);
        tap_y = int(k / G::CHANNELS / G::TAPS_X);
        target = tile_offset<TILE_M, true>(line, threadIdx.x % CHUNKS * CHUNK);
        #pragma unroll
        for (int round = 0; round < ROUNDS; ++round) {
            uint place = row + line + round * STEP, image_line = place / uint(OUT_WIDTH);
            left[round] = int(place % uint(OUT_WIDTH)) * G::STEP_X - G::PAD_X;
            top[round] = int(image_line % uint(OUT_HEIGHT)) * G::STEP_Y - G::PAD_Y;
            pixel[round] = (int(image_line / uint(OUT_HEIGHT)) * G::HEIGHT + top[round]) * G::WIDTH + left[round];
            if (place >= uint(p.rows)) {
                top[round] = -(1 << 28); // outside of every image
            }
        }
    }

    __device__ __forceinline__ void copy(unsigned char* tile, const Params& p)
    {
        int dy = tap_y * G::DILATION_Y, dx = tap_x * G::DILATION_X, further = (dy * G::WIDTH + dx) * G::PIXEL_STRIDE + channel;
        #pragma unroll
        for (int round = 0; round < ROUNDS; ++round) {
            bool inside = uint(top[round] + dy) < uint(G::HEIGHT) && uint(left[round] + dx) < uint(G::WIDTH);
            bool valid = inside && (COMMON<G> % TILE_K == 0 || tap_y < G::TAPS_Y);
            const tile_t* source = image + (pixel[round] * G::PIXEL_STRIDE + further);
            unsigned char* place = tile + target + round * STEP * TILE_K * 2;
            if (G::CHANNELS == CHUNK) { // overlapping windows share most of their chunks
                copy_chunk_cached(place, source, valid);
            } else {
                copy_chunk(place, source, valid);
            }
        }
        advance();
    }

    __device__ __forceinline__ void advance()
    {
        if (G::CHANNELS >= TILE_K) {
            channel += TILE_K;
            int carry = channel >= G::CHANNELS;
            channel -= carry ? G::CHANNELS : 0;
            tap_x += carry;
        } else {
            channel += TILE_K % G::CHANNELS;
            int carry = channel >= G::CHANNELS;
            channel -= carry ? G::CHANNELS : 0;
            tap_x += TILE_K / G::CHANNELS + carry;
        }
        int rows = tap_x / G::TAPS_X;
        tap_x -= rows * G::TAPS_X;
        tap_y += rows;
    }
};

// The tiles of one convolution, and after those the tiles of the one that is added to it.
struct Copier {
    ImageCopier<Image> image;
    OperandCopier<TILE_N, true> weight;
    const Params& p;
#if ADDED
    ImageCopier<AddedImage> added_image;
    OperandCopier<TILE_N, true> added_weight;
    int images, weights; // tiles that are left of the first
#endif

    __device__ __forceinline__ void copy_a(unsigned char* tile)
    {
#if ADDED
        if (images-- <= 0) {
            added_image.copy(tile, p);
            return;
        }
#endif
        image.copy(tile, p);
    }

    __device__ __forceinline__ void copy_b(unsigned char* tile)
    {
#if ADDED
        if (weights-- <= 0) {
            added_weight.copy(tile);
            return;
        }
#endif
        weight.copy(tile);
    }
};

#if ADDED
#define ADDED_PARAMETERS const tile_t *added_image, const tile_t *added_weight,
#else
#define ADDED_PARAMETERS
#endif

extern "C" __global__ void KERNEL_ATTRIBUTES __launch_bounds__(THREADS, BLOCKS) conv2d(
    const tile_t* image, const tile_t* weight, ADDED_PARAMETERS float* partial, OUT_T* out, EPILOGUE_PARAMETERS const Params p)
{
    extern __shared__ __align__(1024) unsigned char shared[];
    int tile = int(blockIdx.x), split = int(blockIdx.y);
    int group = tile / (p.tiles_m * TILES_N), inside = tile % (p.tiles_m * TILES_N);
    int row = place_of(inside, p.tiles_m, TILES_N).row, col = place_of(inside, p.tiles_m, TILES_N).col;
#if ADDED
    constexpr int TILES = TILES_K<Image> + TILES_K<AddedImage>;
#else
    constexpr int TILES = TILES_K<Image>;
#endif
    int first = TILES * split / SPLITS, last = TILES * (split + 1) / SPLITS;
    const tile_t* weights = weight + (long long)group * COLUMNS * COMMON<Image>;
    Copier copier{
        ImageCopier<Image>(image + group * Image::CHANNELS, row, first, p),
        OperandCopier<TILE_N, true>(weights, col, COLUMNS, COMMON<Image>, 1, first, COMMON<Image>), p,
#if ADDED
        ImageCopier<AddedImage>(added_image, row, max(first - TILES_K<Image>, 0), p),
        OperandCopier<TILE_N, true>(added_weight, col, COLUMNS, COMMON<AddedImage>, 1, max(first - TILES_K<Image>, 0),
                                    COMMON<AddedImage>),
        TILES_K<Image> - first, TILES_K<Image> - first,
#endif
    };
    Accumulator sum;
    multiply_tiles(sum, copier, last - first, shared);
    finish_tile(
        sum, shared, tile, split, partial, 0, row, col, p.rows, COLUMNS, group * COLUMNS, out, EPILOGUE_ARGUMENTS p);
}
