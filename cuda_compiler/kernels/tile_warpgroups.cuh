// Tiles of blocks in clusters, multiplied by warpgroups with `wgmma` of compute capability 9.0: four warps multiply 64
// rows at a time, straight from shared memory, while they copy the next tiles. WARPS_M / 4 x WARPS_N warpgroups share
// the results, of which each warp has 16 rows out of 64, in the registers where `mma.sync` would leave them.
static_assert(TILE_K == 64 && A_ALONG_K && B_ALONG_K, "lines of 128 bytes, swizzled as the tensor cores expect");
static_assert(A_BYTES % 1024 == 0 && B_BYTES % 1024 == 0, "the pattern repeats every eight lines");
static_assert(AHEAD <= STAGES, "tiles on their way");
constexpr int GROUP_ROWS = WARP_M * 4;

__device__ __forceinline__ int warpgroup() { return int(__shfl_sync(0xffffffffu, threadIdx.x / 128, 0)); }
__device__ __forceinline__ int warp_row(int m)
{
    return warpgroup() / WARPS_N * GROUP_ROWS + m * 64 + int(threadIdx.x / 32 % 4) * 16;
}
__device__ __forceinline__ int warp_col() { return warpgroup() % WARPS_N * WARP_N; }

__device__ __forceinline__ void multiply_on_tensor_cores(Accumulator& sum, uint64 a, uint64 b)
{
    begin_products();
    #pragma unroll
    for (int k = 0; k < TILE_K / 16; ++k) {
        #pragma unroll
        for (int m = 0; m < STEPS_M; ++m) {
            multiply_64_rows(sum.at[m], a + m * (64 * 128 >> 4) + k * 2, b + k * 2);
        }
    }
    commit_products();
}

// Multiplies `count` tiles that `copier` copies, see `begin_copies`. While one tile is multiplied the one before it may
// not be done: where stages are used again, AHEAD is two less than STAGES.
template <typename Copier>
__device__ __forceinline__ void multiply_tiles(Accumulator& sum, Copier& copier, int count, unsigned char* shared)
{
    sum.clear();
    begin_copies<AHEAD>(copier, count, shared);
    uint64 a = matrix_descriptor(shared_address(shared) + warpgroup() / WARPS_N * GROUP_ROWS * 128);
    uint64 b = matrix_descriptor(shared_address(shared) + A_BYTES + warp_col() * 128);
    int reading = 0, writing = AHEAD % STAGES;
    for (int tile = 0; tile < count; ++tile) {
        wait_for_copies<AHEAD - 1>();
        publish_to_products();
        __syncthreads();
        multiply_on_tensor_cores(sum, a + reading * (STAGE_BYTES >> 4), b + reading * (STAGE_BYTES >> 4));
        if (tile + AHEAD < count) {
            copier.copy_a(shared + writing * STAGE_BYTES);
            copier.copy_b(shared + writing * STAGE_BYTES + A_BYTES);
        }
        commit_copies();
        wait_for_products<1>();
        reading = reading + 1 == STAGES ? 0 : reading + 1;
        writing = writing + 1 == STAGES ? 0 : writing + 1;
    }
    wait_for_products<0>();
    wait_for_copies<0>();
    __syncthreads();
}
