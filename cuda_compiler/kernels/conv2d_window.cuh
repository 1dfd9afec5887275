// Convolution of images of one to four channels whose windows move on by two pixels, on tensor cores of compute capability
// 9.0. Two neighbouring pixels, each filled up to four channels, take 16 bytes of shared memory, so that the windows of
// neighbouring results begin 16 bytes apart. That is how `wgmma` finds neighbouring columns of its second operand when
// nothing is swizzled: it multiplies overlapping windows where they lie, and none is ever copied. The first operand is the
// weights of 64 output channels, which stay in registers; the common dimension walks chunks of two taps.
// PAIRS of them make a line of the window, after BEFORE taps of zeros that let every window begin at an even pixel.
// Blocks stay and take tiles of TILE_X x TILE_Y results in turn; LINES lines of LINE pairs are what a tile reads, and a
// result's channels take STAGED_BYTES of shared memory. Grid: blocks in x, 64 output channels in y. Block: 128.
constexpr int RESULTS = TILE_X * TILE_Y, OUTPUTS = 64, THREADS = 128;
constexpr int CHUNKS = TAPS_Y * PAIRS, STEPS = (CHUNKS + 1) / 2, SLOTS = LINES * LINE;
constexpr int ROUNDS = (SLOTS + THREADS - 1) / THREADS;
constexpr int TILES_X = (OUT_WIDTH + TILE_X - 1) / TILE_X, TILES_Y = (OUT_HEIGHT + TILE_Y - 1) / TILE_Y;

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

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
__device__ __forceinline__ uint shared_address(const void* pointer)
{
    return uint(__cvta_generic_to_shared(pointer));
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

// A tile: the image, and its first result there.
struct Tile {
    int image, y, x;

    __device__ __forceinline__ explicit Tile(int number)
        : image(number / (TILES_X * TILES_Y)), y(number / TILES_X % TILES_Y * TILE_Y), x(number % TILES_X * TILE_X)
    {
    }
};

// Asks for the pixels of a tile of one of the next rounds: when they are loaded, they are no further away than the level-2
// cache, however busy the memory is with results.
__device__ __forceinline__ void prefetch(const tile_t* image, Tile tile)
{
#if CONTIGUOUS
    constexpr int WIDE = LINE * 2 * CHANNELS, PARTS = WIDE / 64 + 2; // elements of a line, and lines of the cache
    const tile_t* source = image + (long long)tile.image * IMAGE_STRIDE;
    int top = tile.y * STEP_Y - PAD_Y, left = (tile.x * 2 - PAD_X - BEFORE) * CHANNELS;
    #pragma unroll
    for (int round = 0; round < (LINES * PARTS + THREADS - 1) / THREADS; ++round) {
        int i = round * THREADS + int(threadIdx.x);
        int y = top + i / PARTS, x = max(left + min(i % PARTS * 64, WIDE - 1), 0);
        if (i < LINES * PARTS && uint(y) < uint(HEIGHT) && x < WIDTH * CHANNELS) {
            asm volatile("prefetch.global.L2 [%0];" ::"l"(source + y * Y_STRIDE + x));
        }
    }
#endif
}

// The pixels of a tile, on their way from memory: every thread takes one pair of pixels a round.
struct Pixels {
    uint at[ROUNDS][CHANNELS]; // two pixels, one element after the other

    __device__ __forceinline__ void load(const tile_t* image, Tile tile)
    {
        const tile_t* source = image + (long long)tile.image * IMAGE_STRIDE;
        int top = tile.y * STEP_Y - PAD_Y, left = tile.x * 2 - PAD_X - BEFORE;
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
                        uint bits = source[y * Y_STRIDE + further * X_STRIDE + element % CHANNELS * CHANNEL_STRIDE].bits;
                        at[round][word] |= bits << (half * 16);
                    }
                }
            }
        }
    }

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

// sum[64 outputs x 128 results] += weights[64 x 16] * window[16 x 128]; `wgmma` goes on in the background.
__device__ __forceinline__ void multiply(float (&sum)[64], const uint (&a)[4], unsigned long long window, bool add)
{
#define NPU_SUMS(i) "+f"(sum[i]), "+f"(sum[i + 1]), "+f"(sum[i + 2]), "+f"(sum[i + 3])
    asm volatile(
        "{.reg .pred add; setp.ne.b32 add, %69, 0;"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32." WGMMA_TYPE "." WGMMA_TYPE " "
        "{%0, %1, %2, %3, %4, %5, %6, %7, "
        "%8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, "
        "%24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, "
        "%40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, "
        "%56, %57, %58, %59, %60, %61, %62, %63}, "
        "{%64, %65, %66, %67}, %68, add, 1, 1, 0;}"
        : NPU_SUMS(0), NPU_SUMS(4), NPU_SUMS(8), NPU_SUMS(12), NPU_SUMS(16), NPU_SUMS(20), NPU_SUMS(24), NPU_SUMS(28),
          NPU_SUMS(32), NPU_SUMS(36), NPU_SUMS(40), NPU_SUMS(44), NPU_SUMS(48), NPU_SUMS(52), NPU_SUMS(56), NPU_SUMS(60)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(window), "r"(int(add)));
#undef NPU_SUMS
}

// Where wgmma finds 16 x 128 elements: 8 x 8 blocks of 128 bytes, not swizzled, the next one along k after the distance
// of two chunks, the next results a line of results further down.
__device__ __forceinline__ unsigned long long window_descriptor(uint window, int step)
{
    int chunk = first_chunk(step);
    uint along_k = chunk_offset(chunk + 1) - chunk_offset(chunk), along_results = STEP_Y * LINE * 16;
    uint low = (window + chunk_offset(chunk)) >> 4 | along_k >> 4 << 16, high = along_results >> 4;
    return (unsigned long long)high << 32 | low;
}

__device__ __forceinline__ void multiply_window(float (&sum)[64], const Weights& weights, uint window)
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    #pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        multiply(sum, weights.at[step], window_descriptor(window, step), step > 0);
    }
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
}

__device__ __forceinline__ bool is_result(int y, int x)
{
    return (OUT_HEIGHT % TILE_Y == 0 || y < OUT_HEIGHT) && (OUT_WIDTH % TILE_X == 0 || x < OUT_WIDTH);
}

// Computes the results and brings them to shared memory, the channels of each side by side.
__device__ __forceinline__ void stage(
    const float (&sum)[64], unsigned char* staged, Tile tile, EPILOGUE_PARAMETERS const Params& p)
{
    int lane = int(threadIdx.x) % 32, channel = int(threadIdx.x) / 32 * 16;
    int col = int(blockIdx.y) * OUTPUTS + channel + lane / 4, x = tile.x + lane % 4 * 2;
    uint at = shared_address(staged) + (lane / 16 * 8 + lane % 8) * STAGED_BYTES + (channel + lane / 8 % 2 * 8) * 2;
    #pragma unroll
    for (int line = 0; line < TILE_Y; line += 2) {
        uint pair[4]; // of a line of results, each of two neighbours: first 8 channels, then the next 8
        #pragma unroll
        for (int i = 0; i < 8; ++i) {
            int result_y = tile.y + line + i / 4, result_x = x + i % 2, result_col = col + i / 2 % 2 * 8;
            bool inside = is_result(result_y, result_x) && (COLUMNS % OUTPUTS == 0 || result_col < COLUMNS);
            int row = inside ? (tile.image * OUT_HEIGHT + result_y) * OUT_WIDTH + result_x : 0;
            OUT_T result = element(sum[line * 4 + i], 0, row, inside ? result_col : 0, EPILOGUE_ARGUMENTS p);
            pair[i / 2] = i % 2 ? pair[i / 2] | uint(result.bits) << 16 : uint(result.bits);
        }
        asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                         at + line * TILE_X * STAGED_BYTES),
                     "r"(pair[0]), "r"(pair[1]), "r"(pair[2]), "r"(pair[3])
                     : "memory");
    }
}

__device__ __forceinline__ void store_results(const unsigned char* staged, Tile tile, OUT_T* out, const Params& p)
{
    constexpr int PACKS = OUTPUTS / STORE_SIZE;
    int channel = int(threadIdx.x) % PACKS * STORE_SIZE, col = int(blockIdx.y) * OUTPUTS + channel;
    #pragma unroll 2
    for (int round = 0; round < RESULTS * PACKS / THREADS; ++round) {
        int result = round * (THREADS / PACKS) + int(threadIdx.x) / PACKS;
        int y = tile.y + result / TILE_X, x = tile.x + result % TILE_X;
        if (is_result(y, x) && (COLUMNS % OUTPUTS == 0 || col < COLUMNS)) {
            const OUT_T* from = reinterpret_cast<const OUT_T*>(staged + result * STAGED_BYTES) + channel;
            int row = (tile.image * OUT_HEIGHT + y) * OUT_WIDTH + x;
            store_pack(out + place(0, row, col, p), load_pack<STORE_SIZE>(from));
        }
    }
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) conv2d_window(
    const tile_t* image, const tile_t* weight, OUT_T* out, EPILOGUE_PARAMETERS const Params p)
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(128) unsigned char shared[];
    unsigned char* staged = shared + WINDOW_BYTES;
    Weights weights(weight);
    wait_for_previous_grid();
    Pixels pixels;
    pixels.load(image, Tile(int(blockIdx.x)));
    for (int number = int(blockIdx.x); number < p.tiles; number += int(gridDim.x)) {
        pixels.store(shared);
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncthreads(); // the pixels are there, and the last tile's results have been read
        if (number + int(gridDim.x) < p.tiles) {
            pixels.load(image, Tile(number + int(gridDim.x)));
        }
        if (number + AHEAD * int(gridDim.x) < p.tiles) {
            prefetch(image, Tile(number + AHEAD * int(gridDim.x)));
        }
        float sum[64];
        multiply_window(sum, weights, shared_address(shared));
        stage(sum, staged, Tile(number), EPILOGUE_ARGUMENTS p);
        __syncthreads();
        store_results(staged, Tile(number), out, p);
    }
#endif
}
