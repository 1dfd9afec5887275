// Bitonic sorting of entries that a block of THREADS holds in registers, ITEMS neighbours in each thread: by a thread
// alone, then between the lanes of a warp, and what reaches further through shared memory. Sizes are powers of two.
constexpr int WARP_SPAN = 32 * ITEMS;

__device__ __forceinline__ void put_in_order(Entry& a, Entry& b)
{
#if PACKED
    Entry low = min(a, b);
    b = max(a, b);
    a = low;
#else
    bool swaps = is_before(b, a);
    Entry low = swaps ? b : a;
    b = swaps ? a : b;
    a = low;
#endif
}

// The entry of the lane whose number differs by these bits.
__device__ __forceinline__ Entry entry_across(Entry own, int bits)
{
#if WIDE
    return {__shfl_xor_sync(0xffffffffu, own.key, bits), __shfl_xor_sync(0xffffffffu, own.place, bits)};
#else
    return __shfl_xor_sync(0xffffffffu, own, bits);
#endif
}

// Which of two entries stays: the one ahead, or the other.
__device__ __forceinline__ Entry kept_of(Entry own, Entry other, bool ahead)
{
    return is_before(other, own) == ahead ? other : own;
}

// Sorts what a thread has, where it is bitonic: of every 2 * stride entries.
__device__ __forceinline__ void merge_own(Entry (&own)[ITEMS], int stride)
{
    #pragma unroll
    for (; stride > 0; stride /= 2) {
        #pragma unroll
        for (int low = 0; low < ITEMS; ++low) {
            if ((low & stride) == 0) {
                put_in_order(own[low], own[low + stride]);
            }
        }
    }
}

// The same of what 2 * distance lanes have together.
__device__ __forceinline__ void merge_lanes(Entry (&own)[ITEMS], int distance)
{
    #pragma unroll 1
    for (; distance > 0; distance /= 2) {
        bool ahead = (int(threadIdx.x) & distance) == 0;
        #pragma unroll
        for (int item = 0; item < ITEMS; ++item) {
            own[item] = kept_of(own[item], entry_across(own[item], distance), ahead);
        }
    }
    merge_own(own, ITEMS / 2);
}

__device__ __forceinline__ void keep_together(Pack<Entry, ITEMS>& shared, const Entry (&own)[ITEMS])
{
    #pragma unroll
    for (int item = 0; item < ITEMS; ++item) {
        shared[item] = own[item];
    }
}

// Sorts every RUN of the block's entries; they end up in shared memory, for which all threads have waited.
__device__ __forceinline__ void sort_registers(Entry (&own)[ITEMS], Entry* entries)
{
    #pragma unroll
    for (int size = 2; size <= ITEMS && size <= RUN; size *= 2) {
        #pragma unroll
        for (int low = 0; low < ITEMS; ++low) {
            int high = low ^ (size - 1);
            if (low < high) {
                put_in_order(own[low], own[high]);
            }
        }
        merge_own(own, size / 4);
    }
    #pragma unroll 1
    for (int lanes = 2; lanes <= 32 && lanes * ITEMS <= RUN; lanes *= 2) {
        bool ahead = (int(threadIdx.x) & lanes / 2) == 0;
        #pragma unroll
        for (int low = 0; low < (ITEMS + 1) / 2; ++low) {
            int high = ITEMS - 1 - low;
            Entry other = entry_across(own[high], lanes - 1), last = entry_across(own[low], lanes - 1);
            own[low] = kept_of(own[low], other, ahead);
            own[high] = kept_of(own[high], last, ahead);
        }
        merge_lanes(own, lanes / 4);
    }
    auto& shared = *reinterpret_cast<Pack<Entry, ITEMS>*>(entries + int(threadIdx.x) * ITEMS);
    #pragma unroll 1
    for (int size = 2 * WARP_SPAN; size <= RUN; size *= 2) {
        keep_together(shared, own);
        __syncthreads();
        #pragma unroll 1
        for (int stride = size / 2; stride >= WARP_SPAN; stride /= 2) {
            #pragma unroll
            for (int item = 0; item < ITEMS / 2; ++item) {
                int pair = int(threadIdx.x) + item * THREADS, low = pair * 2 - (pair & (stride - 1));
                put_in_order(entries, low, stride == size / 2 ? low ^ (size - 1) : low + stride);
            }
            __syncthreads();
        }
        #pragma unroll
        for (int item = 0; item < ITEMS; ++item) {
            own[item] = shared[item];
        }
        merge_lanes(own, 16);
    }
    keep_together(shared, own);
    __syncthreads();
}
