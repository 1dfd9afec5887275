// Reduces along rows, then computes along them. Grid: groups of rows in x. Block: ROW_THREADS for each row; with COLUMNS
// a row for each lane of the warps, which read neighbouring rows side by side.
extern "C" __global__ void __launch_bounds__(BLOCK_THREADS) rows(OUT_T* out, EPILOGUE_PARAMETERS const Params p)
{
    wait_for_previous_grid();
#if COLUMNS
    int row = int(blockIdx.x) * 32 + int(threadIdx.x) % 32, lane = int(threadIdx.x) / 32;
    compute_row(row < p.rows ? row : 0, lane, row < p.rows, out, EPILOGUE_ARGUMENTS p);
#else
    int row = int(blockIdx.x) * (BLOCK_THREADS / ROW_THREADS) + int(threadIdx.x) / ROW_THREADS;
    if (row < p.rows) {
        compute_row(row, int(threadIdx.x) % ROW_THREADS, true, out, EPILOGUE_ARGUMENTS p);
    }
#endif
}
