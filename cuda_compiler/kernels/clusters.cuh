// Clusters of blocks: how they wait for each other, and how one reads and writes another's shared memory.

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

// Says that this thread is here and waits for all others of the cluster; what they wrote before can be read behind it.
// Threads of a warp may come one by one.
__device__ __forceinline__ void synchronize_cluster()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release;\n\tbarrier.cluster.wait.acquire;" ::: "memory");
#endif
}
// The same where nothing is to be read.
__device__ __forceinline__ void leave_cluster()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.relaxed;\n\tbarrier.cluster.wait;" ::: "memory");
#endif
}

// Where `target` lies in the shared memory of another block of the cluster.
__device__ __forceinline__ uint address_in_cluster(const void* target, int rank)
{
    uint remote = shared_address(target);
#if __CUDA_ARCH__ >= 900
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(shared_address(target)), "r"(rank));
#endif
    return remote;
}
// Writes to such an address.
__device__ __forceinline__ void store_at(uint address, uint value)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
#endif
}

// Writes to where `target` lies in the shared memory of another block of the cluster.
__device__ __forceinline__ void store_in_cluster(const void* target, int rank, float value)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(address_in_cluster(target, rank)), "f"(value) : "memory");
#endif
}
__device__ __forceinline__ void store_in_cluster(const void* target, int rank, float4 value)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};"
                 ::"r"(address_in_cluster(target, rank)), "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w)
                 : "memory");
#endif
}

// The same in the background: a barrier of the other block, given by where this one has its own, counts the bytes when
// they are there. So nobody waits for what else this block writes, as `arrive_at_cluster` does.
__device__ __forceinline__ void send_to_cluster(const void* target, int rank, float2 value, const uint64* barrier)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];"
                 ::"r"(address_in_cluster(target, rank)), "f"(value.x), "f"(value.y),
                 "r"(address_in_cluster(barrier, rank))
                 : "memory");
#endif
}
__device__ __forceinline__ void send_to_cluster(const void* target, int rank, float4 value, const uint64* barrier)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];"
                 ::"r"(address_in_cluster(target, rank)), "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w),
                 "r"(address_in_cluster(barrier, rank))
                 : "memory");
#endif
}

// Where a place of this block lies in another block of the cluster, to be read.
__device__ __forceinline__ const float* place_in_cluster(const float* place, int rank)
{
    const float* found = place;
#if __CUDA_ARCH__ >= 900
    asm("mapa.u64 %0, %1, %2;" : "=l"(found) : "l"(place), "r"(rank));
#endif
    return found;
}

// Reads four numbers at a shared address, as this block would use it, from another block of the cluster.
__device__ __forceinline__ float4 load_from_cluster(uint address, int rank)
{
    float4 value = {};
#if __CUDA_ARCH__ >= 900
    asm volatile("{.reg .b32 there;\n"
                 "mapa.shared::cluster.u32 there, %4, %5;\n"
                 "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [there];}"
                 : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
                 : "r"(address), "r"(rank)
                 : "memory");
#endif
    return value;
}
