// Skeleton of a launch that several generated elementwise kernels share: each has a range of the threadgroups.
$declarations

kernel void shared(
$pointers    constant Params& p [[buffer($params)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]])
{
$calls
}
