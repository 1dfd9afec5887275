// Sorts slabs of an index by the row that is named; of one row in the index's order. Finds where the rows of each block
// that will combine values begin in a slab: starts[row_blocks + 1, slabs]. What names no row lies behind all others.
// Grid: slabs in x.
constexpr int SLAB = THREADS * ITEMS;

extern "C" __global__ void __launch_bounds__(THREADS) scatter_sort(
    INDEX_PARAMETERS uint* sorted, int* starts, const Params p)
{
    __shared__ __align__(16) Entry entries[SLAB];
    wait_for_previous_grid();
    int first = int(blockIdx.x) * SLAB;
    Entry own[ITEMS];
    #pragma unroll
    for (int item = 0; item < ITEMS; ++item) {
        int at = item * THREADS + int(threadIdx.x);
        int row = first + at < p.count ? row_at(first + at, INDEX_ARGUMENTS p) : -1;
        own[item] = uint(row) < uint(p.rows) ? uint(row) * SLAB + at : ~0u;
    }
    sort_registers(own, entries);
    #pragma unroll
    for (int item = 0; item < ITEMS; ++item) {
        int at = item * THREADS + int(threadIdx.x);
        sorted[first + at] = entries[at];
    }
    for (int block = int(threadIdx.x); block <= p.row_blocks; block += THREADS) {
        Entry bound = uint(min(block * p.block_rows, p.rows)) * SLAB;
        int low = 0, high = SLAB;
        while (low < high) {
            int middle = (low + high) / 2;
            if (is_before(entries[middle], bound)) {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        starts[block * int(gridDim.x) + int(blockIdx.x)] = low;
    }
}
