// What threads of a block, and blocks of a row, tell each other (see `draw`).

// Adds what the lanes before this one have.
__device__ __forceinline__ void add_lanes_before(uint64& mass, uint& number)
{
    int lane = int(threadIdx.x) % 32;
    #pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        uint64 mass_before = __shfl_up_sync(ALL_LANES, mass, distance);
        uint number_before = __shfl_up_sync(ALL_LANES, number, distance);
        mass += lane >= distance ? mass_before : 0ull;
        number += lane >= distance ? number_before : 0u;
    }
}

// Replaces a thread's weight and number by the sums of the threads before it; returns those of all. It synchronizes the
// block, before and after.
__device__ Pair sum_before(uint64& mass, uint& number, Memory& memory)
{
    int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
    uint64 own_mass = mass;
    uint own_number = number;
    add_lanes_before(mass, number);
    __syncthreads();
    if (lane == 31) {
        memory.masses[warp] = mass;
        memory.numbers[warp] = number;
    }
    __syncthreads();
    uint64 warp_mass = lane < WARPS ? memory.masses[lane] : 0ull;
    uint warp_number = lane < WARPS ? memory.numbers[lane] : 0u;
    add_lanes_before(warp_mass, warp_number);
    uint64 before = __shfl_sync(ALL_LANES, warp_mass, warp > 0 ? warp - 1 : 0);
    uint count_before = __shfl_sync(ALL_LANES, warp_number, warp > 0 ? warp - 1 : 0);
    mass += (warp > 0 ? before : 0ull) - own_mass;
    number += (warp > 0 ? count_before : 0u) - own_number;
    return {__shfl_sync(ALL_LANES, warp_mass, 31), __shfl_sync(ALL_LANES, warp_number, 31)};
}

// Waits for all threads of the row: what they wrote in shared memory can be read behind it.
__device__ __forceinline__ void synchronize_row()
{
#if PARTS > 1
    synchronize_cluster();
#else
    __syncthreads();
#endif
}

// Sixteen bytes of shared memory, of a block of the row.
template <typename T>
__device__ __forceinline__ void load_of_block(const void* place, int rank, T& value)
{
    static_assert(sizeof(T) == 16, "what is read at a time");
#if PARTS > 1
    float4 found = load_from_cluster(shared_address(place), rank);
    memcpy(&value, &found, 16);
#else
    memcpy(&value, place, 16);
#endif
}

// Writes sixteen bytes to where another block of the row has them.
template <typename T>
__device__ __forceinline__ void store_of_block(T& place, int rank, const T& value)
{
    static_assert(sizeof(T) == 16, "what is written at a time");
#if PARTS > 1
    float4 words;
    memcpy(&words, &value, 16);
    store_in_cluster(&place, rank, words);
#else
    place = value;
#endif
}

// Tells all blocks of the row something, and waits for all threads. Behind another wait a place is free again.
__device__ __forceinline__ void tell(int place, const Pair& words, Memory& memory)
{
    if (threadIdx.x < PARTS) {
        store_of_block(memory.told[place][int(blockIdx.x) % PARTS], int(threadIdx.x), words);
    }
    synchronize_row();
}

// Tells all blocks of the row a number, waits for all threads, and combines what they tell.
template <typename Combine>
__device__ __forceinline__ void exchange(int place, uint64 number, Memory& memory, Combine combine)
{
    tell(place, {number, 0ull}, memory);
    #pragma unroll
    for (int rank = 0; rank < PARTS; ++rank) {
        combine(rank, memory.told[place][rank].first);
    }
}

// Of the row.
__device__ Entry least_of(Entry entry, Memory& memory)
{
    int lane = int(threadIdx.x) % 32;
    #pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        entry = min(entry, Entry(__shfl_xor_sync(ALL_LANES, entry, distance)));
    }
    __syncthreads();
    if (lane == 0) {
        memory.masses[threadIdx.x / 32] = entry;
    }
    __syncthreads();
    entry = lane < WARPS ? memory.masses[lane] : ~0ull;
    #pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        entry = min(entry, Entry(__shfl_xor_sync(ALL_LANES, entry, distance)));
    }
    exchange(OF_BINS, entry, memory, [&](int, uint64 of_block) { entry = min(entry, Entry(of_block)); });
    synchronize_row();
    return entry;
}
