// What warpgroups of compute capability 9.0 work with: products straight from shared memory (`wgmma`), and registers
// that one role leaves to another.
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Returns when all but the latest PENDING groups of this warpgroup's products are done.
template <int PENDING>
__device__ __forceinline__ void wait_for_products()
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// How `wgmma` finds a matrix in shared memory: lines of 128 bytes, whose chunks of 16 bytes are permuted by exclusive
// or, groups of eight lines 1024 bytes apart. `panel` is the distance in bytes of the next 128 bytes of the same lines,
// where they run along the rows or columns of the result.
__device__ __forceinline__ uint64 matrix_descriptor(uint address, uint panel = 16)
{
    return uint64(address >> 4 & 0x3fff) | uint64(panel >> 4) << 16 | uint64(1024 >> 4) << 32 | uint64(1) << 62;
}

// Where a chunk of 16 bytes lies in a panel of such lines, in bytes.
__device__ __forceinline__ uint place_in_panel(uint line, uint chunk) { return line * 128 + (chunk ^ (line & 7)) * 16; }

// Makes what this thread sees in shared memory visible to `wgmma` as well.
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
