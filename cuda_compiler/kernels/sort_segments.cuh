// SEGMENTS rows, or one segment of a row, brought into shared memory, of which the first RUN are found, in order. What
// is sorted are elements, or with FROM_RUNS the entries that launches ahead have kept.
#if FROM_RUNS
#define INPUT_PARAMETERS const Entry* runs,
#define INPUT_ARGUMENTS runs,
#else
#define INPUT_PARAMETERS SOURCE_PARAMETERS
#define INPUT_ARGUMENTS SOURCE_ARGUMENTS
#endif

static_assert(SEGMENT * SEGMENTS == THREADS * ITEMS, "threads have all entries");
__shared__ __align__(16) Entry entries[SEGMENT * SEGMENTS];

__device__ __forceinline__ void sort_segments(INPUT_PARAMETERS const Params& p)
{
    constexpr int LANES = SEGMENT > ITEMS ? SEGMENT / ITEMS : 1; // threads of a segment, which read side by side
    Entry own[ITEMS];
    #pragma unroll
    for (int item = 0; item < ITEMS; ++item) {
        int segment = int(threadIdx.x) / LANES * (LANES * ITEMS / SEGMENT) + item * LANES / SEGMENT;
        int row = int(blockIdx.x) * SEGMENTS + segment;
        int place = int(blockIdx.y) * SEGMENT + item * LANES % SEGMENT + int(threadIdx.x) % LANES;
        own[item] = last_entry();
        if (row < p.rows && place < p.length) {
#if FROM_RUNS
            own[item] = runs[(long long)row * p.length + place];
#else
            own[item] = entry_of(key_of(element(0, row / p.inner, row % p.inner, place, SOURCE_ARGUMENTS p)), place);
#endif
        }
    }
    sort_registers(own, entries);
    keep_first(entries, SEGMENT * SEGMENTS, SEGMENT, RUN);
}
