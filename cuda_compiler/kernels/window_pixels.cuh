// What convolutions of images of one to four channels multiply whose windows move on by two pixels, on tensor cores of
// compute capability 9.0. Two neighbouring pixels, each filled up to four channels, take 16 bytes of shared memory, so
// that the windows of neighbouring results begin 16 bytes apart. That is how `wgmma` finds neighbouring columns of its
// second operand when nothing is swizzled: it multiplies overlapping windows where they lie, and none is ever copied.
// The first operand is the weights of 64 output channels, which stay in registers; the common dimension walks chunks of
// two taps, PAIRS of which make a line of the window, after BEFORE taps of zeros that let every window begin at an even
// pixel. LINES lines of LINE pairs are what a tile of results reads. Block: 128.
constexpr int THREADS = GROUP_THREADS;
constexpr int CHUNKS = TAPS_Y * PAIRS, STEPS = (CHUNKS + 1) / 2, SLOTS = LINES * LINE;
constexpr uint RESULT_LINE_BYTES = STEP_Y * LINE * 16; // between the windows of two lines of results
constexpr int ROUNDS = (SLOTS + THREADS - 1) / THREADS;

// Where a chunk of the first result's window lies, in bytes.
__device__ constexpr uint chunk_offset(int chunk)
{
    return uint(chunk / PAIRS * DILATION_Y * LINE + chunk % PAIRS) * 16;
}

// The first of a step's two chunks; an odd last one is taken along with the one before it.
__device__ constexpr int first_chunk(int step)
{
    return step * 2 + 1 < CHUNKS ? step * 2 : CHUNKS - 2;
}

// A thread's part of the weights, in the register layout of wgmma's first operand.
struct Weights {
    uint at[STEPS][4];

    __device__ __forceinline__ Weights(const tile_t* weight)
    {
        #pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            #pragma unroll
            for (int part = 0; part < 4; ++part) {
                at[step][part] = load(weight, step, part);
            }
        }
    }

    // Two neighbouring elements: of row lane / 4, or 8 further down, and of the first or second chunk.
    __device__ __forceinline__ static uint load(const tile_t* weight, int step, int part)
    {
        int lane = int(threadIdx.x) % 32, element = lane % 4 * 2;
        int output = int(blockIdx.y) * OUTPUTS + int(threadIdx.x) / 32 * 16 + lane / 4 + part % 2 * 8;
        int chunk = first_chunk(step) + part / 2, tap = chunk % PAIRS * 2 + element / 4 - BEFORE;
        bool inside = chunk >= step * 2 && tap >= 0 && tap < TAPS_X && output < COLUMNS;
        int line = output * TAPS_Y + chunk / PAIRS;
        return inside ? *reinterpret_cast<const uint*>(weight + (line * WEIGHT_TAPS_X + tap) * 4 + element % 4) : 0u;
    }
};

// The pixels of a tile, on their way from memory: every thread takes one pair of pixels a round.
struct Pixels {
    uint at[ROUNDS][CHANNELS]; // two pixels, one element after the other

    // Those under the results from a line and a column on.
    __device__ __forceinline__ void load(const tile_t* images, int number, int first_y, int first_x)
    {
        const tile_t* source = images + (long long)number * IMAGE_STRIDE;
        int top = first_y * STEP_Y - PAD_Y, left = first_x * 2 - PAD_X - BEFORE;
        #pragma unroll
        for (int round = 0; round < ROUNDS; ++round) {
            int slot = round * THREADS + int(threadIdx.x), y = top + slot / LINE, x = left + slot % LINE * 2;
            bool inside = uint(y) < uint(HEIGHT) && (SLOTS % THREADS == 0 || slot < SLOTS);
            #pragma unroll
            for (int word = 0; word < CHANNELS; ++word) {
                at[round][word] = 0;
                if (CONTIGUOUS) {
                    if (inside && uint(x) < uint(WIDTH)) {
                        const tile_t* pair = source + y * Y_STRIDE + x * CHANNELS;
                        at[round][word] = reinterpret_cast<const uint*>(pair)[word];
                    }
                    continue;
                }
                #pragma unroll
                for (int half = 0; half < 2; ++half) {
                    int element = word * 2 + half, further = x + element / CHANNELS;
                    if (inside && uint(further) < uint(WIDTH)) {
                        uint bits =
                            source[y * Y_STRIDE + further * X_STRIDE + element % CHANNELS * CHANNEL_STRIDE].bits;
                        at[round][word] |= bits << (half * 16);
                    }
                }
            }
        }
    }

    // Behind a barrier, `wgmma` of all threads can read them.
    __device__ __forceinline__ void store(unsigned char* window) const
    {
        #pragma unroll
        for (int round = 0; round < ROUNDS; ++round) {
            int slot = round * THREADS + int(threadIdx.x);
            uint4 chunk = make_uint4(filled(round, 0), filled(round, 2), filled(round, 4), filled(round, 6));
            if (SLOTS % THREADS == 0 || slot < SLOTS) {
                *reinterpret_cast<uint4*>(window + slot * 16) = chunk;
            }
        }
        publish_to_products();
    }

private:
    // Two elements of the pair when each pixel has four channels.
    __device__ __forceinline__ uint filled(int round, int first) const
    {
        uint word = 0;
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            int channel = first % 4 + half, element = first / 4 * CHANNELS + channel;
            if (channel < CHANNELS) {
                word |= (at[round][element / 2] >> (element % 2 * 16) & 0xffffu) << (half * 16);
            }
        }
        return word;
    }
};

// Where wgmma finds 16 x 64 elements: 8 x 8 blocks of 128 bytes, not swizzled, the next one along k after the distance
// of two chunks, the next results a line of results further down.
__device__ __forceinline__ uint64 window_descriptor(uint window, int step)
{
    int chunk = first_chunk(step);
    uint along_k = chunk_offset(chunk + 1) - chunk_offset(chunk);
    uint low = (window + chunk_offset(chunk)) >> 4 | along_k >> 4 << 16, high = RESULT_LINE_BYTES >> 4;
    return uint64(high) << 32 | low;
}
