// Copies of whole boxes of a tensor by the copy engine of compute capability 9.0, and the blocks of a cluster that share them.
// What the engine knows of a tensor, as the driver encodes it.
struct alignas(64) TensorMap {
    unsigned char at[128];
};

__device__ __forceinline__ void prefetch_map(const TensorMap& map)
{
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Arrives at a barrier whose phase then also waits for `bytes` of copies.
__device__ __forceinline__ void arrive_and_expect(uint barrier, int bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Starts copying a box of lines into shared memory: 64 elements of k, and as many lines as the map says. With SHARERS > 1
// every block of the cluster gets it at the same place, and its barrier there counts the bytes.
template <int SHARERS>
__device__ __forceinline__ void copy_lines(uint target, const TensorMap& map, uint barrier, int k, int line)
{
    if constexpr (SHARERS == 1) {
        asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
                     ::"r"(target), "l"(&map), "r"(barrier), "r"(k), "r"(line) : "memory");
    } else {
        asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
                     " [%0], [%1, {%3, %4}], [%2], %5;"
                     ::"r"(target), "l"(&map), "r"(barrier), "r"(k), "r"(line), "h"((unsigned short)((1 << SHARERS) - 1))
                     : "memory");
    }
}

// The same for lines in groups of 32 that the map brings into another order.
template <int SHARERS>
__device__ __forceinline__ void copy_groups(uint target, const TensorMap& map, uint barrier, int k, int group)
{
    if constexpr (SHARERS == 1) {
        asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
                     " [%0], [%1, {%3, %5, %5, %5, %4}], [%2];"
                     ::"r"(target), "l"(&map), "r"(barrier), "r"(k), "r"(group), "r"(0) : "memory");
    } else {
        asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
                     " [%0], [%1, {%3, %5, %5, %5, %4}], [%2], %6;"
                     ::"r"(target), "l"(&map), "r"(barrier), "r"(k), "r"(group), "r"(0),
                     "h"((unsigned short)((1 << SHARERS) - 1))
                     : "memory");
    }
}

// Makes barriers that were made visible to the copy engine and to the other blocks of the cluster.
__device__ __forceinline__ void publish_barriers()
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Passed when all threads of the cluster have arrived. What they wrote before can be read behind it only if they `publish`.
template <bool PUBLISH>
__device__ __forceinline__ void wait_for_cluster()
{
    if (PUBLISH) {
        asm volatile("barrier.cluster.arrive.release;\n\tbarrier.cluster.wait.acquire;" ::: "memory");
    } else {
        asm volatile("barrier.cluster.arrive.relaxed;\n\tbarrier.cluster.wait;" ::: "memory");
    }
}

// Reads shared memory of a block of the cluster, at an address of this block's own.
__device__ __forceinline__ float4 load_from_block(uint address, int block)
{
    float4 value;
    asm volatile("{.reg .b32 there;\n"
                 "mapa.shared::cluster.u32 there, %4, %5;\n"
                 "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [there];}"
                 : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
                 : "r"(address), "r"(block)
                 : "memory");
    return value;
}

// Arrives once for the warp at this barrier in every block of the cluster.
template <int SHARERS>
__device__ __forceinline__ void arrive_in_cluster(uint barrier)
{
    int lane = int(threadIdx.x % 32);
    if constexpr (SHARERS == 1) {
        if (lane == 0) {
            arrive(barrier);
        }
    } else if (lane < SHARERS) {
        asm volatile("{.reg .b32 there;\n"
                     "mapa.shared::cluster.u32 there, %0, %1;\n"
                     "mbarrier.arrive.shared::cluster.b64 _, [there];}" ::"r"(barrier), "r"(lane)
                     : "memory");
    }
}
