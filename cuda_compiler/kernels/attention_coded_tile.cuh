// Tiles of keys and values whose pages hold codes of a byte, with a scale for each position: codes become numbers on
// their way to shared memory; the scale of a key multiplies its scores, that of a value the weight of its position, by
// VALUE_UNIT more, so that half precision holds what it would of the values themselves.
typedef unsigned char stored_t;
#define SCALE_PARAMETERS const k_scale_t *k_scales, const v_scale_t *v_scales,
#define SCALE_ARGUMENTS k_scales, v_scales,

// Eight codes side by side as numbers.
__device__ __forceinline__ uint4 numbers_of_bytes(uint2 codes)
{
    uint pairs[4]; // of every other number
    bytes_as_numbers(pairs, codes.x, codes.y, zero_pair(0.0f));
    return make_uint4(
        __byte_perm(pairs[0], pairs[1], 0x5410), __byte_perm(pairs[0], pairs[1], 0x7632),
        __byte_perm(pairs[2], pairs[3], 0x5410), __byte_perm(pairs[2], pairs[3], 0x7632));
}

// Makes numbers of BLOCK rows of SIZE codes, in a tile of as many rows; a page has all of them.
template <int SIZE, int WIDTH, int CHUNK>
__device__ __forceinline__ void load_tile(unsigned char* tile, const unsigned char* source, int row_step, int, int)
{
    static_assert(SIZE == WIDTH && CHUNK == 8, "codes are read in chunks of eight");
    #pragma unroll 4
    for (int index = int(threadIdx.x); index < BLOCK * (SIZE / 8); index += THREADS) {
        int row = index / (SIZE / 8), column = index % (SIZE / 8) * 8;
        uint2 codes = *reinterpret_cast<const uint2*>(source + (long long)row * row_step + column);
        *reinterpret_cast<uint4*>(tile + place<WIDTH>(row, column)) = numbers_of_bytes(codes);
    }
}

// Where the scales of a block of positions lie.
struct Scales {
    const k_scale_t* key;
    const v_scale_t* value;

    __device__ __forceinline__ Scales(
        const k_scale_t* k_scales, const v_scale_t* v_scales, int batch, int group, int position,
        PAGE_PARAMETERS const Params& p)
    {
        long long page = page_of(0, 0, batch, position / PAGE, PAGE_ARGUMENTS p);
        key = k_scales + (long long)group * K_SCALE_HEAD + page * K_SCALE_PAGE + position % PAGE * K_SCALE_ROW;
        value = v_scales + (long long)group * V_SCALE_HEAD + page * V_SCALE_PAGE + position % PAGE * V_SCALE_ROW;
    }

    // Scores, or weights, of a warp at STEP positions from `first` of the block on, times what belongs to them.
    __device__ __forceinline__ void multiply_scores(float (&score)[STEP / 8][4], int first) const
    {
        multiply(score, key, K_SCALE_ROW, first, 1.0f);
    }
    __device__ __forceinline__ void multiply_weights(float (&weight)[STEP / 8][4], int first) const
    {
        multiply(weight, value, V_SCALE_ROW, first, VALUE_UNIT);
    }

private:
    template <typename S>
    __device__ __forceinline__ static void multiply(
        float (&number)[STEP / 8][4], const S* scales, int step, int first, float unit)
    {
        #pragma unroll
        for (int n = 0; n < STEP / 8; ++n) {
            #pragma unroll
            for (int u = 0; u < 2; ++u) {
                float scale = float(scales[(first + n * 8 + int(threadIdx.x) % 4 * 2 + u) * step]) * unit;
                number[n][u] *= scale;
                number[n][u + 2] *= scale;
            }
        }
    }
};

// Results as they are without the unit of weights.
__device__ __forceinline__ void take_unit(Rows& rows)
{
    #pragma unroll
    for (int e = 0; e < V_WIDTH / 8; ++e) {
        #pragma unroll
        for (int u = 0; u < 4; ++u) {
            rows.result[e][u] *= 1.0f / VALUE_UNIT;
        }
    }
}
