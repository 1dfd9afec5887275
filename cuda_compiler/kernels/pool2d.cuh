// Pooling: a thread computes STORE_SIZE neighbouring channels of an output pixel. Grid: threads in x. Block: 128.

// What a window spans along one dimension: from `start` (inside of the image) to `end`; `padded` counts the padding in.
struct Window {
    int start, end, padded;
};

__device__ __forceinline__ Window window_of(int position, int size, int outputs, int taps, int step, int pad, int dilation)
{
    Window window;
#if ADAPTIVE
    window.start = position * size / outputs;
    window.end = ((position + 1) * size + outputs - 1) / outputs;
    window.padded = window.end - window.start;
#else
    int start = position * step - pad, end = start + (taps - 1) * dilation + 1;
    window.padded = min(end, size + pad) - start;
    window.start = start < 0 ? start + (dilation - 1 - start) / dilation * dilation : start;
    window.end = min(end, size);
#endif
    return window;
}

extern "C" __global__ void __launch_bounds__(128) pool2d(
    const a_t* image, OUT_T* out, EPILOGUE_PARAMETERS const Params p)
{
    wait_for_previous_grid();
    int index = int(blockIdx.x) * 128 + int(threadIdx.x);
    int pixel = index / p.packs, channel = index % p.packs * STORE_SIZE;
    if (pixel >= p.pixels) {
        return;
    }
    int line = pixel / p.out_width;
    Window rows = window_of(line % p.out_height, p.height, p.out_height, p.taps_y, p.step_y, p.pad_y, p.dilation_y);
    Window columns = window_of(pixel % p.out_width, p.width, p.out_width, p.taps_x, p.step_x, p.pad_x, p.dilation_x);
    const a_t* source = image + (long long)(line / p.out_height) * p.image_stride + channel * p.channel_stride;
    float value[STORE_SIZE];
    #pragma unroll
    for (int u = 0; u < STORE_SIZE; ++u) {
        value[u] = MAXIMUM ? -__int_as_float(0x7f800000) : 0.0f;
    }
    int count = 0;
    for (int y = rows.start; y < rows.end; y += p.dilation_y) {
        for (int x = columns.start; x < columns.end; x += p.dilation_x) {
            const a_t* at = source + y * p.y_stride + x * p.x_stride;
            Pack<a_t, STORE_SIZE> part = load_pack<STORE_SIZE>(at);
            #pragma unroll
            for (int u = 0; u < STORE_SIZE; ++u) {
                value[u] = MAXIMUM ? combine_max(float(part[u]), value[u]) : value[u] + float(part[u]);
            }
            ++count;
        }
    }
    #pragma unroll
    for (int u = 0; u < STORE_SIZE; ++u) {
        value[u] = value[u] / float(DIVISOR);
    }
    finish(value, 0, pixel, channel, out, EPILOGUE_ARGUMENTS p);
}
