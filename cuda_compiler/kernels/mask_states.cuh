// Of each block of a mask, STATE_ROWS rows by BLOCK positions, whether it is closed everywhere (0), changes nothing (2), or
// neither (1); CHUNK neighbours are read at a time. Grid: blocks of positions, blocks of rows, distinct heads. Block: 128.
extern "C" __global__ void __launch_bounds__(128) mask_states(
    const mask_t* mask, unsigned char* states, const Params p)
{
    int batch = int(blockIdx.z) / p.heads, head = int(blockIdx.z) % p.heads;
    wait_for_previous_grid();
    mask += (long long)batch * p.mask_batch + (long long)head * p.mask_head;
    bool any = false, all = true;
    #pragma unroll
    for (int index = int(threadIdx.x) * CHUNK; index < STATE_ROWS * BLOCK; index += 128 * CHUNK) {
        int row = int(blockIdx.y) * STATE_ROWS + index / BLOCK, position = int(blockIdx.x) * BLOCK + index % BLOCK;
        if (row < p.rows && position < p.length) {
            auto chunk = load_pack<CHUNK>(mask + (long long)row * p.mask_row + (long long)position * p.mask_step);
            #pragma unroll
            for (int u = 0; u < CHUNK; ++u) {
                float added = mask_value(chunk[u]);
                any |= !(added <= MASK_CLOSED);
                all &= added == 0.0f;
            }
        }
    }
    any = __syncthreads_or(any);
    all = __syncthreads_and(all);
    if (threadIdx.x == 0) {
        states[((int)blockIdx.z * (int)gridDim.y + (int)blockIdx.y) * (int)gridDim.x + (int)blockIdx.x] = any ? all ? 2 : 1 : 0;
    }
}
