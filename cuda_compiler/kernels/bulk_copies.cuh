// Copies of whole boxes of a tensor by the copy engine of compute capability 9.0, and the shared memory of a cluster's blocks.
// What the engine knows of a tensor, as the driver encodes it.
struct alignas(64) TensorMap {
    unsigned char at[128];
};

__device__ __forceinline__ void prefetch_map(const TensorMap& map)
{
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Makes new barriers visible to the copy engine.
__device__ __forceinline__ void publish_barriers()
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Arrives at a barrier whose phase then also waits for `bytes` of copies.
__device__ __forceinline__ void arrive_and_expect(uint barrier, int bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Starts copying a box of lines into shared memory: 64 elements of k, and as many lines as the map says.
__device__ __forceinline__ void copy_lines(uint target, const TensorMap& map, uint barrier, int k, int line)
{
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
                 ::"r"(target), "l"(&map), "r"(barrier), "r"(k), "r"(line)
                 : "memory");
}

// The same for groups of 32 lines that the map brings into another order.
__device__ __forceinline__ void copy_groups(uint target, const TensorMap& map, uint barrier, int k, int group)
{
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%3, %5, %5, %5, %4}], [%2];" ::"r"(target), "l"(&map), "r"(barrier), "r"(k), "r"(group), "r"(0)
                 : "memory");
}

// Passed when all threads of the cluster have arrived; what they wrote before can be read behind it.
__device__ __forceinline__ void wait_for_cluster()
{
    asm volatile("barrier.cluster.arrive.release;\n\tbarrier.cluster.wait.acquire;" ::: "memory");
}

// The same where nothing is to be read.
__device__ __forceinline__ void leave_cluster()
{
    asm volatile("barrier.cluster.arrive.relaxed;\n\tbarrier.cluster.wait;" ::: "memory");
}

__device__ __forceinline__ void store_shared(uint address, const float (&value)[4])
{
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(value[0]), "f"(value[1]), "f"(value[2]),
                 "f"(value[3])
                 : "memory");
}

// Reads shared memory of a block of the cluster, at an address as this block would use it.
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
