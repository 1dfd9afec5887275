// What a product of several rows has on its way with its codes: scales and zero points of the same steps.
constexpr int SCALE_BYTES = (ONE_GROUP ? 1 : STEP * BUNDLE_GROUPS) * int(sizeof(scale_t)); // of a row's step
constexpr int ZERO_BYTES = ZEROS ? (STEP * BUNDLE_GROUPS * ZERO_BITS / 8 + 3 + 3) / 4 * 4 : 0; // in whole words
constexpr int SCALES_AT = TILE * STEP_BYTES, ZEROS_AT = SCALES_AT + TILE * SCALE_BYTES;
constexpr int STAGE_BYTES = ZEROS_AT + TILE * ZERO_BYTES;
static_assert(STAGE_BYTES % 16 == 0, "chunks of the next stage");

// A warp's codes on their way to shared memory, with their scales and zero points.
struct Ring : RingOfCodes {
    const scale_t* scales; // its groups in the row whose scales this lane copies
    int scale_place;       // of these in a stage

    static constexpr int ZERO_WORDS = ZERO_BYTES / 4;

    __device__ __forceinline__ void find_places()
    {
        int lane = int(threadIdx.x) % 32;
        find_place();
        scale_place = SCALES_AT + (ONE_GROUP ? lane * 16 : lane / STEP * SCALE_BYTES + lane % STEP * (SCALE_BYTES / STEP));
        settle(scale_place);
    }

    __device__ __forceinline__ void seek(int place)
    {
        seek_codes(place);
        if (!ONE_GROUP) {
            int lane = int(threadIdx.x) % 32;
            scales = from.scales + (long long)(tile * TILE + lane / STEP) * (COMMON / GROUP);
            scales += (bundle + lane % STEP) * BUNDLE_GROUPS;
        }
    }

    // Starts copying the next step, if there is one.
    template <bool IN_QUARTERS = false>
    __device__ __forceinline__ void fill(unsigned char* stage, int further, const Params& p)
    {
        if (tile < p.tiles) {
            int lane = int(threadIdx.x) % 32;
            copy_codes<IN_QUARTERS>(stage);
            copy_scales(stage + scale_place, lane);
            if (ZEROS) {
                copy_zeros(stage + ZEROS_AT, lane, p);
            }
            bundle += STEP;
            codes += STEP_BYTES;
            scales += ONE_GROUP ? 0 : STEP * BUNDLE_GROUPS;
            if (bundle >= last) {
                if (TURNS == 1) {
                    tile = p.tiles;
                } else {
                    seek(tile + further);
                }
            }
        }
        commit_copies();
    }

    // Those of the step's groups; of whole rows with the last step.
    __device__ __forceinline__ void copy_scales(unsigned char* target, int lane) const
    {
        if (ONE_GROUP) {
            constexpr int ALL = TILE * int(sizeof(scale_t)) / 16;
            if (bundle + STEP >= last && lane < ALL) {
                copy_chunk(target, from.scales + tile * TILE + lane * (TILE / ALL), true);
            }
        } else {
            constexpr int BYTES = SCALE_BYTES / STEP;
            int row = lane / STEP, second = lane % STEP;
            if (row < TILE && bundle + second < last) {
                copy_part<BYTES>(target, scales, BYTES);
            }
        }
    }

    // Zero points begin at any byte; whole words are copied, none from behind the last row.
    __device__ __forceinline__ void copy_zeros(unsigned char* target, int lane, const Params& p) const
    {
        const uint8* bytes = reinterpret_cast<const uint8*>(from.zeros);
        int last_word = p.outputs * p.zero_row - 4;
        #pragma unroll
        for (int first_word = 0; first_word < TILE * ZERO_WORDS; first_word += 32) {
            int index = first_word + lane, row = index / ZERO_WORDS, word = index % ZERO_WORDS;
            int at = (zero_at(tile * TILE + row, bundle, p) & ~3) + word * 4;
            if (TILE * ZERO_WORDS % 32 == 0 || row < TILE) {
                copy_part<4>(target + index * 4, bytes + min(at, last_word), 4);
            }
        }
    }

    __device__ __forceinline__ static int zero_at(int row, int bundle, const Params& p)
    {
        return row * p.zero_row + bundle * (BUNDLE_GROUPS * ZERO_BITS / 8);
    }
};

// Where a lane finds scales and zero points of its row in a stage. `zero_row` is where those of the row begin in memory;
// eight rows further that is the same byte of a word.
struct PlacesOfScales {
    int scales, zeros, zero_row;

    __device__ __forceinline__ explicit PlacesOfScales(const Params& p)
    {
        int row = int(threadIdx.x) % 32 / 4;
        scales = SCALES_AT + row * SCALE_BYTES;
        zeros = ZEROS_AT + row * ZERO_BYTES;
        zero_row = Ring::zero_at(row, 0, p);
        settle(scales);
        settle(zeros);
        settle(zero_row);
    }
};

// What the codes of a lane's row are scaled by in a bundle, and their zero points.
struct Scales {
    static constexpr int GROUPS = ONE_GROUP ? 1 : BUNDLE_GROUPS, BYTES = ZEROS ? GROUPS * ZERO_BITS / 8 : 1;

    Pack<scale_t, GROUPS> scales;
    uint zeros[BYTES];

    // Of the row so many rows further; `at` is the bundle, and `second` its place in the step.
    __device__ __forceinline__ Scales(
        const unsigned char* stage, const PlacesOfScales& places, int further, int at, int second, const Params& p)
    {
        if (!ONE_GROUP) {
            const unsigned char* own = stage + places.scales + further * SCALE_BYTES;
            scales = load_pack<GROUPS>(reinterpret_cast<const scale_t*>(own) + second * GROUPS);
        }
        if (ZEROS) {
            const unsigned char* bytes = stage + places.zeros + further * ZERO_BYTES + second * BYTES;
            bytes += (places.zero_row + Ring::zero_at(0, at - second, p)) & 3;
            #pragma unroll
            for (int byte = 0; byte < BYTES; ++byte) {
                zeros[byte] = bytes[byte];
            }
        }
    }

    __device__ __forceinline__ float scale(int unit) const { return float(scales[unit * UNIT / GROUP]); }

    // The zero point of a unit, as codes become numbers by it.
    __device__ __forceinline__ uint offset(int unit) const
    {
        if (!ZEROS) {
            return offset_pair(float(ZERO), AS_THEY_ARE);
        }
        int bit = unit * UNIT / GROUP * ZERO_BITS, half_byte = bit / 4 % 2;
        uint found = zeros[bit / 8], whole = __float_as_uint(WHOLE_FLOATS);
        if (AS_THEY_ARE && BITS == 4 && ZERO_BITS == 4) { // a subnormal number as well
            return Numbers::mul(found * 0x10001u & equal_codes(15, half_byte), factor_of_codes(half_byte) ^ 0x80008000u);
        }
        found = ZERO_BITS == 8 ? uint(int(zero_t(found)) + int(whole))
                : half_byte    ? found >> 4 | whole
                               : and_or(found, 15u, whole);
        return offset_pair(__uint_as_float(found) - WHOLE_FLOATS, AS_THEY_ARE);
    }
};
