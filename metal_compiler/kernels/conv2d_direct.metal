// Convolution without tiles: for depthwise convolutions and small groups, which would leave a tile mostly empty, and
// for weights of any strides. A thread computes CHANNELS neighbouring output channels of a pixel.
// Grid: threads in x. Block: 64.

// Strides of neighbouring channels are known to be 1 where a thread has several.
#if CHANNELS > 1
#define INPUT_STRIDE 1
#define OUTPUT_STRIDE 1
#else
#define INPUT_STRIDE p.channel_stride
#define OUTPUT_STRIDE p.weight_output
#endif

kernel void conv2d_direct(
    device const a_t* image [[buffer(0)]],
    device const b_t* weight [[buffer(1)]],
    device out_t* out [[buffer(2)]],
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
    int x0 = pixel % p.out_width * p.step_x - p.pad_x;
    int y0 = line % p.out_height * p.step_y - p.pad_y;
    device const a_t* origin = image + line / p.out_height * p.image_stride;
    device const b_t* filters = weight + channel * OUTPUT_STRIDE;

    float sums[GROUP];
    for (int c = 0; c < GROUP; ++c) {
        sums[c] = 0.0f;
    }
#if DEPTHWISE
    device const a_t* source = origin + channel * INPUT_STRIDE;
#else
    int first_input[CHANNELS];
    for (int c = 0; c < CHANNELS; ++c) {
        first_input[c] = min(channel + c, p.outputs - 1) / p.group_outputs * p.group_inputs;
    }
#endif
    for (int ky = 0; ky < p.kernel_height; ++ky) {
        int y = y0 + ky * p.dilation_y;
        for (int kx = 0; kx < p.kernel_width; ++kx) {
            int x = x0 + kx * p.dilation_x;
            if (uint(y) < uint(p.height) && uint(x) < uint(p.width)) {
                int at = y * p.y_stride + x * p.x_stride;
                device const b_t* tap = filters + ky * p.weight_y + kx * p.weight_x;
#if DEPTHWISE
                for (int c = 0; c < CHANNELS; ++c) {
                    sums[c] += float(source[at + c * INPUT_STRIDE]) * float(tap[c * OUTPUT_STRIDE]);
                }
#else
                for (int i = 0; i < p.group_inputs; ++i) {
                    for (int c = 0; c < CHANNELS; ++c) {
                        float value = float(origin[at + (first_input[c] + i) * INPUT_STRIDE]);
                        sums[c] += value * float(tap[i * p.weight_input + c * OUTPUT_STRIDE]);
                    }
                }
#endif
            }
        }
    }
    store_group(sums, min(CHANNELS, p.outputs - channel), 0, pixel, channel, out, EPILOGUE_ARGUMENTS p);
}
