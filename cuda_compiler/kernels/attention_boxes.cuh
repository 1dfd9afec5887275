// Copies of pieces by the copy engine of compute capability 9.0, in boxes of 16 positions by 128 bytes.
struct alignas(64) TensorMap {
    unsigned char at[128];
};

__device__ __forceinline__ void make_barrier(uint barrier)
{
    asm volatile("mbarrier.init.shared.b64 [%0], 1;\n\tfence.mbarrier_init.release.cluster;" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void arrive_and_expect(uint barrier, int bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void copy_box(uint target, const TensorMap& map, uint barrier, int column, int row)
{
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
                 ::"r"(target), "l"(&map), "r"(barrier), "r"(column), "r"(row)
                 : "memory");
}

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

__device__ __forceinline__ void publish_to_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
