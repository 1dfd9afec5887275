// Vectors of a product of several rows in shared memory, in the order in which codes become numbers; and how these
// are made.
constexpr int GROUPS_OF_COLUMNS = (VECTORS + 7) / 8, COLUMNS = 8 * GROUPS_OF_COLUMNS;
constexpr int OCTETS = UNIT / 32, BUNDLE_CODES = 4 * UNIT; // an octet of codes for each of four lanes
constexpr int STAGED_BUNDLES = (BUNDLES + CLUSTER - 1) / CLUSTER, STAGED_UNITS = 4 * STAGED_BUNDLES;
constexpr int VECTOR_ROW = STAGED_UNITS * UNIT + (BITS == 4 ? 32 : 16); // neighbours begin in other banks
constexpr int VECTORS_AT = BLOCK_WARPS * STAGES * STAGE_BYTES;

// Warps that make a vector ready: as many as there are. Where only those that make none ask for codes ahead, these are
// half of all, or fewer, but one at the least, where vectors would not have two warps each.
constexpr int warps_of_a_vector()
{
    bool some_ask = PROLOGUE == 2 && STAGES > 1 && !PACED;
    int all = BLOCK_WARPS / VECTORS, half = BLOCK_WARPS / 2 / VECTORS, most = (BLOCK_WARPS - 1) / VECTORS;
    int two = most < 2 ? most : 2, found = !some_ask ? all : half > two ? half : two;
    return found > 1 ? found : 1;
}
constexpr int SPLIT = warps_of_a_vector();
static_assert(!PROLOGUE || CLUSTER == 1, "blocks compute whole vectors");

typedef float Sums[GROUPS_OF_COLUMNS][4]; // in the register layout of mma.m16n8k16

typedef Pack<uint, 4> Octet; // eight numbers of 16 bits, two in a word

// The products of eight numbers by others, two at a time: rounded once, as by way of floats.
__device__ __forceinline__ void multiply_octets(
    Octet& made, const Pack<bfloat, 8>& left, const Pack<bfloat, 8>& right)
{
    #pragma unroll
    for (int u = 0; u < 8; u += 2) {
        made[u / 2] = Pairs<bfloat>::mul(as_pair(left[u], left[u + 1]), as_pair(right[u], right[u + 1]));
    }
}

constexpr int greatest_divisor(int left, int right) { return right == 0 ? left : greatest_divisor(right, left % right); }

// Where a thread copies octets of vectors from and to, some in each round. Warps copy pieces of 32: sets of them have
// the same rows each, so that places are a few numbers apart; or, where warps would have more to do then, they take all
// pieces in turns. The first round's places are found ahead of the wait for the grid ahead.
struct CopiedOctets {
    static constexpr int ROW_OCTETS = STAGED_UNITS * UNIT / 8, PIECES = (ROW_OCTETS + 31) / 32;
    static constexpr int SETS = greatest_divisor(BLOCK_WARPS, VECTORS), SET_WARPS = BLOCK_WARPS / SETS;
    static constexpr int ROW_TURNS = (PIECES + SET_WARPS - 1) / SET_WARPS, SET_ROWS = VECTORS / SETS;
    static constexpr int IN_TURNS = (VECTORS * PIECES + BLOCK_WARPS - 1) / BLOCK_WARPS;
    static constexpr bool BY_SETS = SET_ROWS * ROW_TURNS <= IN_TURNS;
    static constexpr int EACH = BY_SETS ? SET_ROWS * ROW_TURNS : IN_TURNS, TOGETHER = EACH <= 6 ? EACH : 4;
    static constexpr int ROUNDS = (EACH + TOGETHER - 1) / TOGETHER;

    int first, count, row_length; // elements that the block has of each row, and between rows; no tensor has 2^31
    int source[TOGETHER], target[TOGETHER];

    __device__ __forceinline__ CopiedOctets(int first, int count, int row_length)
        : first(first), count(count), row_length(row_length)
    {
        if (PROLOGUE != 2) { // else nothing is copied
            find(0);
        }
    }

    __device__ __forceinline__ void find(int round)
    {
        int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
        #pragma unroll
        for (int index = 0; index < TOGETHER; ++index) {
            int each = round * TOGETHER + index, number = each * BLOCK_WARPS + warp; // of a piece, in turns
            int v = BY_SETS ? warp / SET_WARPS * SET_ROWS + each / ROW_TURNS : number / PIECES;
            int piece = BY_SETS ? warp % SET_WARPS + each % ROW_TURNS * SET_WARPS : number % PIECES;
            int place = (piece * 32 + lane) * 8;
            bool inside = v < VECTORS && (!BY_SETS || each < EACH) && place < count;
            source[index] = first + (inside ? v * row_length + place : 0);
            target[index] = inside ? v * VECTOR_ROW + place : ROW_OCTETS * 8; // between rows, where nobody reads
            settle(source[index]);
            settle(target[index]);
        }
    }
};

// Vectors in shared memory, each octet in the order in which codes become numbers.
struct Vectors {
    vector_t* staged;
    int first; // of the elements that the block has

    // Copies the vectors from rows in memory, by all threads; a barrier is to follow. Each calls `meanwhile` once, while
    // it waits for the first of its loads.
    template <typename Meanwhile>
    __device__ __forceinline__ void copy(const vector_t* rows, CopiedOctets own, Meanwhile meanwhile) const
    {
        #pragma unroll 1
        for (int round = 0; round < CopiedOctets::ROUNDS; ++round) {
            Octet given[CopiedOctets::TOGETHER];
            if (round > 0) {
                own.find(round);
            }
            #pragma unroll
            for (int index = 0; index < CopiedOctets::TOGETHER; ++index) {
                given[index] = load_pack<4>(reinterpret_cast<const uint*>(rows + own.source[index]));
            }
            if (round == 0) {
                meanwhile();
            }
            #pragma unroll
            for (int index = 0; index < CopiedOctets::TOGETHER; ++index) {
                store_octet(given[index], own.target[index]);
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
                        Octet made;
                        part += compute(loaded[each], v, octet * 8, made);
                        store_octet(made, v * VECTOR_ROW + octet * 8);
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

private:
    static constexpr int ROW_OCTETS = CopiedOctets::ROW_OCTETS, STEP_OCTETS = 32 * SPLIT;
    static constexpr int ROUNDS = (ROW_OCTETS + STEP_OCTETS - 1) / STEP_OCTETS;
    static constexpr int AT_ONCE = ROUNDS <= 6 ? ROUNDS : 4; // loads that wait for memory together
    static constexpr bool ARE_WHOLE = ROW_OCTETS % (AT_ONCE * STEP_OCTETS) == 0;

    __device__ __forceinline__ void store_octet(const Octet& given, int place) const
    {
        Octet ordered;
        order_octet(ordered.at, given.at);
        store_pack(reinterpret_cast<uint*>(staged + place), ordered);
    }
};

// Where a lane finds its columns of the staged vectors, from the block's first unit on.
struct PlacesOfVectors {
    static constexpr int EACH = BITS == 4 ? 4 : 2; // pairs side by side
    const vector_t* staged;
    int column[GROUPS_OF_COLUMNS];

    __device__ __forceinline__ explicit PlacesOfVectors(const vector_t* staged) : staged(staged)
    {
        int lane = int(threadIdx.x) % 32;
        #pragma unroll
        for (int group = 0; group < GROUPS_OF_COLUMNS; ++group) {
            int v = group * 8 + lane / 4; // unread beyond
            column[group] = (v < VECTORS ? v : 0) * VECTOR_ROW + lane % 4 * EACH * 2;
            settle(column[group]);
        }
    }

    // The four pairs of the lane's octet in its column of a group, at a place in the vectors.
    __device__ __forceinline__ void load(uint (&pairs)[4], int group, int place) const
    {
        #pragma unroll
        for (int part = 0; part < 4; part += EACH) {
            Pack<uint, EACH> found =
                load_pack<EACH>(reinterpret_cast<const uint*>(staged + column[group] + place + part * 8));
            #pragma unroll
            for (int index = 0; index < EACH; ++index) {
                pairs[part + index] = found[index];
            }
        }
    }
};
