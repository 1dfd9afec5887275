// Tiles of keys and values that are stored as the numbers they are.
typedef tile_t stored_t;
#define SCALE_PARAMETERS
#define SCALE_ARGUMENTS

// Starts copying `count` rows of SIZE elements, and zeros behind them, into a tile of BLOCK rows.
template <int SIZE, int WIDTH, int CHUNK>
__device__ __forceinline__ void load_tile(unsigned char* tile, const tile_t* source, int row_step, int step, int count)
{
    copy_rows<BLOCK, SIZE, WIDTH, CHUNK>(tile, source, step, count, [&](int i) { return (long long)i * row_step; });
}

// What scores and weights are multiplied by: nothing.
struct Scales {
    __device__ __forceinline__ Scales(int, int, int, PAGE_PARAMETERS const Params&) {}
    __device__ __forceinline__ void multiply_scores(float (&)[STEP / 8][4], int) const {}
    __device__ __forceinline__ void multiply_weights(float (&)[STEP / 8][4], int) const {}
};
__device__ __forceinline__ void take_unit(Rows&) {}
