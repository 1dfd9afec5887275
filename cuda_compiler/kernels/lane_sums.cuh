// The sum of what four neighbouring lanes have, in each of them; those of other fours need not be here.
__device__ __forceinline__ float sum_of_lanes(float part)
{
    uint lanes = 0xfu << (threadIdx.x & 28u);
    part += __shfl_xor_sync(lanes, part, 1);
    return part + __shfl_xor_sync(lanes, part, 2);
}
