// Copies of whole boxes of a tensor by the copy engine of compute capability 9.0.

// A tensor as the driver describes it to the engine.
struct alignas(64) TensorMap {
    unsigned char at[128];
};

__device__ __forceinline__ void prefetch_map(const TensorMap& map)
{
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Starts copying a box of lines into shared memory: 64 elements of k, and as many lines as the map says.
__device__ __forceinline__ void copy_lines(uint target, const TensorMap& map, uint barrier, int k, int line)
{
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%3, %4}], [%2];"
                 ::"r"(target), "l"(&map), "r"(barrier), "r"(k), "r"(line)
                 : "memory");
}

// Starts copying a box of a tensor of four dimensions: 64 elements of the first, and as many lines of the second as the
// map says.
__device__ __forceinline__ void copy_panel(
    uint target, const TensorMap& map, uint barrier, int element, int line, int layer, int outer)
{
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%3, %4, %5, %6}], [%2];"
                 ::"r"(target), "l"(&map), "r"(barrier), "r"(element), "r"(line), "r"(layer), "r"(outer)
                 : "memory");
}

// Starts copying groups of 32 lines, which the map brings into another order.
__device__ __forceinline__ void copy_groups(uint target, const TensorMap& map, uint barrier, int k, int group)
{
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%3, %5, %5, %5, %4}], [%2];"
                 ::"r"(target), "l"(&map), "r"(barrier), "r"(k), "r"(group), "r"(0)
                 : "memory");
}

// Starts storing a box of lines from shared memory, 64 elements of each.
__device__ __forceinline__ void store_lines(const TensorMap& map, uint source, int k, int line)
{
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];\n"
                 "cp.async.bulk.commit_group;"
                 ::"l"(&map), "r"(source), "r"(k), "r"(line)
                 : "memory");
}

// Waits until the engine has read all but the latest PENDING of the boxes that this thread stores.
template <int PENDING>
__device__ __forceinline__ void wait_for_reading()
{
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

// Waits until all boxes that this thread stores are in memory.
__device__ __forceinline__ void wait_for_storing() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
