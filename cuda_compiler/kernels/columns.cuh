// Reduces along rows that lie side by side: a thread takes a pack of neighbouring rows and every SLICES-th of their
// columns. Grid: groups of LANES packs in x. Block: LANES for each slice.
extern "C" __global__ void __launch_bounds__(LANES * SLICES) columns(OUT_T* out, EPILOGUE_PARAMETERS const Params p)
{
    wait_for_previous_grid();
    int pack = int(blockIdx.x) * LANES + int(threadIdx.x) % LANES, slice = int(threadIdx.x) / LANES;
    compute_rows(pack < p.packs ? pack : 0, slice, pack < p.packs, out, EPILOGUE_ARGUMENTS p);
}
