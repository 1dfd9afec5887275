// Skeleton of a generated row kernel: a threadgroup computes one row, its threads stride over the columns.
// Each reduction goes through registers, then simdgroups, then threadgroup memory.
constant constexpr int ROW_THREADS = $threads;
constant constexpr int ROW_SIMDGROUPS = ROW_THREADS / 32;

kernel void rows(
    device $storage* out [[buffer(0)]],
$pointers    constant Params& p [[buffer($params)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]])
{
    int lane = int(thread_index);
    int row = int(group.y * 65535 + group.x);
    if (row >= p.rows) {
        return;
    }
$positions
$phases
    for (int c = lane; c < p.width; c += ROW_THREADS) {
$body
    }
}
