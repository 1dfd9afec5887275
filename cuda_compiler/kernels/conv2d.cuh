// Convolution of channels-last images as a matrix product: a row is an output pixel, the common dimension walks the
// taps of the kernel and, inside of each, the channels. Grid: tiles (see `place_of`, then the groups of channels) in x,
// splits in y. With ADDED a second convolution of the same outputs is added, further along the common dimension.
// G holds the geometry of an image and of its taps.
template <typename G>
constexpr int COMMON = G::TAPS_Y * G::TAPS_X * G::CHANNELS; // of one group
template <typename G>
constexpr int TILES_K = (COMMON<G> + TILE_K - 1) / TILE_K;
constexpr int TILES_N = (COLUMNS + TILE_N - 1) / TILE_N;

#ifdef OUTSIDE
// A chunk of the codes around an image: of the code that stands for zero.
constexpr uint OUTSIDE_WORD = (OUTSIDE & 255) * 0x01010101u;
__device__ const uint4 outside_chunk = {OUTSIDE_WORD, OUTSIDE_WORD, OUTSIDE_WORD, OUTSIDE_WORD};
#endif

// Copies chunks of channels; each thread has one column of them, whose tap and channel it keeps track of.
template <typename G>
struct ImageCopier {
    static constexpr int CHUNKS = TILE_K / CHUNK, STEP = COPY_THREADS / CHUNKS, ROUNDS = TILE_M / STEP;
    static_assert(
        COPY_THREADS % CHUNKS == 0 && TILE_M % STEP == 0 && STEP % 8 == 0, "every thread copies as many chunks");
    const tile_t* image;
    int top[ROUNDS], left[ROUNDS], pixel[ROUNDS]; // of each row's first tap
    int tap_y, tap_x, channel;
    uint target;

    ImageCopier() = default;

    __device__ __forceinline__ ImageCopier(const tile_t* source, int row, int first_tile, const Params& p)
    {
        uint line = copy_thread() / CHUNKS, k = first_tile * TILE_K + copy_thread() % CHUNKS * CHUNK;
        image = source;
        channel = int(k % G::CHANNELS);
        tap_x = int(k / G::CHANNELS % G::TAPS_X);
        tap_y = int(k / G::CHANNELS / G::TAPS_X);
        target = tile_offset<TILE_M, true>(line, copy_thread() % CHUNKS * CHUNK);
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
        int dy = tap_y * G::DILATION_Y, dx = tap_x * G::DILATION_X;
        int further = (dy * G::WIDTH + dx) * G::PIXEL_STRIDE + channel;
        #pragma unroll
        for (int round = 0; round < ROUNDS; ++round) {
            bool inside = uint(top[round] + dy) < uint(G::HEIGHT) && uint(left[round] + dx) < uint(G::WIDTH);
            bool valid = inside && (COMMON<G> % TILE_K == 0 || tap_y < G::TAPS_Y);
            const tile_t* source = image + (pixel[round] * G::PIXEL_STRIDE + further);
            unsigned char* place = tile + target + round * STEP * TILE_K * 2;
#ifdef OUTSIDE
            // One line for all threads of all blocks: from the level-1 cache, not from one place of the level-2 cache.
            if (!valid) {
                copy_chunk_cached(place, &outside_chunk, true);
                continue;
            }
#endif
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

#if ADDED
#define ADDED_PARAMETERS const tile_t *added_image, const tile_t *added_weight,
constexpr int TILES = TILES_K<Image> + TILES_K<AddedImage>;
#else
#define ADDED_PARAMETERS
constexpr int TILES = TILES_K<Image>;
#endif

// Whether each result reads the pixel at its own place, so that images are matrices that lie in rows.
template <typename G>
constexpr bool POINTWISE = G::TAPS_Y * G::TAPS_X * G::STEP_Y * G::STEP_X == 1 && G::PAD_Y == 0 && G::PAD_X == 0;

template <typename G, bool = TEAMS && POINTWISE<G>>
struct PixelCopier : ImageCopier<G> {
    using ImageCopier<G>::ImageCopier;
};

template <typename G>
struct PixelCopier<G, true> : OperandCopier<TILE_M, true> {
    PixelCopier() = default;

    __device__ __forceinline__ PixelCopier(const tile_t* source, int row, int first_tile, const Params& p)
        : OperandCopier<TILE_M, true>(source, row, p.rows, G::PIXEL_STRIDE, 1, first_tile, G::CHANNELS)
    {
    }
    __device__ __forceinline__ void copy(unsigned char* tile, const Params& p)
    {
        OperandCopier<TILE_M, true>::copy(tile);
    }
};

// The tiles of one convolution, and after those the tiles of the one that is added to it.
template <typename G>
struct ConvolutionCopier {
    PixelCopier<G> image;
    OperandCopier<TILE_N, true, TEAMS != 0> weight;

    ConvolutionCopier() = default;

    __device__ __forceinline__ ConvolutionCopier(
        const tile_t* images, const tile_t* weights, Part part, int first_tile, const Params& p)
        : image(images + part.base / COLUMNS * G::CHANNELS, part.row, first_tile, p),
          weight(weights + (long long)part.base * COMMON<G>, part.col, COLUMNS, COMMON<G>, 1, first_tile, COMMON<G>)
    {
    }
};

__device__ Part part_of(int place_in_order, const Params& p)
{
    int tile = p.backwards ? RESULT_TILES - 1 - place_in_order : place_in_order;
    int group = tile / (p.tiles_m * TILES_N);
    Place place = place_of(tile % (p.tiles_m * TILES_N), p.tiles_m, TILES_N);
    return {0, place.row, place.col, group * COLUMNS};
}

struct Copier {
    const Params& p;
    int first; // tile along the common dimension
    const tile_t *image, *weight;
    ConvolutionCopier<Image> own;
#if ADDED
    const tile_t *added_image, *added_weight;
    ConvolutionCopier<AddedImage> added;
    int images, weights; // tiles that are left of the first convolution
#endif

    __device__ __forceinline__ Copier(
        const tile_t* image, const tile_t* weight, ADDED_PARAMETERS int first, const Params& p)
        : p(p), first(first), image(image), weight(weight)
#if ADDED
          , added_image(added_image), added_weight(added_weight)
#endif
    {
    }

    // Goes to a tile of results.
    __device__ __forceinline__ void begin(int tile)
    {
        own = ConvolutionCopier<Image>(image, weight, part_of(tile, p), first, p);
#if ADDED
        added = ConvolutionCopier<AddedImage>(
            added_image, added_weight, part_of(tile, p), max(first - TILES_K<Image>, 0), p);
        images = weights = TILES_K<Image> - first;
#endif
    }

    __device__ __forceinline__ void copy_a(unsigned char* tile)
    {
#if ADDED
        if (images-- <= 0) {
            added.image.copy(tile, p);
            return;
        }
#endif
        own.image.copy(tile, p);
    }

    __device__ __forceinline__ void copy_b(unsigned char* tile)
    {
#if ADDED
        if (weights-- <= 0) {
            added.weight.copy(tile);
            return;
        }
#endif
        own.weight.copy(tile);
    }
};

#if ADDED
#define ADDED_ARGUMENTS added_image, added_weight,
#else
#define ADDED_ARGUMENTS
#endif

extern "C" __global__ void KERNEL_ATTRIBUTES __launch_bounds__(THREADS, BLOCKS) conv2d(
    const tile_t* image, const tile_t* weight, ADDED_PARAMETERS float* partial, OUT_T* out,
    EPILOGUE_PARAMETERS const Params p)
{
    extern __shared__ __align__(1024) unsigned char shared[];
    int split = int(blockIdx.y), first = TILES * split / SPLITS, last = TILES * (split + 1) / SPLITS;
    Copier copier(image, weight, ADDED_ARGUMENTS first, p);
    compute_tiles(copier, last - first, shared, partial, p.rows, COLUMNS, out, EPILOGUE_ARGUMENTS p);
}
