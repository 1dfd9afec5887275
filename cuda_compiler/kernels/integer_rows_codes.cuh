// What a product of one row has on its way with its codes, the scales and zero points of whole tiles, and its operands.
constexpr int STAGE_BYTES = TILE * STEP_BYTES;
constexpr int ROW_GROUPS = ONE_GROUP ? 1 : COMMON / GROUP, SCALE_BYTES = ROW_GROUPS * int(sizeof(scale_t)); // of a row
constexpr int SCALE_ROW = SCALE_BYTES + (SCALE_BYTES % 64 ? 0 : 16); // neighbours begin in other banks
constexpr int ZEROS_AT = TILE * SCALE_ROW, SCALED_BYTES = ZEROS_AT + TILE * ZERO_ROW; // of a tile
constexpr int PRODUCTS = UNIT / 32; // of a unit
// Where codes are SPLIT, the lower halves of bytes are multiplied by themselves, and whole bytes, which are 16 times
// the upper halves and the lower ones, by the numbers that belong to the upper halves. What the lower ones add there is
// taken beforehand from the numbers that belong to them.
constexpr bool SPLIT = BITS == 4 && UNIT == 64;

// The place of the next tile's scales, which tiles take in turns.
__device__ __forceinline__ int next_scaled(int slot) { return slot + 1 == SCALED_TILES ? 0 : slot + 1; }

// A warp's codes on their way to shared memory, with its part of the scales and zero points of its team.
struct Ring : RingOfCodes {
    unsigned char* scaled; // the team's tiles of scales
    int slot;              // of those of what comes next

    // Starts copying the next step, if there is one.
    __device__ __forceinline__ void fill(unsigned char* stage, int further, const Params& p)
    {
        if (tile < p.tiles) {
            if (bundle == first) {
                copy_scales();
            }
            copy_codes<false>(stage);
            bundle += STEP;
            codes += STEP_BYTES;
            if (bundle >= last) {
                seek_codes(tile + further);
                slot = next_scaled(slot);
            }
        }
        commit_copies();
    }

    // Those of the whole tile, which lie one after another, and of which each thread of the team copies some.
    __device__ __forceinline__ void copy_scales() const
    {
        constexpr int ALL = TILE * SCALE_BYTES / 16, ROW = SCALE_BYTES % 16 ? ALL : SCALE_BYTES / 16;
        const unsigned char* scales = reinterpret_cast<const unsigned char*>(from.scales);
        const unsigned char* zeros = reinterpret_cast<const unsigned char*>(from.zeros);
        unsigned char* target = scaled + slot * SCALED_BYTES;
        int member = int(threadIdx.x) % TEAM;
        scales += (long long)(tile) * (TILE * SCALE_BYTES);
        zeros += (long long)(tile) * (TILE * ZERO_ROW);
        #pragma unroll 1
        for (int chunk = member; chunk < ALL; chunk += TEAM) {
            copy_chunk(target + chunk / ROW * (SCALE_ROW - SCALE_BYTES) + chunk * 16, scales + chunk * 16, true);
        }
        #pragma unroll 1
        for (int chunk = member; chunk < ZERO_ROW; chunk += TEAM) {
            copy_chunk(target + ZEROS_AT + chunk * 16, zeros + chunk * 16, true);
        }
    }
};

// A bundle's codes in the order of the operand of products of bytes.
struct Codes {
    uint word[PAIRS_OF_CHUNKS][4];

    __device__ __forceinline__ Codes(const unsigned char* stage, int second)
    {
        const PlaceOfCodes place(shared_address(stage));
        #pragma unroll
        for (int pair = 0; pair < PAIRS_OF_CHUNKS; ++pair) {
            place.load(word[pair], second, pair);
        }
    }

    __device__ __forceinline__ void of_product(uint (&a)[4], int product) const
    {
        #pragma unroll
        for (int part = 0; part < 4; ++part) {
            if (SPLIT) {
                a[part] = word[product / 2][part] & (product % 2 ? ~0u : 0x0f0f0f0fu);
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

    // Of a bundle's unit in a row of a tile, whose scales are given.
    __device__ __forceinline__ Scales(const unsigned char* scaled, int row, int bundle, int unit)
        : scale(1.0f), zero(float(ZERO))
    {
        int group = ONE_GROUP ? 0 : bundle * BUNDLE_GROUPS + unit * UNIT / GROUP;
        if (!ONE_GROUP) {
            scale = of_row(scaled, row, group);
        }
        if (ZEROS) {
            const unsigned char* bytes = scaled + ZEROS_AT + row * ZERO_ROW;
            int found = ZERO_BITS == 8 ? int(zero_t(bytes[group])) : bytes[group >> 1] >> (group & 1) * 4 & 15;
            zero = __int_as_float(found + __float_as_int(WHOLE_FLOATS)) - WHOLE_FLOATS;
        }
    }

    __device__ __forceinline__ static float of_row(const unsigned char* scaled, int row, int group)
    {
        return float(reinterpret_cast<const scale_t*>(scaled + row * SCALE_ROW)[group]);
    }
};
