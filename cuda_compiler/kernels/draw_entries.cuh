// Tokens in the order of their logits, the highest first: the upper bits of an entry are the logit, inverted, the lower
// ones the token's number. NaN comes first.
typedef uint64 Entry;

__device__ __forceinline__ bool is_before(Entry a, Entry b) { return a < b; }

__device__ __forceinline__ Entry entry_of(float value, int token)
{
    uint bits = __float_as_uint(value + 0.0f);
    uint key = bits >> 31 != 0u ? bits : ~(bits | 0x80000000u);
    return (Entry(value != value ? 0u : key) << 32) | Entry(uint(token));
}

__device__ __forceinline__ float value_of(Entry entry)
{
    uint key = uint(entry >> 32);
    return __uint_as_float(key >> 31 != 0u ? key : ~key & 0x7fffffffu);
}
