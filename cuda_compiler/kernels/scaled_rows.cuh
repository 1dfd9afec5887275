// Reduces along rows, then computes along them, and stores a number for each row beside the results. Grid: groups of
// rows in x. Block: ROW_THREADS for each row.
extern "C" __global__ void __launch_bounds__(BLOCK_THREADS) scaled_rows(
    BESIDE_T* beside, OUT_T* out, EPILOGUE_PARAMETERS const Params p)
{
    wait_for_previous_grid();
    int row = int(blockIdx.x) * (BLOCK_THREADS / ROW_THREADS) + int(threadIdx.x) / ROW_THREADS;
    if (row < p.rows) {
        compute_row(row, int(threadIdx.x) % ROW_THREADS, beside, out, EPILOGUE_ARGUMENTS p);
    }
}
