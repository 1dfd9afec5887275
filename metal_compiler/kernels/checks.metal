// Indices that might lie beyond their tensor are checked before memory is touched. The first fault of a run is
// recorded: which check, which element of the index tensor, and its value.
struct Fault {
    atomic_int check;
    int element;
    long value;
};
static_assert(sizeof(Fault) == 16, "layout of Fault");

// An index inside of a dimension of `extent`: itself, or `otherwise` where it is not one.
METAL_FUNC long checked_index(long index, long extent, long otherwise, int element, int check, device Fault* fault)
{
    if (index >= 0 && index < extent) {
        return index;
    }
    int found = 0;
    while (!atomic_compare_exchange_weak_explicit(
        &fault->check, &found, check, memory_order_relaxed, memory_order_relaxed)) {
        if (found != 0) {
            return otherwise;
        }
    }
    fault->element = element;
    fault->value = index;
    return otherwise;
}
