// Copies an image of any strides to channels-last, in which a pixel takes PIECES pieces of PIECE channels and a line has
// FIRST pixels before the image's own; what is added is zero. A thread copies a piece. Grid: pieces in x. Block: 256.
extern "C" __global__ void __launch_bounds__(256) pack_channels(const a_t* image, a_t* out, const Params p)
{
    wait_for_previous_grid();
    int index = int(blockIdx.x) * 256 + int(threadIdx.x), pixel = index / PIECES, first = index % PIECES * PIECE;
    if (pixel >= p.pixels) {
        return;
    }
    int x = pixel % PACKED_WIDTH - FIRST, line = pixel / PACKED_WIDTH, y = line % HEIGHT;
    const a_t* source = image + (long long)(line / HEIGHT) * p.image_stride + y * p.y_stride + x * p.x_stride;
    Pack<a_t, PIECE> result;
    #pragma unroll
    for (int c = 0; c < PIECE; ++c) {
        bool inside = uint(x) < uint(WIDTH) && first + c < CHANNELS;
        result[c] = inside ? source[(first + c) * p.channel_stride] : a_t(0.0f);
    }
    store_pack(out + (long long)index * PIECE, result);
}
