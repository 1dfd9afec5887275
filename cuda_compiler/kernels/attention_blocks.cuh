// What attention kernels share: blocks of positions that a mask leaves open, heads that read the same keys, sums of
// rows.
constexpr float CLOSED = -1e30f; // below every score

// An exponent of e as one of two: weights are powers of two.
__device__ __forceinline__ constexpr float binary_exponent(float exponent) { return exponent * 1.44269504088896341f; }

// SINK_STEP: each head has a sink, a score that takes its share of the weights and brings no value.
#ifdef SINK_STEP
#define SINK_PARAMETER const sink_t* sinks,
#define SINK_ARGUMENT sinks,
#else
#define SINK_PARAMETER
#define SINK_ARGUMENT
#endif

// The sum of all weights of a row of a query head, relative to the largest score in powers of two, given that of its
// positions.
__device__ __forceinline__ float whole_sum(float sum, float top, int head, SINK_PARAMETER const Params& p)
{
#ifdef SINK_STEP
    return sum + exp2f(binary_exponent(float(sinks[head * SINK_STEP])) - top);
#else
    return sum;
#endif
}

// The element of the batch whose mask an element has: masks repeat after MASK_PERIOD elements, if that is given.
__device__ __forceinline__ int masked_as(int batch)
{
#ifdef MASK_PERIOD
    return batch % MASK_PERIOD;
#else
    return batch;
#endif
}

// Moves the pointer to the mask to that of one head of keys' query heads.
__device__ __forceinline__ void enter_mask(const mask_t*& mask, int batch, int group, const Params& p)
{
    mask += (long long)masked_as(batch) * p.mask_batch + (long long)group * SHARED * p.mask_head;
}

// Moves the pointers to keys, values and mask to one head of keys and its query heads. With COUNT, each head of keys
// has so many groups of query heads.
template <int COUNT = 1, typename K, typename V>
__device__ __forceinline__ void enter_group(K*& k, V*& v, const mask_t*& mask, int batch, int group, const Params& p)
{
    k += (long long)batch * p.k_batch + (long long)(group / COUNT) * p.k_head;
    v += (long long)batch * p.v_batch + (long long)(group / COUNT) * p.v_head;
    enter_mask(mask, batch, group, p);
}

// Lists the open ones of COUNT blocks of positions and returns how many there are. An entry is twice the block's
// number, plus one where the mask changes nothing. `known` has 0 for a block that is closed, 2 for one in which the
// mask changes nothing, and 1 for others; `known` and `total` are in shared memory.
template <int COUNT, typename T>
__device__ __forceinline__ int list_open_blocks(unsigned short* list, const T* known, int* total)
{
    __syncthreads();
    if (threadIdx.x < 32) {
        int lane = int(threadIdx.x), found = 0;
        for (int base = 0; base < COUNT; base += 32) {
            int block = base + lane, state = block < COUNT ? known[block] : 0;
            uint open = __ballot_sync(0xffffffffu, state != 0);
            if (state) {
                list[found + __popc(open & ((1u << lane) - 1))] = (unsigned short)(block * 2 + (state == 2));
            }
            found += __popc(open);
        }
        if (lane == 0) {
            *total = found;
        }
    }
    __syncthreads();
    return *total;
}

// Two neighbours as numbers of 16 bits in a word.
__device__ __forceinline__ uint pack_pair(float low, float high)
{
    return as_pair(tile_t(low), tile_t(high));
}

// The largest value of the four threads that share a row.
__device__ __forceinline__ float quad_max(float value)
{
    value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 1));
    return fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 2));
}

// Adds up the sums of the four threads that share a row, for two rows.
__device__ __forceinline__ void add_up_rows(float (&sum)[2])
{
    #pragma unroll
    for (int half_row = 0; half_row < 2; ++half_row) {
        sum[half_row] += __shfl_xor_sync(0xffffffffu, sum[half_row], 1);
        sum[half_row] += __shfl_xor_sync(0xffffffffu, sum[half_row], 2);
    }
}
