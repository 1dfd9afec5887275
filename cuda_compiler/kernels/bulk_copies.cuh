// Copies of groups of lines by the copy engine of compute capability 9.0, and the shared memory of a cluster's blocks.
// Starts copying groups of 32 lines that the map brings into another order.
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
