// Matrix products on compute capability 9.0: a[m, k] by b[k, n], where b is packed codes. Tiles are those of
// matmul_bulk; the copy engine brings b from `numbers`, which warps that have nothing else to do fill meanwhile.

// What the copying thread does.
__device__ __forceinline__ void copy_operands(
    const Ring& ring, const TensorMap& a, const TensorMap& b, const Params& p)
{
    Turn turn;
    turn.parity = 1; // the first time around, everything is free
    for (int tile = int(blockIdx.x); tile < p.tiles_m * p.tiles_n; tile += int(gridDim.x)) {
        Work work(tile, p);
        for (int step = 0; step < work.count; ++step) {
            if (step % PART_STEPS == 0) {
                wait_for_numbers(work.col / TILE_N, step / PART_STEPS);
            }
            wait_for_phase(ring.empty(turn.stage), turn.parity);
            arrive_and_expect(ring.full(turn.stage), A_COPIED + B_BYTES);
            copy_b(ring, turn.stage, b, work, step);
            copy_a(ring, turn.stage, a, work, step);
            turn.next();
        }
    }
}

// Grid: blocks that stay in x.
extern "C" __global__ void __launch_bounds__(MOST_THREADS, 1) matmul_bulk_codes(
    const uint8* matrix, const scale_t* scales, const zero_t* zeros, const bias_t* biases, const codebook_t* entries,
    vector_t* numbers, const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b, OUT_T* out,
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
        wait_for_previous_grid();
        if (threadIdx.x == 0) {
            copy_operands(ring, a, b, p);
        } else if (threadIdx.x >= 32) {
            make_numbers(matrix, Groups{scales, zeros, biases}, entries, numbers, p);
        }
        __syncwarp();
        synchronize(3, 128);
        if (threadIdx.x == 0) {
            finish_numbers();
        }
    } else {
        allow_registers<PRODUCT_REGISTERS>();
        wait_for_previous_grid();
        multiply_and_store(ring, role - 1, out, EPILOGUE_ARGUMENTS p);
    }
}
