// Tiles multiplied warp by warp, with `mma.sync` or without tensor cores: WARPS_M x WARPS_N warps share the results.
static_assert(STEPS_N % 2 == 0 && TILE_K % 16 == 0, "a warp multiplies 16 x 16 by 16 x 16");

// Where a warp's results begin in the tile: those of its step `m` along the rows.
__device__ __forceinline__ int warp_row(int m) { return int(threadIdx.x / 32) / WARPS_N * WARP_M + m * 16; }
__device__ __forceinline__ int warp_col() { return int(threadIdx.x / 32) % WARPS_N * WARP_N; }

// Where a lane's row of the first 16 x 16 block of an operand begins; `base` is the warp's first row or column.
__device__ __forceinline__ uint a_fragment(uint base)
{
    uint lane = threadIdx.x % 32;
    return A_ALONG_K ? tile_offset<TILE_M, true>(base + lane % 16, lane / 16 * 8)
                     : tile_offset<TILE_M, false>(base + lane / 8 % 2 * 8, lane / 16 * 8 + lane % 8);
}

__device__ __forceinline__ uint b_fragment(uint base)
{
    uint lane = threadIdx.x % 32;
    return B_ALONG_K ? tile_offset<TILE_N, true>(base + lane / 16 * 8 + lane % 8, lane / 8 % 2 * 8)
                     : tile_offset<TILE_N, false>(base + lane / 16 * 8, lane / 8 % 2 * 8 + lane % 8);
}

// The block `step` further along and `k` further down; chunks are permuted by exclusive or, so that steps are too.
template <int EXTENT, bool ALONG_K>
__device__ __forceinline__ void load_fragment(uint (&part)[4], uint tile, uint first, int step, int k)
{
    if (ALONG_K) {
        load_matrices(part, tile + (first ^ uint(k * 2)) + step * 16 * TILE_K * 2);
    } else {
        load_matrices_transposed(part, tile + (first ^ uint(step * 32)) + k * EXTENT * 2);
    }
}

__device__ __forceinline__ void multiply_on_tensor_cores(Accumulator& sum, uint tile, uint a_first, uint b_first)
{
    #pragma unroll
    for (int k = 0; k < TILE_K; k += 16) {
        uint a_part[STEPS_M][4], b_part[STEPS_N / 2][4];
        #pragma unroll
        for (int m = 0; m < STEPS_M; ++m) {
            load_fragment<TILE_M, A_ALONG_K>(a_part[m], tile, a_first, m, k);
        }
        #pragma unroll
        for (int n = 0; n < STEPS_N / 2; ++n) {
            load_fragment<TILE_N, B_ALONG_K>(b_part[n], tile + A_BYTES, b_first, n, k);
        }
        #pragma unroll
        for (int m = 0; m < STEPS_M; ++m) {
            #pragma unroll
            for (int n = 0; n < STEPS_N; ++n) {
                TensorCores<tile_t>::multiply(
                    sum.at[m][n], a_part[m], b_part[n / 2][n % 2 * 2], b_part[n / 2][n % 2 * 2 + 1]);
            }
        }
    }
}

// The same without tensor cores, into the same registers.
__device__ __forceinline__ void multiply_plainly(Accumulator& sum, const unsigned char* tile)
{
    uint lane = threadIdx.x % 32, row = warp_row(0) + lane / 4, col = warp_col() + lane % 4 * 2;
    for (int k = 0; k < TILE_K; ++k) {
        #pragma unroll
        for (int m = 0; m < STEPS_M * 2; ++m) {
            uint a = tile_offset<TILE_M, A_ALONG_K>(row + m * 8, k);
            tile_t left = *reinterpret_cast<const tile_t*>(tile + a);
            #pragma unroll
            for (int n = 0; n < STEPS_N * 2; ++n) {
                uint b = A_BYTES + tile_offset<TILE_N, B_ALONG_K>(col + n / 2 * 8 + n % 2, k);
                tile_t right = *reinterpret_cast<const tile_t*>(tile + b);
                add_product(sum.at[m / 2][n / 2][m % 2 * 2 + n % 2], left, right);
            }
        }
    }
}

// Multiplies `count` tiles that `copier` copies, see `begin_copies`.
template <typename Copier>
__device__ __forceinline__ void multiply_tiles(Accumulator& sum, Copier& copier, int count, unsigned char* shared)
{
    uint a_first = a_fragment(warp_row(0)), b_first = b_fragment(warp_col());
    sum.clear();
    begin_copies<STAGES - 1>(copier, count, shared);
    int reading = 0, writing = (STAGES - 1) * STAGE_BYTES;
    for (int tile = 0; tile < count; ++tile) {
        wait_for_copies<STAGES - 2>();
        __syncthreads();
        if (tile + STAGES - 1 < count) {
            copier.copy_a(shared + writing);
            copier.copy_b(shared + writing + A_BYTES);
        }
        commit_copies();
        if (TensorCores<tile_t>::available) {
            multiply_on_tensor_cores(sum, shared_address(shared) + reading, a_first, b_first);
        } else {
            multiply_plainly(sum, shared + reading);
        }
        reading = reading == (STAGES - 1) * STAGE_BYTES ? 0 : reading + STAGE_BYTES;
        writing = writing == (STAGES - 1) * STAGE_BYTES ? 0 : writing + STAGE_BYTES;
    }
    wait_for_copies<0>();
    __syncthreads();
}
