// What is sorted of an index: the row that is named, ahead of the place in the slab.
typedef uint Entry;
__device__ __forceinline__ bool is_before(Entry a, Entry b) { return a < b; }
