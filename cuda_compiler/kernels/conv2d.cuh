// Convolution of channels-last images as a matrix product: a row is an output pixel, the common dimension walks the taps of
// the kernel and, inside of each, the channels. Grid: tiles (columns first, then rows, then the groups of channels) in x,
// splits in y.
constexpr int COMMON = TAPS_Y * TAPS_X * CHANNELS; // of one group

#if A_CHUNK > 1
// Each thread copies one column of chunks, whose tap and channel it keeps track of.
struct ImageCopier {
    static constexpr int CHUNKS = TILE_K / CHUNK, LINES = THREADS / CHUNKS, ROWS = TILE_M / LINES;
    static_assert(THREADS % CHUNKS == 0 && TILE_M % LINES == 0, "every thread copies as many chunks");
    const tile_t* image;
    int top[ROWS], left[ROWS], base[ROWS];
    int tap_y, tap_x, channel;

    __device__ ImageCopier(const tile_t* source, int row, int first_tile, const Params& p) : image(source)
    {
        int k = first_tile * TILE_K + int(threadIdx.x) % CHUNKS * CHUNK;
        channel = k % CHANNELS;
        tap_x = k / CHANNELS % TAPS_X;
        tap_y = k / CHANNELS / TAPS_X;
        #pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            int pixel = row + int(threadIdx.x) / CHUNKS + i * LINES;
            int line = pixel / p.out_width;
            left[i] = pixel % p.out_width * STEP_X - PAD_X;
            top[i] = pixel < p.rows ? line % p.out_height * STEP_Y - PAD_Y : -(1 << 28);
            base[i] = (line / p.out_height * p.height + top[i]) * p.width + left[i];
        }
    }

    __device__ __forceinline__ void copy(tile_t* target, const Params& p)
    {
        int dy = tap_y * DILATION_Y, dx = tap_x * DILATION_X, chunk = int(threadIdx.x) % CHUNKS;
        #pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            bool inside = uint(top[i] + dy) < uint(p.height) && uint(left[i] + dx) < uint(p.width) && tap_y < TAPS_Y;
            int at = inside ? (base[i] + dy * p.width + dx) * p.pixel_stride + channel : 0;
            int line = int(threadIdx.x) / CHUNKS + i * LINES;
            copy_chunk(target + chunk_index<TILE_M, true>(line, chunk * CHUNK) * CHUNK, image + at, inside);
        }
        channel += TILE_K;
        while (channel >= CHANNELS) {
            channel -= CHANNELS;
            if (++tap_x == TAPS_X) {
                tap_x = 0;
                ++tap_y;
            }
        }
    }
};
#else
// Element by element: for images of few channels, or of strides that allow no chunks.
struct ImageCopier {
    const tile_t* image;
    int row, tile;

    __device__ ImageCopier(const tile_t* source, int first_row, int first_tile, const Params& p)
        : image(source), row(first_row), tile(first_tile)
    {
    }

    __device__ __forceinline__ void copy(tile_t* target, const Params& p)
    {
        constexpr int CHUNKS = TILE_K / CHUNK;
        for (int index = int(threadIdx.x); index < TILE_M * CHUNKS; index += THREADS) {
            int line = index / CHUNKS, pixel = row + line, k = tile * TILE_K + index % CHUNKS * CHUNK;
            int y0 = pixel / p.out_width;
            int left = pixel % p.out_width * STEP_X - PAD_X, top = y0 % p.out_height * STEP_Y - PAD_Y;
            const tile_t* source = image + (long long)(y0 / p.out_height) * p.image_stride;
            Pack<tile_t, CHUNK> chunk;
            #pragma unroll
            for (int u = 0; u < CHUNK; ++u) {
                int channel = (k + u) % CHANNELS, tap = (k + u) / CHANNELS;
                int y = top + tap / TAPS_X * DILATION_Y, x = left + tap % TAPS_X * DILATION_X;
                bool inside = pixel < p.rows && k + u < COMMON && uint(y) < uint(p.height) && uint(x) < uint(p.width);
                int at = y * p.y_stride + x * p.x_stride + channel * p.channel_stride;
                chunk[u] = inside ? source[at] : tile_t(0.0f);
            }
            store_pack(target + chunk_index<TILE_M, true>(line, index % CHUNKS * CHUNK) * CHUNK, chunk);
        }
        ++tile;
    }
};
#endif

struct Copier {
    ImageCopier image;
    const tile_t* weight;
    int col;
    const Params& p;

    __device__ __forceinline__ void copy_weight(int tile, tile_t* target) const
    {
        constexpr int CHUNKS = TILE_K / CHUNK;
        #pragma unroll
        for (int index = int(threadIdx.x); index < TILE_N * CHUNKS; index += THREADS) {
            int output = col + index / CHUNKS, k = tile * TILE_K + index % CHUNKS * CHUNK;
            tile_t* chunk = target + chunk_index<TILE_N, true>(index / CHUNKS, index % CHUNKS * CHUNK) * CHUNK;
#if COMMON_CHUNKS
            bool valid = output < p.columns && k < COMMON;
            copy_chunk(chunk, weight + (valid ? output * COMMON + k : 0), valid);
#else
            #pragma unroll
            for (int u = 0; u < CHUNK; ++u) {
                bool valid = output < p.columns && k + u < COMMON;
                chunk[u] = valid ? weight[output * COMMON + k + u] : tile_t(0.0f);
            }
#endif
        }
    }

    __device__ __forceinline__ void copy(int tile, tile_t* a_tile, tile_t* b_tile)
    {
        image.copy(a_tile, p);
        copy_weight(tile, b_tile);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS) conv2d(
    const tile_t* image, const tile_t* weight, float* partial, OUT_T* out, EPILOGUE_PARAMETERS const Params p)
{
    extern __shared__ __align__(128) unsigned char shared[];
    int tile = int(blockIdx.x), split = int(blockIdx.y);
    int group = tile / (p.tiles_m * p.tiles_n), inside = tile % (p.tiles_m * p.tiles_n);
    int row = inside / p.tiles_n * TILE_M, col = inside % p.tiles_n * TILE_N;
    constexpr int STEPS = (COMMON + TILE_K - 1) / TILE_K;
    int first = STEPS * split / SPLITS, last = STEPS * (split + 1) / SPLITS;
    const tile_t* weights = weight + (long long)group * p.columns * COMMON;
    Copier copier{ImageCopier(image + group * CHANNELS * p.channel_stride, row, first, p), weights, col, p};
    Accumulator sum;
    wait_for_previous_grid();
    multiply_tiles(sum, copier, first, last, shared);
#if SPLITS > 1
    if (!add_splits(sum, tile, split, partial)) {
        return;
    }
#endif
    store_tile(sum, shared, 0, row, col, p.rows, p.columns, group * p.columns, out, EPILOGUE_ARGUMENTS p);
}
