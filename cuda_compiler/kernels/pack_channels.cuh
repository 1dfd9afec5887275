// Copies an image of any strides to channels-last, in which a pixel takes PIECES pieces of PIECE channels and a line
// has FIRST pixels before the image's own; what is added is zero. Behind OF_PIXEL channels come those of the pixel at
// DISTANCE. A thread copies a piece. Grid: pieces in x. Block: 256.
extern "C" __global__ void __launch_bounds__(256) pack_channels(const a_t* image, a_t* out, const Params p)
{
    wait_for_previous_grid();
    int index = int(blockIdx.x) * 256 + int(threadIdx.x), pixel = index / PIECES, first = index % PIECES * PIECE;
    if (pixel >= p.pixels) {
        return;
    }
    int x = pixel % PACKED_WIDTH - FIRST, line = pixel / PACKED_WIDTH, y = line % HEIGHT;
    const a_t* source = image + (long long)(line / HEIGHT) * p.image_stride + y * p.y_stride;
    Pack<a_t, PIECE> result;
    #pragma unroll
    for (int c = 0; c < PIECE; ++c) {
        int channel = (first + c) % OF_PIXEL, column = x + (first + c) / OF_PIXEL * DISTANCE;
        bool inside = uint(column) < uint(WIDTH) && channel < CHANNELS;
        result[c] = inside ? source[column * p.x_stride + channel * p.channel_stride] : a_t(0.0f);
    }
    store_pack(out + (long long)index * PIECE, result);
}
