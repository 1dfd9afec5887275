// What warpgroups of compute capability 9.0 work with: products straight from shared memory (`wgmma`), barriers that
// count arrivals of copies and of warps, and registers that one role leaves to another.
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Returns when all but the latest PENDING groups of this warpgroup's products are done.
template <int PENDING>
__device__ __forceinline__ void wait_for_products()
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// What the tensor cores need to know of lines of 128 bytes at a shared address, chunks of 16 bytes permuted by
// exclusive or: groups of eight lines follow each other after 1024 bytes. `panel` is the distance in bytes of the next
// 128 bytes of the same lines, where they run along the rows or columns of the result.
__device__ __forceinline__ uint64 matrix_descriptor(uint address, uint panel = 16)
{
    return uint64(address >> 4 & 0x3fff) | uint64(panel >> 4) << 16 | uint64(1024 >> 4) << 32 | uint64(1) << 62;
}

// Where a chunk of 16 bytes lies in a panel of such lines, in bytes.
__device__ __forceinline__ uint place_in_panel(uint line, uint chunk) { return line * 128 + (chunk ^ (line & 7)) * 16; }

// Makes what was written before visible to the tensor cores, once it is visible to this thread.
__device__ __forceinline__ void publish_to_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

template <int COUNT>
__device__ __forceinline__ void allow_registers()
{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

template <int COUNT>
__device__ __forceinline__ void leave_registers()
{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// A barrier in shared memory, by its address: it has one phase after another, each over when `count` arrivals were
// seen.
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

// Counts as having come to such a barrier as below, without waiting there.
__device__ __forceinline__ void arrive_at(int number, int threads)
{
    asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// Waits until `threads` threads have come to the barrier of this number, other than that of the whole block (0).
__device__ __forceinline__ void synchronize(int number, int threads)
{
    asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}
