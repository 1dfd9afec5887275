// Pooling: a thread computes STORE_SIZE neighbouring channels of ALONG_Y x ALONG_X neighbouring output pixels, whose
// windows may share what is read. Grid: threads in x. Block: 128.

// What a window spans along one dimension: from `start` to `end`, both inside of the image; `padded` counts the padding
// in.
struct Window {
    int start, end, padded;
};

__device__ __forceinline__ Window window_of(int position, int size, int outputs, int taps, int step, int pad)
{
    Window window;
#if ADAPTIVE
    window.start = position * size / outputs;
    window.end = ((position + 1) * size + outputs - 1) / outputs;
    window.padded = window.end - window.start;
#else
    int start = position * step - pad, end = start + taps;
    window.padded = min(end, size + pad) - start;
    window.start = max(start, 0);
    window.end = min(end, size);
#endif
    return window;
}

#if defined(PAIR_TYPE) && __CUDA_ARCH__ >= 800
// The greatest so far, two 16-bit values at a time; NaN stays.
struct Running {
    Pack<a_t, STORE_SIZE> greatest;

    __device__ __forceinline__ Running()
    {
        #pragma unroll
        for (int u = 0; u < STORE_SIZE; ++u) {
            greatest[u] = a_t(-__int_as_float(0x7f800000));
        }
    }

    __device__ __forceinline__ void take(const Pack<a_t, STORE_SIZE>& part)
    {
        uint* ours = reinterpret_cast<uint*>(greatest.at);
        const uint* theirs = reinterpret_cast<const uint*>(part.at);
        #pragma unroll
        for (int pair = 0; pair < STORE_SIZE / 2; ++pair) {
            asm("max.NaN." PAIR_TYPE " %0, %0, %1;" : "+r"(ours[pair]) : "r"(theirs[pair]));
        }
    }

    __device__ __forceinline__ float value(int u) const { return float(greatest[u]); }
};
#elif defined(CODES_FROM)
// The greatest code so far, four at a time.
struct Running {
    Pack<a_t, STORE_SIZE> greatest;

    __device__ __forceinline__ Running()
    {
        #pragma unroll
        for (int word = 0; word < STORE_SIZE / 4; ++word) {
            greatest.words[word] = uint(CODES_FROM & 255) * 0x01010101u;
        }
    }

    __device__ __forceinline__ void take(const Pack<a_t, STORE_SIZE>& part)
    {
        #pragma unroll
        for (int word = 0; word < STORE_SIZE / 4; ++word) {
            uint own = greatest.words[word], other = part.words[word];
            greatest.words[word] = CODES_FROM ? __vmaxs4(own, other) : __vmaxu4(own, other);
        }
    }

    __device__ __forceinline__ float value(int u) const { return number_of_byte(greatest, u, 0); }
};
#else
// The greatest or the sum so far.
struct Running {
    float total[STORE_SIZE];

    __device__ __forceinline__ Running()
    {
        #pragma unroll
        for (int u = 0; u < STORE_SIZE; ++u) {
            total[u] = MAXIMUM ? -__int_as_float(0x7f800000) : 0.0f;
        }
    }

    __device__ __forceinline__ void take(const Pack<a_t, STORE_SIZE>& part)
    {
        #pragma unroll
        for (int u = 0; u < STORE_SIZE; ++u) {
            total[u] = MAXIMUM ? combine_max(float(part[u]), total[u]) : total[u] + float(part[u]);
        }
    }

    __device__ __forceinline__ float value(int u) const { return total[u]; }
};
#endif

#if ADAPTIVE
__device__ __forceinline__ void pool(Running (&running)[1][1], const a_t* source, int y, int x)
{
    Window rows = window_of(y, HEIGHT, OUT_HEIGHT, TAPS_Y, STEP_Y, PAD_Y);
    Window columns = window_of(x, WIDTH, OUT_WIDTH, TAPS_X, STEP_X, PAD_X);
    for (int row = rows.start; row < rows.end; ++row) {
        for (int column = columns.start; column < columns.end; ++column) {
            running[0][0].take(load_pack<STORE_SIZE>(source + row * Y_STRIDE + column * X_STRIDE));
        }
    }
}
#else
// Whether the window that begins at `step * number` has a tap at `distance`.
__device__ constexpr bool has_tap(int distance, int number, int step, int taps, int dilation)
{
    return distance >= number * step && (distance - number * step) % dilation == 0 &&
           (distance - number * step) / dilation < taps;
}

__device__ __forceinline__ void pool(Running (&running)[ALONG_Y][ALONG_X], const a_t* source, int y, int x)
{
    constexpr int SPAN_Y = (ALONG_Y - 1) * STEP_Y + (TAPS_Y - 1) * DILATION_Y + 1;
    constexpr int SPAN_X = (ALONG_X - 1) * STEP_X + (TAPS_X - 1) * DILATION_X + 1;
    int top = y * STEP_Y - PAD_Y, left = x * STEP_X - PAD_X;
    #pragma unroll UNROLL_Y
    for (int dy = 0; dy < SPAN_Y; ++dy) {
        #pragma unroll UNROLL_X
        for (int dx = 0; dx < SPAN_X; ++dx) {
            if (uint(top + dy) >= uint(HEIGHT) || uint(left + dx) >= uint(WIDTH)) {
                continue;
            }
            Pack<a_t, STORE_SIZE> part = load_pack<STORE_SIZE>(source + (top + dy) * Y_STRIDE + (left + dx) * X_STRIDE);
            #pragma unroll
            for (int i = 0; i < ALONG_Y; ++i) {
                #pragma unroll
                for (int j = 0; j < ALONG_X; ++j) {
                    if (has_tap(dy, i, STEP_Y, TAPS_Y, DILATION_Y) && has_tap(dx, j, STEP_X, TAPS_X, DILATION_X)) {
                        running[i][j].take(part);
                    }
                }
            }
        }
    }
}
#endif

__device__ __forceinline__ float divisor(int y, int x)
{
    Window rows = window_of(y, HEIGHT, OUT_HEIGHT, TAPS_Y, STEP_Y, PAD_Y);
    Window columns = window_of(x, WIDTH, OUT_WIDTH, TAPS_X, STEP_X, PAD_X);
    return float(DIVISOR);
}

extern "C" __global__ void __launch_bounds__(128) pool2d(
    const a_t* image, OUT_T* out, EPILOGUE_PARAMETERS const Params p)
{
    wait_for_previous_grid();
    PixelGroup own(p);
    if (own.index >= uint(p.groups)) {
        return;
    }
    Running running[ALONG_Y][ALONG_X];
    pool(running, image + (long long)own.number * IMAGE_STRIDE + own.channel * CHANNEL_STRIDE, own.y, own.x);
    #pragma unroll
    for (int i = 0; i < ALONG_Y; ++i) {
        #pragma unroll
        for (int j = 0; j < ALONG_X; ++j) {
            if (own.has(i, j)) {
                float value[STORE_SIZE];
                #pragma unroll
                for (int u = 0; u < STORE_SIZE; ++u) {
                    value[u] = running[i][j].value(u) / divisor(own.y + i, own.x + j);
                }
                finish(value, 0, own.row(i, j), own.channel, out, EPILOGUE_ARGUMENTS p);
            }
        }
    }
}
