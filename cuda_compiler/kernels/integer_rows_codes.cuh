// Codes of a product as integers, on their way in shared memory: each warp has STAGES steps of a tile of
// its own. Along k a unit is UNIT codes, whose products add up as integers, a bundle four units, a step STEP bundles.
constexpr int BLOCK_WARPS = TEAMS * WARPS_K, THREADS = 32 * (BLOCK_WARPS + (PACE < STAGES)), TILE = 16;
constexpr int BUNDLES = COMMON / UNIT / 4, BUNDLE_GROUPS = ONE_GROUP ? 0 : 4 * UNIT / GROUP;
constexpr int ROW_BYTES = COMMON * BITS / 8, BUNDLE_BYTES = 4 * UNIT * BITS / 8, STEP_BYTES = STEP * BUNDLE_BYTES;
constexpr int SCALE_BYTES = (ONE_GROUP ? 1 : STEP * BUNDLE_GROUPS) * int(sizeof(scale_t)); // of a row's step
constexpr int ZERO_BYTES = ZEROS ? (STEP * BUNDLE_GROUPS * ZERO_BITS / 8 + 3 + 3) / 4 * 4 : 0; // in whole words
constexpr int SCALES_AT = TILE * STEP_BYTES, ZEROS_AT = SCALES_AT + TILE * SCALE_BYTES;
constexpr int STAGE_BYTES = ZEROS_AT + TILE * ZERO_BYTES;
constexpr int PAIRS_OF_CHUNKS = BUNDLE_BYTES / 32, PRODUCTS = UNIT / 32; // of a bundle's row; of a unit
constexpr bool SPLIT = BITS == 4 && UNIT == 64; // the upper halves of bytes are multiplied apart, 16 times as large
static_assert(COMMON % (4 * UNIT) == 0 && (UNIT == 32 || UNIT == 64), "whole bundles");
static_assert(STEP_BYTES % 128 == 0 && STAGE_BYTES % 16 == 0, "rows of shared memory that lanes read side by side");

#if DRAWN
__device__ uint drawn; // tiles beyond the first of each team; there are as many draws as tiles, behind which it is 0
#endif

struct Parts {
    const uint8* matrix;
    const scale_t* scales;
    const zero_t* zeros;
};

// Rows of a stage have their chunks in another order each, so that eight of them are read from different banks.
__device__ __forceinline__ int place_in_row(int byte, int row) { return byte ^ (row & 7) * 16; }

// A warp's codes on their way to shared memory, with their scales and zero points.
struct Ring {
    Parts from;
    int first, last;       // bundles of this warp
    int tile, bundle;      // what comes next
    const uint8* codes;    // this lane's part of it
    const scale_t* scales; // its groups in the row whose scales this lane copies
    uint ticket;           // of the tile behind this one, where tiles are drawn; the first lane has it

    static constexpr int CHUNKS = STEP_BYTES / 16, TOGETHER = 32 / CHUNKS; // of a row's step; rows of an access
    static constexpr int ZERO_WORDS = ZERO_BYTES / 4;
    static_assert(CHUNKS <= 32, "a step of a row is one access of a warp at the most");

    // Goes to the beginning of a tile, which may be behind the last one.
    __device__ __forceinline__ void seek(int place)
    {
        int lane = int(threadIdx.x) % 32;
        tile = place;
        bundle = first;
        codes = from.matrix + (long long)(tile * TILE + lane / CHUNKS) * ROW_BYTES;
        codes += bundle * BUNDLE_BYTES + lane % CHUNKS * 16;
        if (!ONE_GROUP) {
            scales = from.scales + (long long)(tile * TILE + lane / STEP) * (COMMON / GROUP);
            scales += (bundle + lane % STEP) * BUNDLE_GROUPS;
        }
    }

    // Starts copying the next step, if there is one.
    __device__ __forceinline__ void fill(unsigned char* stage, int further, const Params& p)
    {
        if (tile < p.tiles) {
            int lane = int(threadIdx.x) % 32, row = lane / CHUNKS, byte = lane % CHUNKS * 16;
            bool valid = STEP == 1 || bundle + byte / BUNDLE_BYTES < last;
            unsigned char* target = stage + row * STEP_BYTES;
            int place = place_in_row(byte, row);
            #pragma unroll
            for (int index = 0; index < TILE; index += TOGETHER) { // rows are sums of bits that no two of them have
                const uint8* source = valid ? codes + index * ROW_BYTES : from.matrix;
                copy_chunk(target + index * STEP_BYTES + place_in_row(place, index), source, valid);
            }
            copy_scales(stage + SCALES_AT, lane);
            if (ZEROS) {
                copy_zeros(stage + ZEROS_AT, lane, p);
            }
            bundle += STEP;
            codes += STEP_BYTES;
            scales += ONE_GROUP ? 0 : STEP * BUNDLE_GROUPS;
            if (bundle >= last) {
                go_on(further, p);
            }
        }
        commit_copies();
    }

    // Goes to the team's next tile.
    __device__ __forceinline__ void go_on(int further, const Params& p)
    {
#if DRAWN
        seek(further + int(__shfl_sync(0xffffffffu, ticket, 0)));
        draw(p);
#else
        seek(tile + further);
#endif
    }

    // Asks which tile is behind this one. Those who are quicker take more of them.
    __device__ __forceinline__ void draw(const Params& p)
    {
#if DRAWN
        if (tile < p.tiles && threadIdx.x % 32 == 0) {
            ticket = atomicInc(&drawn, p.tiles - 1);
        }
#endif
    }

    // Those of the step's groups; of whole rows with the last step.
    __device__ __forceinline__ void copy_scales(unsigned char* target, int lane) const
    {
        if (ONE_GROUP) {
            constexpr int ALL = TILE * int(sizeof(scale_t)) / 16;
            if (bundle + STEP >= last && lane < ALL) {
                copy_chunk(target + lane * 16, from.scales + tile * TILE + lane * (TILE / ALL), true);
            }
        } else {
            constexpr int BYTES = SCALE_BYTES / STEP;
            int row = lane / STEP, second = lane % STEP;
            if (row < TILE && bundle + second < last) {
                copy_part<BYTES>(target + row * SCALE_BYTES + second * BYTES, scales, BYTES);
            }
        }
    }

    // Zero points begin at any byte; whole words are copied, but for what is behind the last row.
    __device__ __forceinline__ void copy_zeros(unsigned char* target, int lane, const Params& p) const
    {
        const uint8* bytes = reinterpret_cast<const uint8*>(from.zeros);
        int end = p.outputs * p.zero_row;
        #pragma unroll
        for (int first_word = 0; first_word < TILE * ZERO_WORDS; first_word += 32) {
            int index = first_word + lane, row = index / ZERO_WORDS, word = index % ZERO_WORDS;
            int at = (zero_at(tile * TILE + row, bundle, p) & ~3) + word * 4, left = end - at;
            if (TILE * ZERO_WORDS % 32 == 0 || row < TILE) {
                copy_part<4>(target + index * 4, bytes + (left > 0 ? at : 0), left > 4 ? 4 : left > 0 ? left : 0);
            }
        }
    }

    __device__ __forceinline__ static int zero_at(int row, int bundle, const Params& p)
    {
        return row * p.zero_row + bundle * (BUNDLE_GROUPS * ZERO_BITS / 8);
    }
};

// A bundle's codes of 16 rows, of the step's first or second bundle, in the order of the operand of products of bytes.
struct Codes {
    uint word[PAIRS_OF_CHUNKS][4];

    __device__ __forceinline__ Codes(const unsigned char* stage, int second)
    {
        int lane = int(threadIdx.x) % 32, row = lane % 16, place = place_in_row(lane / 16 * 16, row);
        uint first = shared_address(stage + row * STEP_BYTES);
        #pragma unroll
        for (int pair = 0; pair < PAIRS_OF_CHUNKS; ++pair) {
            int byte = second * BUNDLE_BYTES + pair * 32;
            load_matrices(word[pair], first + byte / 128 * 128 + (place ^ byte % 128));
        }
    }

    __device__ __forceinline__ void of_product(uint (&a)[4], int product) const
    {
        #pragma unroll
        for (int part = 0; part < 4; ++part) {
            if (SPLIT) {
                a[part] = word[product / 2][part] & (product % 2 ? 0xf0f0f0f0u : 0x0f0f0f0fu);
            } else if (BITS == 8) {
                a[part] = word[product % PAIRS_OF_CHUNKS][part];
            } else {
                uint found = word[product / 2][product % 2 * 2 + part % 2];
                a[part] = (part < 2 ? found : found >> 4) & 0x0f0f0f0fu;
            }
        }
    }
};

// What the codes of a lane's row are scaled by, and their zero point.
struct Scales {
    float scale, zero;

    // Of a bundle's unit in a row of the stage; `at` is the bundle, and `second` its place in the step.
    __device__ __forceinline__ Scales(
        const unsigned char* stage, int tile, int row, int at, int second, int unit, const Params& p)
        : scale(1.0f), zero(float(ZERO))
    {
        int group = ONE_GROUP ? 0 : second * BUNDLE_GROUPS + unit * UNIT / GROUP; // of the step
        if (!ONE_GROUP) {
            scale = float(reinterpret_cast<const scale_t*>(stage + SCALES_AT + row * SCALE_BYTES)[group]);
        }
        if (ZEROS) {
            int first = Ring::zero_at(tile * TILE + row, at - second, p) & 3;
            const unsigned char* bytes = stage + ZEROS_AT + row * ZERO_BYTES + first;
            int found = ZERO_BITS == 8 ? int(zero_t(bytes[group])) : bytes[group >> 1] >> (group & 1) * 4 & 15;
            zero = __int_as_float(found + __float_as_int(WHOLE_FLOATS)) - WHOLE_FLOATS;
        }
    }
};
