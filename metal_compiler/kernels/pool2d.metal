// Pooling of images: a thread computes CHANNELS neighbouring channels of an output pixel.
// Grid: threads in x. Block: 64.

// The channel stride is known to be 1 where a thread has several.
#if CHANNELS > 1
#define INPUT_STRIDE 1
#else
#define INPUT_STRIDE p.channel_stride
#endif

// What a window spans along one dimension: from `start` (inside of the image) to `end`, `padded` counts padding in.
struct Window {
    int start, end, padded;
};

METAL_FUNC Window window_of(int position, int size, int outputs, int kernel_size, int step, int pad, int dilation)
{
    Window window;
#if ADAPTIVE
    window.start = position * size / outputs;
    window.end = ((position + 1) * size + outputs - 1) / outputs;
    window.padded = window.end - window.start;
#else
    int start = position * step - pad;
    int end = start + (kernel_size - 1) * dilation + 1;
    window.padded = min(end, size + pad) - start;
    window.start = start < 0 ? start + (dilation - 1 - start) / dilation * dilation : start;
    window.end = min(end, size);
#endif
    return window;
}

kernel void pool2d(
    device const a_t* image [[buffer(0)]],
    device out_t* out [[buffer(1)]],
    EPILOGUE_BUFFERS
    constant Params& p [[buffer(PARAMS_BUFFER)]],
    uint position [[thread_position_in_grid]])
{
    int pixel = int(position) / p.chunks;
    int channel = int(position) % p.chunks * CHANNELS;
    if (pixel >= p.pixels) {
        return;
    }
    int line = pixel / p.out_width;
    Window rows = window_of(
        line % p.out_height, p.height, p.out_height, p.kernel_height, p.step_y, p.pad_y, p.dilation_y);
    Window columns = window_of(
        pixel % p.out_width, p.width, p.out_width, p.kernel_width, p.step_x, p.pad_x, p.dilation_x);
    device const a_t* source = image + line / p.out_height * p.image_stride + channel * INPUT_STRIDE;

    float values[GROUP];
    for (int c = 0; c < GROUP; ++c) {
        values[c] = MAXIMUM ? -INFINITY : 0.0f;
    }
    for (int y = rows.start; y < rows.end; y += p.dilation_y) {
        for (int x = columns.start; x < columns.end; x += p.dilation_x) {
            int at = y * p.y_stride + x * p.x_stride;
            for (int c = 0; c < CHANNELS; ++c) {
                float value = float(source[at + c * INPUT_STRIDE]);
#if MAXIMUM
                values[c] = value > values[c] || value != value ? value : values[c];
#else
                values[c] += value;
#endif
            }
        }
    }
#if !MAXIMUM
    for (int c = 0; c < CHANNELS; ++c) {
        values[c] = values[c] / float(DIVISOR);
    }
#endif
    store_group(values, min(CHANNELS, p.channels - channel), 0, pixel, channel, out, EPILOGUE_ARGUMENTS p);
}
