// Of each block of a mask, STATE_ROWS rows by BLOCK positions, whether it is closed everywhere (0), changes nothing
// (2), or neither: 1 plus four times the sets of 16 positions at its end that are closed. CHUNK neighbours are read at
// a time. Where a block has few chunks, the lanes of a warp take several blocks side by side. Grid: blocks of
// positions, SIDE_BY_SIDE at a time, blocks of rows, distinct heads. Block: 128.
constexpr int CHUNKS = STATE_ROWS * BLOCK / CHUNK, SPAN = 128 / SIDE_BY_SIDE; // threads for a block of the mask
constexpr int LANES = SPAN < 32 ? SPAN : 32;
static_assert(SIDE_BY_SIDE == 1 || SPAN <= 32, "a block of the mask is a whole block of threads' or one warp's");

extern "C" __global__ void __launch_bounds__(128) mask_states(
    const mask_t* mask, unsigned char* states, const Params p)
{
    __shared__ int last_of_warp[4];
    int batch = int(blockIdx.z) / p.heads, head = int(blockIdx.z) % p.heads;
    int tile = int(blockIdx.x) * SIDE_BY_SIDE + int(threadIdx.x) / SPAN, tiles = (p.length + BLOCK - 1) / BLOCK;
    wait_for_previous_grid();
    mask += (long long)batch * p.mask_batch + (long long)head * p.mask_head;
    bool all = true;
    int last = -1; // position in the block that is open
    #pragma unroll
    for (int chunk = int(threadIdx.x) % SPAN; chunk < CHUNKS; chunk += SPAN) {
        int index = chunk * CHUNK, row = int(blockIdx.y) * STATE_ROWS + index / BLOCK;
        int position = tile * BLOCK + index % BLOCK;
        if (row < p.rows && position < p.length) {
            auto pack = load_pack<CHUNK>(mask + (long long)row * p.mask_row + (long long)position * p.mask_step);
            #pragma unroll
            for (int u = 0; u < CHUNK; ++u) {
                float added = mask_value(pack[u]);
                last = added <= MASK_CLOSED ? last : max(last, index % BLOCK + u);
                all &= added == 0.0f;
            }
        }
    }
    last = warp_max<LANES>(last);
    if (SIDE_BY_SIDE == 1) {
        last_of_warp[int(threadIdx.x) / 32] = last;
        all = __syncthreads_and(all);
        last = max(max(last_of_warp[0], last_of_warp[1]), max(last_of_warp[2], last_of_warp[3]));
    } else {
        uint own = (LANES < 32 ? (1u << LANES % 32) - 1 : 0xffffffffu) << int(threadIdx.x) % 32 / LANES * LANES;
        all = (__ballot_sync(0xffffffffu, all) & own) == own;
    }
    if (int(threadIdx.x) % SPAN == 0 && tile < tiles) {
        int state = last < 0 ? 0 : all ? 2 : 1 + (BLOCK - 1 - last) / 16 * 4;
        states[((int)blockIdx.z * (int)gridDim.y + (int)blockIdx.y) * tiles + tile] = (unsigned char)state;
    }
}
