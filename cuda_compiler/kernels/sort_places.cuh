// Places of the first entries of sorted rows [rows, length]. Grid: places in x.
extern "C" __global__ void __launch_bounds__(THREADS) sort_places(
    const Entry* runs, OUT_T* out, EPILOGUE_PARAMETERS const Params p)
{
    wait_for_previous_grid();
    long long at = (long long)blockIdx.x * THREADS + threadIdx.x;
    int row = int(at / p.count), rank = int(at % p.count);
    if (row < p.rows) {
        int value[1] = {place_of(runs[(long long)row * p.length + rank])};
        finish(value, row / p.inner, row % p.inner, rank, out, EPILOGUE_ARGUMENTS p);
    }
}
