// Clusters of blocks: when all are there, and how one writes into another's shared memory.

// Says that this block has begun, and so that its shared memory may be written; `wait_for_cluster` returns when all
// have.
__device__ __forceinline__ void announce_to_cluster()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.relaxed.aligned;");
#endif
}
// Says that all that this block writes in the cluster is written; `wait_for_cluster` returns when all have said so.
__device__ __forceinline__ void arrive_at_cluster()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_for_cluster()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// Writes to where `target` lies in the shared memory of another block of the cluster.
__device__ __forceinline__ uint address_in_cluster(const void* target, int rank)
{
    uint remote = 0;
#if __CUDA_ARCH__ >= 900
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(shared_address(target)), "r"(rank));
#endif
    return remote;
}
__device__ __forceinline__ void store_in_cluster(const void* target, int rank, float value)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(address_in_cluster(target, rank)), "f"(value) : "memory");
#endif
}
__device__ __forceinline__ void store_in_cluster(const void* target, int rank, float2 value)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(address_in_cluster(target, rank)), "f"(value.x),
                 "f"(value.y)
                 : "memory");
#endif
}
__device__ __forceinline__ void store_in_cluster(const void* target, int rank, float4 value)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address_in_cluster(target, rank)), "f"(value.x),
                 "f"(value.y), "f"(value.z), "f"(value.w)
                 : "memory");
#endif
}
