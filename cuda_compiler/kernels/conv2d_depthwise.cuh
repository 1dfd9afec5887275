// Convolution by filters of one channel: a thread computes STORE_SIZE neighbouring channels of ALONG_Y x ALONG_X
// neighbouring results, which share what they read. With SHARED_CHANNEL the image has one channel, which all filters
// read; else each filter reads its own. Weights lie with their outputs side by side. Grid: threads in x. Block: 128.
constexpr int SPAN_Y = (ALONG_Y - 1) * STEP_Y + (TAPS_Y - 1) * DILATION_Y + 1;
constexpr int SPAN_X = (ALONG_X - 1) * STEP_X + (TAPS_X - 1) * DILATION_X + 1;
constexpr int READ = SHARED_CHANNEL ? 1 : STORE_SIZE;

// A line of pixels, as far as the windows of a thread reach; zeros beyond the image.
struct Line {
    Pack<a_t, READ> pixels[SPAN_X];

    __device__ __forceinline__ Line(const a_t* source, int left)
    {
        #pragma unroll
        for (int dx = 0; dx < SPAN_X; ++dx) {
            if (uint(left + dx) < uint(WIDTH)) {
                pixels[dx] = load_pack<READ>(source + (left + dx) * X_STRIDE);
            } else {
                #pragma unroll
                for (int u = 0; u < READ; ++u) {
                    pixels[dx][u] = a_t(0.0f);
                }
            }
        }
    }
};

extern "C" __global__ void __launch_bounds__(128) conv2d_depthwise(
    const a_t* image, const b_t* weight, OUT_T* out, EPILOGUE_PARAMETERS const Params p)
{
    wait_for_previous_grid();
    PixelGroup own(p);
    if (own.index >= uint(p.groups)) {
        return;
    }
    const a_t* source = image + (long long)own.number * IMAGE_STRIDE + (SHARED_CHANNEL ? 0 : own.channel);
    int top = own.y * STEP_Y - PAD_Y, left = own.x * STEP_X - PAD_X;
    float sums[ALONG_Y][ALONG_X][STORE_SIZE];
    #pragma unroll
    for (int i = 0; i < ALONG_Y; ++i) {
        #pragma unroll
        for (int j = 0; j < ALONG_X; ++j) {
            #pragma unroll
            for (int u = 0; u < STORE_SIZE; ++u) {
                sums[i][j][u] = 0.0f;
            }
        }
    }
    #pragma unroll UNROLL_Y
    for (int dy = 0; dy < SPAN_Y; ++dy) {
        if (uint(top + dy) >= uint(HEIGHT) || (ALONG_Y == 1 && dy % DILATION_Y != 0)) {
            continue;
        }
        Line line(source + (top + dy) * Y_STRIDE, left);
        #pragma unroll
        for (int i = 0; i < ALONG_Y; ++i) {
            int below = dy - i * STEP_Y;
            if (below < 0 || below % DILATION_Y != 0 || below / DILATION_Y >= TAPS_Y) {
                continue;
            }
            const b_t* taps = weight + below / DILATION_Y * W_Y + own.channel;
            #pragma unroll
            for (int tap = 0; tap < TAPS_X; ++tap) {
                Pack<b_t, STORE_SIZE> filter = load_pack<STORE_SIZE>(taps + tap * W_X);
                #pragma unroll
                for (int j = 0; j < ALONG_X; ++j) {
                    #pragma unroll
                    for (int u = 0; u < STORE_SIZE; ++u) {
                        float pixel = float(line.pixels[j * STEP_X + tap * DILATION_X][SHARED_CHANNEL ? 0 : u]);
                        sums[i][j][u] += pixel * float(filter[u]);
                    }
                }
            }
        }
    }
    #pragma unroll
    for (int i = 0; i < ALONG_Y; ++i) {
        #pragma unroll
        for (int j = 0; j < ALONG_X; ++j) {
            if (own.has(i, j)) {
                finish(sums[i][j], 0, own.row(i, j), own.channel, out, EPILOGUE_ARGUMENTS p);
            }
        }
    }
}
