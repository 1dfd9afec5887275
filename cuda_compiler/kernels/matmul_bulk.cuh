// Matrix products on compute capability 9.0: a[m, k] by b[k, n], lines of both along k. One warp asks the copy engine
// for tiles, two warpgroups multiply what is there. With TURNS each of them has a tile of its own, and one stores while
// the other multiplies; else they share a tile. Blocks stay and take tiles in turns. SPLITS blocks form a cluster
// that computes one tile, each of them a part of k.
//
// Lines of b come in groups of 32, ordered by its map so that a thread's results, two of every eight columns for the
// tensor cores, are eight neighbours of a row.

// What the copying thread does. With B_CONSTANT nothing before this grid writes what b holds.
__device__ __forceinline__ void copy_operands(
    const Ring& ring, const TensorMap& a, const TensorMap& b, const Params& p)
{
    int tile = int(blockIdx.x), ahead = 0;
    if (B_CONSTANT) {
        Work work(tile, p);
        ahead = min(work.count, STAGES);
        for (int step = 0; step < ahead; ++step) {
            arrive_and_expect(ring.full(step), A_COPIED + B_BYTES);
            copy_b(ring, step, b, work, step);
        }
    }
    wait_for_previous_grid();
    Turn turn;
    turn.parity = 1; // the first time around, everything is free
    for (; tile < p.tiles_m * p.tiles_n; tile += int(gridDim.x)) {
        Work work(tile, p);
        for (int step = 0; step < work.count; ++step) {
            if (ahead == 0) {
                wait_for_phase(ring.empty(turn.stage), turn.parity);
                arrive_and_expect(ring.full(turn.stage), A_COPIED + B_BYTES);
                copy_b(ring, turn.stage, b, work, step);
            } else {
                --ahead;
            }
            copy_a(ring, turn.stage, a, work, step);
            turn.next();
        }
    }
}

// Grid: blocks that stay in x, parts of k in y.
extern "C" __global__ void KERNEL_ATTRIBUTES __launch_bounds__(MOST_THREADS, 1) matmul_bulk(
    const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b, OUT_T* out,
    EPILOGUE_PARAMETERS const Params p)
{
    extern __shared__ __align__(1024) unsigned char shared[];
    Ring ring{shared_address(shared)};
    int role = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
    if (threadIdx.x == 0) {
        ring.make(1, TURNS ? 4 : 8); // the copying thread; warps
        publish_barriers();
        prefetch_map(a);
        prefetch_map(b);
    }
    __syncthreads();
    if (role == 0) {
        leave_registers<COPY_REGISTERS>();
        if (threadIdx.x == 0) {
            copy_operands(ring, a, b, p);
        }
        if (SPLITS > 1) {
            synchronize_cluster();
            leave_cluster();
        }
    } else {
        allow_registers<PRODUCT_REGISTERS>();
        wait_for_previous_grid();
        multiply_and_store(ring, role - 1, out, EPILOGUE_ARGUMENTS p);
    }
}
