// A thread computes one pack of neighbouring elements. Grid: packs in x. Block: 256.
extern "C" __global__ void __launch_bounds__(256) elementwise(OUT_T* out, EPILOGUE_PARAMETERS const Params p)
{
    wait_for_previous_grid();
    int index = int(blockIdx.x) * 256 + int(threadIdx.x);
    if (index < p.packs) {
        finish(index, out, EPILOGUE_ARGUMENTS p);
    }
}
