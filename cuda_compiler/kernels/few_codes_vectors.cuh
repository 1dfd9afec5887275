// Vectors of a product of several rows in shared memory, in the order in which codes become numbers; and how these
// are made.
constexpr int GROUPS_OF_COLUMNS = (VECTORS + 7) / 8, COLUMNS = 8 * GROUPS_OF_COLUMNS;
constexpr int OCTETS = UNIT / 32, BUNDLE_CODES = 4 * UNIT; // an octet of codes for each of four lanes
constexpr int STAGED_BUNDLES = (BUNDLES + CLUSTER - 1) / CLUSTER, STAGED_UNITS = 4 * STAGED_BUNDLES;
constexpr int VECTOR_ROW = STAGED_UNITS * UNIT + (BITS == 4 ? 32 : 16); // neighbours begin in other banks
constexpr int VECTORS_AT = BLOCK_WARPS * STAGES * STAGE_BYTES;
constexpr int SPLIT = BLOCK_WARPS < VECTORS ? 1 : BLOCK_WARPS / VECTORS; // warps that make a vector ready
static_assert(!PROLOGUE || CLUSTER == 1, "blocks compute whole vectors");

typedef float Sums[GROUPS_OF_COLUMNS][4]; // in the register layout of mma.m16n8k16

// The products of eight numbers by others, two at a time: rounded once, as by way of floats.
__device__ __forceinline__ void multiply_octets(
    Pack<bfloat, 8>& made, const Pack<bfloat, 8>& left, const Pack<bfloat, 8>& right)
{
    #pragma unroll
    for (int u = 0; u < 8; u += 2) {
        uint product = Pairs<bfloat>::mul(as_pair(left[u], left[u + 1]), as_pair(right[u], right[u + 1]));
        made[u].bits = (unsigned short)product;
        made[u + 1].bits = (unsigned short)(product >> 16);
    }
}

// Vectors in shared memory, each octet in the order in which codes become numbers.
struct Vectors {
    vector_t* staged;
    int first; // of the elements that the block has

    // Copies `count` elements of each vector from rows in memory, by all threads; a barrier is to follow. Each calls
    // `meanwhile` once, while it waits for the first of its loads.
    template <typename Meanwhile>
    __device__ __forceinline__ void copy(const vector_t* rows, int row_length, int count, Meanwhile meanwhile) const
    {
        constexpr int ALL = VECTORS * ROW_OCTETS, EACH = (ALL + THREADS - 1) / THREADS, TOGETHER = EACH <= 6 ? EACH : 4;
        constexpr bool WHOLE = ALL % (TOGETHER * THREADS) == 0;
        #pragma unroll 1
        for (int base = int(threadIdx.x); base < THREADS || base < ALL; base += TOGETHER * THREADS) {
            Pack<vector_t, 8> given[TOGETHER];
            #pragma unroll
            for (int each = 0; each < TOGETHER; ++each) {
                int index = base + each * THREADS, v = index / ROW_OCTETS, place = index % ROW_OCTETS * 8;
                bool inside = (WHOLE || index < ALL) && place < count;
                given[each] = load_pack<8>(rows + (inside ? (long long)v * row_length + place : 0));
            }
            if (base < THREADS) {
                meanwhile();
            }
            #pragma unroll
            for (int each = 0; each < TOGETHER; ++each) {
                int index = base + each * THREADS;
                if (WHOLE || index < ALL) {
                    store_octet(given[each], index / ROW_OCTETS, index % ROW_OCTETS);
                }
            }
        }
    }

    // Computes the vectors, whole rows, by all threads; a barrier is to follow. `load` loads what eight elements of one
    // are made of, of which `compute` makes them, and gives what they add to a sum of the row. Each warp leaves what its
    // own add. Each calls `meanwhile` once, while it waits for the first of its loads, if any.
    template <typename Load, typename Compute, typename Meanwhile>
    __device__ __forceinline__ void compute(
        float (&row_parts)[VECTORS][SPLIT], Load load, Compute compute, Meanwhile meanwhile) const
    {
        bool waits = true;
        int warp = int(threadIdx.x) / 32, own = warp % SPLIT * 32 + int(threadIdx.x) % 32;
        #pragma unroll 1
        for (int v = warp / SPLIT; v < VECTORS; v += BLOCK_WARPS / SPLIT) {
            float part = 0.0f;
            #pragma unroll 1
            for (int base = own; base / 32 * 32 < ROW_OCTETS; base += AT_ONCE * STEP_OCTETS) {
                decltype(load(0, 0)) loaded[AT_ONCE];
                #pragma unroll
                for (int each = 0; each < AT_ONCE; ++each) {
                    int octet = base + each * STEP_OCTETS;
                    loaded[each] = load(v, ARE_WHOLE || octet < ROW_OCTETS ? octet * 8 : 0);
                }
                if (waits) {
                    meanwhile();
                    waits = false;
                }
                #pragma unroll
                for (int each = 0; each < AT_ONCE; ++each) {
                    int octet = base + each * STEP_OCTETS;
                    if (ARE_WHOLE || octet < ROW_OCTETS) {
                        Pack<vector_t, 8> made;
                        part += compute(loaded[each], v, octet * 8, made);
                        store_octet(made, v, octet);
                    }
                }
            }
            if (FACTOR) {
                part = warp_sum<32>(part);
                row_parts[v][warp % SPLIT] = part; // the same by all lanes
            }
        }
        if (waits) {
            meanwhile();
        }
    }

    // The four pairs of a lane's octet in its column of a group of columns, at a place in the staged vectors.
    __device__ __forceinline__ void load(uint (&pairs)[4], int group, int place) const
    {
        int lane = int(threadIdx.x) % 32, quad = lane % 4, column = group * 8 + lane / 4;
        const vector_t* row = staged + (column < VECTORS ? column : 0) * VECTOR_ROW + place; // unread beyond
        constexpr int EACH = BITS == 4 ? 4 : 2;
        #pragma unroll
        for (int part = 0; part < 4; part += EACH) {
            Pack<uint, EACH> found = load_pack<EACH>(reinterpret_cast<const uint*>(row + part * 8 + quad * EACH * 2));
            #pragma unroll
            for (int index = 0; index < EACH; ++index) {
                pairs[part + index] = found[index];
            }
        }
    }

private:
    static constexpr int ROW_OCTETS = STAGED_UNITS * UNIT / 8, STEP_OCTETS = 32 * SPLIT;
    static constexpr int ROUNDS = (ROW_OCTETS + STEP_OCTETS - 1) / STEP_OCTETS;
    static constexpr int AT_ONCE = ROUNDS <= 6 ? ROUNDS : 4; // loads that wait for memory together
    static constexpr bool ARE_WHOLE = ROW_OCTETS % (AT_ONCE * STEP_OCTETS) == 0;

    __device__ __forceinline__ void store_octet(const Pack<vector_t, 8>& given, int v, int octet) const
    {
        Pack<uint, 4> ordered;
        #pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
            ordered[pair] = as_pair(given[place_in_octet(pair * 2)], given[place_in_octet(pair * 2 + 1)]);
        }
        store_pack(reinterpret_cast<uint*>(staged + v * VECTOR_ROW + octet * 8), ordered);
    }
};
