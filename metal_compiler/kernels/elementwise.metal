// Skeleton of a generated elementwise kernel: a thread computes one element.
kernel void elementwise(
    device $storage* out [[buffer(0)]],
$pointers    constant Params& p [[buffer($params)]],
    uint3 position [[thread_position_in_grid]])
{
    if (position.x >= uint(p.size_x) || position.y >= uint(p.size_y) || position.z >= uint(p.size_z)) {
        return;
    }
$positions
$body
}
