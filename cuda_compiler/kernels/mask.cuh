// What a mask adds to a score; MASK_CLOSED or less closes a position. MASK is 1 for booleans, 2 for numbers, 0 for
// none.
__device__ __forceinline__ float mask_value(bool open) { return open ? 0.0f : -__int_as_float(0x7f800000); }
__device__ __forceinline__ float mask_value(float added) { return added; }
__device__ __forceinline__ float mask_value(half added) { return float(added); }
__device__ __forceinline__ float mask_value(bfloat added) { return float(added); }
