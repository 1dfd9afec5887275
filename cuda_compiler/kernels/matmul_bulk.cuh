// Matrix products on compute capability 9.0: a[m, k] by b[k, n], lines of both along k. Two warps ask the copy engine for
// tiles, two warpgroups multiply what is there. With TURNS each of them has a tile of its own, and one stores while the other
// multiplies; else they share one. Blocks stay and walk over the tiles. SPLITS parts of k have a block each,
// which form a cluster; such blocks compute one tile.
//
// Lines of b come in groups of 32, ordered by its map so that a thread's results, two of every eight columns for the tensor
// cores, are eight neighbours of a row.

// Where a thread has few results, registers are left to blocks of the kernel ahead, beside which this one can then begin.
constexpr int MOST_THREADS = BESIDE ? 2 * THREADS : STEPS_M * GROUP_COLUMNS <= 160 ? 512 : THREADS;
constexpr int COPY_REGISTERS = MOST_THREADS == 512 ? 56 : 24;
constexpr int PRODUCT_REGISTERS = BESIDE ? 104 : MOST_THREADS == 512 ? 160 : 240;

// What a copying thread does for one operand: `copy` starts that of a step into a stage, of so many bytes.
template <int STAGES, int BYTES, typename Copy>
__device__ __forceinline__ void copy_operand(const Ring<STAGES, BYTES>& ring, int bytes, const Params& p, Copy copy)
{
    Turn<STAGES> turn;
    turn.parity = 1; // the first time around, everything is free
    for (int tile = int(blockIdx.x); tile < p.tiles_m * p.tiles_n; tile += int(gridDim.x)) {
        Work work(tile, p);
        for (int step = work.first; step < work.first + work.count; ++step) {
            wait_for_phase(ring.empty(turn.stage), turn.parity);
            arrive_and_expect(ring.full(turn.stage), bytes);
            copy(ring.at(turn.stage), ring.full(turn.stage), work, step * 64);
            turn.next();
        }
    }
}

// What the threads that copy do. With B_CONSTANT nothing before this grid writes what b holds.
__device__ __forceinline__ void copy_operands(const Rings& rings, const TensorMap& a, const TensorMap& b, const Params& p)
{
    if (threadIdx.x == 0) {
        if (!B_CONSTANT) {
            wait_for_previous_grid();
        }
        copy_operand(rings.b, B_BYTES, p, [&](uint target, uint barrier, const Work& work, int k) {
            copy_groups(target, b, barrier, k, work.col / 32);
        });
    } else if (threadIdx.x == 32) {
        wait_for_previous_grid();
        copy_operand(rings.a, A_COPIED, p, [&](uint target, uint barrier, const Work& work, int k) {
            copy_lines(target, a, barrier, k, work.row);
        });
    }
}

// Grid: blocks that stay in x, parts of k in y.
extern "C" __global__ void KERNEL_ATTRIBUTES __launch_bounds__(MOST_THREADS, 1) matmul_bulk(
    const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b, OUT_T* out, EPILOGUE_PARAMETERS const Params p)
{
    extern __shared__ __align__(1024) unsigned char shared[];
    Rings rings(shared_address(shared));
    int role = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
    if (threadIdx.x == 0) {
        rings.a.make();
        rings.b.make();
        publish_barriers();
        prefetch_map(a);
        prefetch_map(b);
    }
    __syncthreads();
    if (role == 0) {
        leave_registers<COPY_REGISTERS>();
        copy_operands(rings, a, b, p);
        if (SPLITS > 1) {
            wait_for_cluster();
            leave_cluster();
        }
    } else {
        allow_registers<PRODUCT_REGISTERS>();
        wait_for_previous_grid();
        multiply_and_store(rings, role - 1, out, EPILOGUE_ARGUMENTS p);
    }
}
