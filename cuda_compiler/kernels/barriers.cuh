// Barriers at which only some threads of a block wait. Those in shared memory (compute capability 9.0) count arrivals
// of threads and of copies; the numbered ones of the hardware count threads.

// Makes a barrier at a shared address. It has one phase after another, each of which ends with its `count`-th arrival.
__device__ __forceinline__ void make_barrier(uint barrier, int count)
{
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

__device__ __forceinline__ void arrive(uint barrier)
{
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives once for the warp.
__device__ __forceinline__ void arrive_by_warp(uint barrier)
{
    if (threadIdx.x % 32 == 0) {
        arrive(barrier);
    }
}

// Arrives when all copies that this thread has started are there.
__device__ __forceinline__ void arrive_with_copies(uint barrier)
{
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}

// Makes new barriers visible to the copy engine, and to other blocks of the cluster.
__device__ __forceinline__ void publish_barriers()
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Arrives at a barrier whose phase then also waits for `bytes` of copies.
__device__ __forceinline__ void arrive_and_expect(uint barrier, int bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Waits for the end of the barrier's phase of this parity.
__device__ __forceinline__ void wait_for_phase(uint barrier, int parity)
{
    uint done = 0;
    while (!done) {
        asm volatile("{\n"
                     ".reg .pred done;\n"
                     "mbarrier.try_wait.parity.shared.b64 done, [%1], %2;\n"
                     "selp.u32 %0, 1, 0, done;\n"
                     "}"
                     : "=r"(done)
                     : "r"(barrier), "r"(parity)
                     : "memory");
    }
}

// Waits until so many threads have come to the barrier of this number; 0 is that of `__syncthreads`.
__device__ __forceinline__ void synchronize(int number, int threads)
{
    asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// Counts as having come to such a barrier, and does not wait there.
__device__ __forceinline__ void arrive_at(int number, int threads)
{
    asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}
