// Codes of a product on their way in shared memory: each warp has STAGES steps of its part of tiles of 16 rows. Along k
// a unit is UNIT codes of one group, a bundle four units, a step STEP bundles.
constexpr int BLOCK_WARPS = TEAMS * WARPS_K, THREADS = 32 * BLOCK_WARPS, TEAM = 32 * WARPS_K, TILE = 16;
constexpr int BUNDLES = COMMON / UNIT / 4, BUNDLE_GROUPS = ONE_GROUP ? 0 : 4 * UNIT / GROUP;
constexpr int ROW_BYTES = COMMON * BITS / 8, BUNDLE_BYTES = 4 * UNIT * BITS / 8, STEP_BYTES = STEP * BUNDLE_BYTES;
constexpr int PAIRS_OF_CHUNKS = BUNDLE_BYTES / 32; // of a bundle's row
static_assert(COMMON % (4 * UNIT) == 0 && (UNIT == 32 || UNIT == 64), "whole bundles");
static_assert(STEP_BYTES % 128 == 0, "rows of shared memory that lanes read side by side");

struct Parts {
    const uint8* matrix;
    const scale_t* scales;
    const zero_t* zeros;
};

// Rows of a stage have their chunks in another order each, so that eight of them are read from different banks.
__device__ __forceinline__ int place_in_row(int byte, int row) { return byte ^ (row & 7) * 16; }

// A warp's codes on their way to shared memory.
struct RingOfCodes {
    Parts from;
    int first, last;    // bundles of this warp
    int tile, bundle;   // what comes next
    const uint8* codes; // this lane's part of it
    int place;          // of what it copies of a step in a stage

    static constexpr int CHUNKS = STEP_BYTES / 16, TOGETHER = 32 / CHUNKS; // of a row's step; rows of an access
    static_assert(CHUNKS <= 32, "a step of a row is one access of a warp at the most");

    // Before all else.
    __device__ __forceinline__ void find_place()
    {
        int lane = int(threadIdx.x) % 32, row = lane / CHUNKS;
        place = row * STEP_BYTES + place_in_row(lane % CHUNKS * 16, row);
        settle(place);
    }

    // Goes to the beginning of a tile, which may be behind the last one.
    __device__ __forceinline__ void seek_codes(int place)
    {
        int lane = int(threadIdx.x) % 32;
        tile = place;
        bundle = first;
        codes = from.matrix + (long long)(tile * TILE + lane / CHUNKS) * ROW_BYTES;
        codes += bundle * BUNDLE_BYTES + lane % CHUNKS * 16;
    }

    // Starts copying the next step. IN_QUARTERS, a warp has three of these on their way at the most, as what grids ahead
    // load comes behind all of that.
    template <bool IN_QUARTERS>
    __device__ __forceinline__ void copy_codes(unsigned char* stage) const
    {
        constexpr int QUARTER = TILE >= 4 * TOGETHER ? TILE / 4 : TOGETHER;
        bool valid = STEP == 1 || bundle + int(threadIdx.x) % CHUNKS * 16 / BUNDLE_BYTES < last;
        #pragma unroll
        for (int index = 0; index < TILE; index += TOGETHER) { // rows are sums of bits that no two of them have
            const uint8* source = valid ? codes + index * ROW_BYTES : from.matrix;
            if (IN_QUARTERS && index > 0 && index % QUARTER == 0) {
                commit_copies();
                wait_for_copies<2>();
            }
            copy_chunk(stage + index * STEP_BYTES + place_in_row(place, index), source, valid);
        }
    }
};

// Where a lane loads a step's codes of 16 rows from: of each row every fourth word.
struct PlaceOfCodes {
    uint first;
    int place;

    // In a stage at an address.
    __device__ __forceinline__ explicit PlaceOfCodes(uint stage)
    {
        int lane = int(threadIdx.x) % 32, row = lane % 16;
        place = place_in_row(lane / 16 * 16, row);
        first = stage + row * STEP_BYTES;
    }

    // The same, so many bytes further.
    __device__ __forceinline__ PlaceOfCodes moved(uint bytes) const
    {
        PlaceOfCodes other = *this;
        other.first += bytes;
        return other;
    }

    // A pair of chunks of the step's first or second bundle.
    __device__ __forceinline__ void load(uint (&word)[4], int second, int pair) const
    {
        int byte = second * BUNDLE_BYTES + pair * 32;
        load_matrices(word, first + byte / 128 * 128 + (place ^ byte % 128));
    }
};
