// What is sorted: an entry for each element, its key ahead of its place in the row, so that no two are equal and all
// sorts are stable. NaN has the highest key, negative zero that of zero. DESCENDING turns keys around, not places.
// PACKED: elements of 16 bits, key_t, in rows of no more than 2^16.
#if WIDE
struct Entry {
    uint64 key;
    uint place;
};
__device__ __forceinline__ Entry entry_of(uint64 key, int place) { return {DESCENDING ? ~key : key, uint(place)}; }
__device__ __forceinline__ Entry last_entry() { return {~0ull, ~0u}; } // behind all others, in place of none
__device__ __forceinline__ int place_of(Entry entry) { return int(entry.place); }
__device__ __forceinline__ bool is_before(Entry a, Entry b)
{
    return a.key < b.key || (a.key == b.key && a.place < b.place);
}
__device__ __forceinline__ uint64 key_of(int64 element) { return uint64(element) ^ (1ull << 63); }
#elif PACKED
typedef uint Entry;
__device__ __forceinline__ Entry entry_of(uint key, int place) { return (DESCENDING ? ~key : key) << 16 | uint(place); }
__device__ __forceinline__ Entry last_entry() { return ~0u; } // behind all others, in place of none
__device__ __forceinline__ int place_of(Entry entry) { return int(entry & 0xffffu); }
__device__ __forceinline__ bool is_before(Entry a, Entry b) { return a < b; }
__device__ __forceinline__ uint key_of(float element)
{
    uint bits = element == 0.0f ? 0u : uint(key_t(element).bits);
    return element != element ? 0xffffu : bits >> 15 ? ~bits & 0xffffu : bits | 0x8000u;
}
#else
typedef uint64 Entry;
__device__ __forceinline__ Entry entry_of(uint key, int place)
{
    return uint64(DESCENDING ? ~key : key) << 32 | uint(place);
}
__device__ __forceinline__ Entry last_entry() { return ~0ull; } // behind all others, in place of none
__device__ __forceinline__ int place_of(Entry entry) { return int(uint(entry)); }
__device__ __forceinline__ bool is_before(Entry a, Entry b) { return a < b; }
__device__ __forceinline__ uint key_of(int element) { return uint(element) ^ 0x80000000u; }
__device__ __forceinline__ uint key_of(float element)
{
    uint bits = element == 0.0f ? 0u : __float_as_uint(element);
    return element != element ? ~0u : bits >> 31 ? ~bits : bits | 0x80000000u;
}
#endif
