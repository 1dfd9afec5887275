// Several elementwise kernels in one launch: each has a range of the blocks, and a thread computes one pack of
// neighbouring elements. Grid: blocks in x. Block: 256.
extern "C" __global__ void __launch_bounds__(256) shared(SHARED_PARAMETERS const Params p)
{
    wait_for_previous_grid();
    compute(SHARED_ARGUMENTS p);
}
