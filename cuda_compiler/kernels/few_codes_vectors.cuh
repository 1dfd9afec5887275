// Vectors of a product of several rows in shared memory, in the order in which codes become numbers; and how these
// are made.
constexpr int GROUPS_OF_COLUMNS = (VECTORS + 7) / 8, COLUMNS = 8 * GROUPS_OF_COLUMNS;
constexpr int OCTETS = UNIT / 32, BUNDLE_CODES = 4 * UNIT; // an octet of codes for each of four lanes
constexpr int STAGED_BUNDLES = (BUNDLES + CLUSTER - 1) / CLUSTER, STAGED_UNITS = 4 * STAGED_BUNDLES;
constexpr int VECTOR_ROW = STAGED_UNITS * UNIT + (BITS == 4 ? 32 : 16); // neighbours begin in other banks

// Codes of four bits are multiplied as they are, or stay added to 16 as they become numbers: that, and the zero point,
// leave with the sum of a unit's numbers of the vector, which a product by ones gives; AHEAD of all others where several
// teams need it.
constexpr bool LATE_ZERO = BITS == 4 && !CODEBOOK, BY_UNIT = !ONE_GROUP || LATE_ZERO, AHEAD = LATE_ZERO && TEAMS > 1;
constexpr bool ARE_RAISED = BITS == 4 && AS_THEY_ARE;
constexpr int SUMS = AHEAD ? STAGED_UNITS * COLUMNS : 0; // of units
constexpr int VECTORS_AT = BLOCK_WARPS * STAGES * STAGE_BYTES, SUMS_AT = VECTORS_AT + VECTORS * VECTOR_ROW * 2;
constexpr int SPLIT = BLOCK_WARPS < VECTORS ? 1 : BLOCK_WARPS / VECTORS; // warps that make a vector ready
static_assert(!PROLOGUE || CLUSTER == 1, "blocks compute whole vectors");

typedef float Sums[GROUPS_OF_COLUMNS][4]; // in the register layout of mma.m16n8k16

// The numbers of an octet of codes, in two words where they are bytes.
__device__ __forceinline__ void make_numbers(
    uint (&pairs)[4], const uint (&word)[2], uint offset, const Codebook& codebook)
{
    if (ARE_RAISED) {
        octet_as_operand(pairs, word[0]);
    } else if (LATE_ZERO) {
        #pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
            pairs[pair] = sixteen_and_codes(word[0], pair);
        }
    } else if (SUBNORMAL) {
        bytes_in_units(pairs, word[0], word[1], offset);
    } else {
        octet_as_numbers(pairs, word, 0, offset, codebook);
    }
}

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

constexpr float PRODUCT_UNIT = ARE_RAISED ? CODE_UNIT : NUMBER_UNIT;

// A pair of ones, as such codes are multiplied.
__device__ __forceinline__ constexpr uint ones(int pair) { return ARE_RAISED ? equal_codes(1, pair) : Numbers::ONE; }

// Vectors in shared memory, each octet in the order in which codes become numbers.
struct Vectors {
    vector_t* staged;
    float* sums;
    int first; // of the elements that the block has

    // Copies `count` elements of each vector from rows in memory, by all threads; a barrier is to follow.
    __device__ __forceinline__ void copy(const vector_t* rows, int row_length, int count) const
    {
        constexpr int ALL = VECTORS * ROW_OCTETS, EACH = (ALL + THREADS - 1) / THREADS, TOGETHER = EACH <= 6 ? EACH : 4;
        constexpr bool WHOLE = ALL % (TOGETHER * THREADS) == 0;
        #pragma unroll 1
        for (int base = int(threadIdx.x); base < ALL; base += TOGETHER * THREADS) {
            Pack<vector_t, 8> given[TOGETHER];
            #pragma unroll
            for (int each = 0; each < TOGETHER; ++each) {
                int index = base + each * THREADS, v = index / ROW_OCTETS, place = index % ROW_OCTETS * 8;
                bool inside = (WHOLE || index < ALL) && place < count;
                given[each] = load_pack<8>(rows + (inside ? (long long)v * row_length + place : 0));
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

    // Adds to the sums of numbers the four pairs of an octet.
    __device__ __forceinline__ static void add_octet(float (&sum)[4], const uint (&x)[4])
    {
        #pragma unroll
        for (int part = 0; part < 4; part += 2) {
            const uint a[4] = {ones(part), ones(part), ones(part + 1), ones(part + 1)};
            TensorCores<vector_t>::multiply(sum, a, x[part], x[part + 1]);
        }
    }

    // Adds up the numbers of each unit, by all warps, behind the barrier at which vectors are there.
    __device__ __forceinline__ void add_up() const
    {
        int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
        constexpr int ALL = STAGED_UNITS * GROUPS_OF_COLUMNS, EACH = (ALL + BLOCK_WARPS - 1) / BLOCK_WARPS;
        #pragma unroll
        for (int round = 0; round < EACH; ++round) {
            int index = warp + round * BLOCK_WARPS;
            if (ALL % BLOCK_WARPS && index >= ALL) {
                break;
            }
            float found[2][4] = {}; // of products that do not wait for each other
            #pragma unroll
            for (int octet = 0; octet < OCTETS; ++octet) {
                uint x[4];
                load(x, index % GROUPS_OF_COLUMNS, index / GROUPS_OF_COLUMNS * UNIT + octet * 32);
                add_octet(found[octet % 2], x);
            }
            float2 sum = make_float2(found[0][0] + found[1][0], found[0][1] + found[1][1]);
            if (lane < 4) { // all rows have the same
                *reinterpret_cast<float2*>(sums + index * 8 + lane * 2) = sum;
            }
        }
    }

    // The sums of a unit in a lane's two columns.
    __device__ __forceinline__ float2 sums_of(int unit, int group) const
    {
        int index = unit * GROUPS_OF_COLUMNS + group;
        return *reinterpret_cast<const float2*>(sums + index * 8 + int(threadIdx.x) % 4 * 2);
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
            uint both = as_pair(given[place_in_octet(pair * 2)], given[place_in_octet(pair * 2 + 1)]);
            float factor = is_upper_half(pair) ? RAISED / 16.0f : RAISED;
            ordered[pair] = ARE_RAISED ? Numbers::mul(both, pair_of(factor)) : both;
        }
        store_pack(reinterpret_cast<uint*>(staged + v * VECTOR_ROW + octet * 8), ordered);
    }
};
