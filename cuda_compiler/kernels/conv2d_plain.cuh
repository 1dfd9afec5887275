// Convolution of any strides and data types, and with few channels in a group: a thread computes one result. Grid:
// results in x, channels innermost. Block: 128.
extern "C" __global__ void __launch_bounds__(128) conv2d_plain(
    const a_t* image, const b_t* weight, OUT_T* out, EPILOGUE_PARAMETERS const Params p)
{
    wait_for_previous_grid();
    int index = int(blockIdx.x) * 128 + int(threadIdx.x);
    if (index >= p.results) {
        return;
    }
    int channel = index % p.outputs, pixel = index / p.outputs, group = channel / p.group_outputs;
    int line = pixel / p.out_width;
    int left = pixel % p.out_width * STEP_X - PAD_X, top = line % p.out_height * STEP_Y - PAD_Y;
    const a_t* source = image + (long long)(line / p.out_height) * p.image_stride + group * CHANNELS * p.channel_stride;
    const b_t* weights = weight + (long long)channel * p.w_output;
    float sum = 0.0f;
    for (int tap = 0; tap < TAPS_Y * TAPS_X; ++tap) {
        int y = top + tap / TAPS_X * DILATION_Y, x = left + tap % TAPS_X * DILATION_X;
        if (uint(y) >= uint(p.height) || uint(x) >= uint(p.width)) {
            continue;
        }
        const a_t* at = source + y * p.y_stride + x * p.x_stride;
        const b_t* at_tap = weights + tap / TAPS_X * p.w_y + tap % TAPS_X * p.w_x;
        for (int c = 0; c < CHANNELS; ++c) {
            sum += float(at[c * p.channel_stride]) * float(at_tap[c * p.w_channel]);
        }
    }
    float value[1] = {sum};
    finish(value, 0, pixel, channel, out, EPILOGUE_ARGUMENTS p);
}
