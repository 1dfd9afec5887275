// A tile of TILE_X x TILE_Y results of a convolution, computed by a warpgroup for OUTPUTS output channels at a time.
// Outputs are the rows of what `wgmma` computes, neighbouring results its columns. A result's channels take
// STAGED_BYTES of shared memory on their way out.
constexpr int RESULTS = TILE_X * TILE_Y, OUTPUTS = 64, GROUP_THREADS = 128;
constexpr int TILES_X = (OUT_WIDTH + TILE_X - 1) / TILE_X, TILES_Y = (OUT_HEIGHT + TILE_Y - 1) / TILE_Y;

__device__ __forceinline__ int group_thread() { return int(threadIdx.x) % GROUP_THREADS; }

// A tile: the image, and its first result there.
struct Tile {
    int image, y, x;

    // The one that comes at a place in the launch's order.
    __device__ __forceinline__ Tile(int place, const Params& p)
    {
        int number = p.backwards ? p.tiles - 1 - place : place;
        image = number / (TILES_X * TILES_Y);
        y = number / TILES_X % TILES_Y * TILE_Y;
        x = number % TILES_X * TILE_X;
    }
};

__device__ __forceinline__ bool is_result(int y, int x)
{
    return (OUT_HEIGHT % TILE_Y == 0 || y < OUT_HEIGHT) && (OUT_WIDTH % TILE_X == 0 || x < OUT_WIDTH);
}

// The 16 bits that a result takes there.
__device__ __forceinline__ uint staged_bits(half result) { return result.bits; }
__device__ __forceinline__ uint staged_bits(bfloat result) { return result.bits; }
__device__ __forceinline__ uint staged_bits(uint8 code) { return code; }
__device__ __forceinline__ uint staged_bits(int8 code) { return uint8(code); }

// Stores four matrices of 8 x 8 values of 16 bits, of which a thread has two neighbours of a row each, column by
// column: each lane says where one of the 32 goes.
__device__ __forceinline__ void store_matrices(uint address, const uint (&word)[4])
{
#if __CUDA_ARCH__ >= 900
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
                 "r"(word[0]), "r"(word[1]), "r"(word[2]), "r"(word[3])
                 : "memory");
#endif
}

// Computes the results of some lines of a tile and brings them to shared memory, the channels of each side by side.
template <int COUNT>
__device__ __forceinline__ void stage(
    const float (&sum)[COUNT][4], int first, unsigned char* staged, Tile tile, EPILOGUE_PARAMETERS const Params& p)
{
    int lane = group_thread() % 32, channel = group_thread() / 32 * 16;
    int col = int(blockIdx.y) * OUTPUTS + channel + lane / 4, x = tile.x + lane % 4 * 2;
    uint at = shared_address(staged) + (lane / 16 * 8 + lane % 8) * STAGED_BYTES + (channel + lane / 8 % 2 * 8) * 2;
    #pragma unroll
    for (int i = 0; i < COUNT; i += 2) {
        int line = first + i;
        uint pair[4]; // of a line of results, each of two neighbours: first 8 channels, then the next 8
        #pragma unroll
        for (int j = 0; j < 8; ++j) {
            int result_y = tile.y + line + j / 4, result_x = x + j % 2, result_col = col + j / 2 % 2 * 8;
            bool inside = is_result(result_y, result_x) && (COLUMNS % OUTPUTS == 0 || result_col < COLUMNS);
            int row = inside ? (tile.image * OUT_HEIGHT + result_y) * OUT_WIDTH + result_x : 0;
            OUT_T result = element(sum[i + j / 4][j % 4], 0, row, inside ? result_col : 0, EPILOGUE_ARGUMENTS p);
            pair[j / 2] = j % 2 ? pair[j / 2] | staged_bits(result) << 16 : staged_bits(result);
        }
        store_matrices(at + line * TILE_X * STAGED_BYTES, pair);
    }
}

// Neighbouring results as they are stored: codes of a byte leave the place that each has next to it.
template <typename T>
__device__ __forceinline__ Pack<T, STORE_SIZE> staged_pack(const unsigned char* staged, int channel)
{
    if constexpr (sizeof(T) == 1) {
        static_assert(STORE_SIZE == 8, "16 bytes are read");
        uint4 words = *reinterpret_cast<const uint4*>(staged + channel * 2);
        Pack<T, STORE_SIZE> pack;
        pack.words[0] = __byte_perm(words.x, words.y, 0x6420);
        pack.words[1] = __byte_perm(words.z, words.w, 0x6420);
        return pack;
    } else {
        return load_pack<STORE_SIZE>(reinterpret_cast<const T*>(staged) + channel);
    }
}

__device__ __forceinline__ void store_results(const unsigned char* staged, Tile tile, OUT_T* out, const Params& p)
{
    constexpr int PACKS = OUTPUTS / STORE_SIZE;
    int channel = group_thread() % PACKS * STORE_SIZE, col = int(blockIdx.y) * OUTPUTS + channel;
    #pragma unroll 2
    for (int round = 0; round < RESULTS * PACKS / GROUP_THREADS; ++round) {
        int result = round * (GROUP_THREADS / PACKS) + group_thread() / PACKS;
        int y = tile.y + result / TILE_X, x = tile.x + result % TILE_X;
        if (is_result(y, x) && (COLUMNS % OUTPUTS == 0 || col < COLUMNS)) {
            int row = (tile.image * OUT_HEIGHT + y) * OUT_WIDTH + x;
            store_pack(out + place(0, row, col, p), staged_pack<OUT_T>(staged + result * STAGED_BYTES, channel));
        }
    }
}
