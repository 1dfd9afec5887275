// Indices that might lie beyond their tensor are checked before memory is touched. The first fault since the host
// looked last is recorded, in memory of the host's: which check, which element of the index tensor, and its value.
struct Fault {
    int check, element;
    int64 value;
};
static_assert(sizeof(Fault) == 16, "layout of Fault");

// An index inside of a dimension of `extent`: itself, or `otherwise` where it is not one.
__device__ __forceinline__ int64 checked_index(
    int64 index, int64 extent, int64 otherwise, int element, int check, Fault* fault)
{
    if (uint64(index) < uint64(extent)) {
        return index;
    }
    if (atomicCAS(&fault->check, 0, -1) == 0) { // the host may look meanwhile: the number is written last
        volatile Fault* record = fault;
        record->element = element;
        record->value = index;
        __threadfence_system();
        record->check = check;
    }
    return otherwise;
}

// The same, but nothing is recorded: for an index that is needed early and is checked again later, where nothing waits
// for it.
__device__ __forceinline__ int64 quiet_index(int64 index, int64 extent, int64 otherwise, int, int, Fault*)
{
    return uint64(index) < uint64(extent) ? index : otherwise;
}
