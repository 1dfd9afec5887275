// Copies from global to shared memory in the background, and products of 16 x 16 by 16 x 8 matrices on tensor cores:
// float16 from compute capability 7.5 on, bfloat16 from 8.0 on.
__device__ __forceinline__ uint shared_address(const void* pointer)
{
    return uint(__cvta_generic_to_shared(pointer));
}

// Copies 16 bytes past the level-1 cache to a shared address, or writes zeros and reads nothing where `valid` is false.
// This and `copy_part` are for compute capability 8.0 on.
__device__ __forceinline__ void copy_chunk_to(uint target, const void* source, bool valid)
{
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(valid ? 16 : 0)
                 : "memory");
#endif
}

// Copies BYTES, 4, 8 or 16, through the level-1 cache, or only the first `bytes` of them and zeros behind these.
template <int BYTES>
__device__ __forceinline__ void copy_part(void* target, const void* source, int bytes)
{
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(target)), "l"(source), "n"(BYTES),
                 "r"(bytes)
                 : "memory");
#endif
}

// Copies 16 bytes, or zeros, on any device: past the level-1 cache, or through it for what neighbouring tiles soon read
// again.
__device__ __forceinline__ void copy_chunk(void* target, const void* source, bool valid)
{
#if __CUDA_ARCH__ >= 800
    copy_chunk_to(shared_address(target), source, valid);
#else
    *reinterpret_cast<uint4*>(target) = valid ? *reinterpret_cast<const uint4*>(source) : make_uint4(0, 0, 0, 0);
#endif
}
__device__ __forceinline__ void copy_chunk_cached(void* target, const void* source, bool valid)
{
#if __CUDA_ARCH__ >= 800
    copy_part<16>(target, source, valid ? 16 : 0);
#else
    copy_chunk(target, source, valid);
#endif
}

__device__ __forceinline__ void commit_copies()
{
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Returns when all but the latest PENDING groups of this thread's copies have arrived.
template <int PENDING>
__device__ __forceinline__ void wait_for_copies()
{
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
#endif
}

// Four 8 x 8 matrices of 16-bit elements, each from eight rows of 16 bytes at the shared addresses that eight lanes
// give.
__device__ __forceinline__ void load_matrices(uint (&matrix)[4], uint row)
{
#if __CUDA_ARCH__ >= 750
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(matrix[0]), "=r"(matrix[1]), "=r"(matrix[2]), "=r"(matrix[3])
                 : "r"(row)
                 : "memory");
#endif
}

__device__ __forceinline__ void load_matrices_transposed(uint (&matrix)[4], uint row)
{
#if __CUDA_ARCH__ >= 750
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(matrix[0]), "=r"(matrix[1]), "=r"(matrix[2]), "=r"(matrix[3])
                 : "r"(row)
                 : "memory");
#endif
}

// Products of operands of a type: whether tensor cores are `available` for it, and whether sums are counts, that is
// integers, whose bits the floats hold.
template <typename T>
struct TensorCores;

template <>
struct TensorCores<half> {
    static constexpr bool available = __CUDA_ARCH__ >= 750, counts = false;

    // sum[16 x 8] += a[16 x 16] * b[16 x 8], in the register layout of mma.m16n8k16.
    __device__ static void multiply(float (&sum)[4], const uint (&a)[4], const uint b0, const uint b1)
    {
#if __CUDA_ARCH__ >= 800
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
                     : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#elif __CUDA_ARCH__ >= 750
        multiply_half(sum, a[0], a[1], b0);
        multiply_half(sum, a[2], a[3], b1);
#endif
    }

private:
    __device__ static void multiply_half(float (&sum)[4], uint a0, uint a1, uint b)
    {
#if __CUDA_ARCH__ >= 750
        asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
            "{%0, %1, %2, %3};"
                     : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                     : "r"(a0), "r"(a1), "r"(b));
#endif
    }
};

template <>
struct TensorCores<bfloat> {
    static constexpr bool available = __CUDA_ARCH__ >= 800, counts = false;

    __device__ static void multiply(float (&sum)[4], const uint (&a)[4], const uint b0, const uint b1)
    {
#if __CUDA_ARCH__ >= 800
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
                     "{%8, %9}, {%0, %1, %2, %3};"
                     : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
    }
};

// A product without tensor cores.
template <typename T>
__device__ __forceinline__ void add_product(float& sum, T left, T right)
{
    sum += float(left) * float(right);
}
