// Products of up to 32 rows by a matrix that is read once, on tensor cores: result[v, o] = sum of vector[v, k] * number(o, k).
// The matrix is the operand of 16 rows, vectors are its columns, eight to a block of columns. Four lanes read a row side by side,
// CHUNK numbers each, a span: what a lane loads is its part of the products as it lies, since k is permuted alike for both
// operands. WARPS_K warps of each of CLUSTER blocks share TILES times 16 rows, a tile, each with neighbouring spans, DEPTH of
// which are on their way, the first ones before the grid ahead of this one has finished. Numbers have 16 bits, or are codes of
// four or eight. Grid: clusters with tiles in turns in x. Block: 256.
constexpr int THREADS = 256, WARPS = THREADS / 32, TILE = 16 * TILES, SIDES = 2 * TILES; // a lane's rows of a tile
constexpr int TEAMS = WARPS / WARPS_K;                                                   // of warps that share a tile
constexpr int OCTETS = CHUNK / 8, SPAN = 4 * CHUNK, SPANS = (COMMON + SPAN - 1) / SPAN;
constexpr int SPANS_EACH = (SPANS + WARPS_K * CLUSTER - 1) / (WARPS_K * CLUSTER); // of a warp
constexpr int ROUNDS = (SPANS_EACH + DEPTH - 1) / DEPTH;
constexpr int CHUNK_BYTES = CHUNK * BITS / 8, WORDS = CHUNK_BYTES / 4, SPAN_BYTES = 4 * CHUNK_BYTES;
constexpr bool WHOLE = COMMON % SPAN == 0, EVEN = SPANS == SPANS_EACH * WARPS_K * CLUSTER && SPANS_EACH % DEPTH == 0;
constexpr int BLOCKS = (VECTORS + 7) / 8;                    // of eight columns
constexpr int CHAINS = TILES * BLOCKS == 1 ? 2 : 1;          // of products that do not wait for each other
constexpr bool NUMBERS = BITS == 16, SHIFTED = BITS == 4 && !CODEBOOK && GROUPED;
constexpr int RATIO = GROUPED ? GROUP / SPAN : 1;            // spans of a group
constexpr int ALL_GROUPS = GROUPED ? (COMMON + GROUP - 1) / GROUP : 1;
constexpr int ROUND_GROUPS = RATIO == 1 ? DEPTH : (DEPTH + RATIO - 2) / RATIO + 1; // that the spans of a round lie in
constexpr int HELD = (ROUND_GROUPS + 3) / 4;                                      // of which each of four lanes has so many
static_assert(RATIO == 1 || HELD == 1, "four lanes hold the groups of a round");
constexpr bool WHOLE_VECTORS = PROLOGUE || CLUSTER == 1; // in shared memory; else what the spans of this block meet
constexpr int STAGED_SPANS = WHOLE_VECTORS ? SPANS : WARPS_K * SPANS_EACH;
constexpr int VECTOR_ROW = STAGED_SPANS * SPAN + (STAGED_SPANS * SPAN % 64 == 32 ? 0 : 32); // neighbours in other banks
constexpr int SUM_ROW = BLOCKS * 8;
constexpr int PART_ROW = TILE + 4, TURNS = TILES * BLOCKS == 1 ? 2 : 1; // with two, tiles wait once for each other
constexpr int PART = WARPS * BLOCKS * 8 * PART_ROW;
constexpr int VALUES = STORE_SIZE * PAIRS, ITEMS = TILE / VALUES * VECTORS, SHARE = (ITEMS + CLUSTER - 1) / CLUSTER;
constexpr int TEAM = 32 * WARPS_K, ITEMS_EACH = (ITEMS + TEAM - 1) / TEAM, SHARE_EACH = (SHARE + TEAM - 1) / TEAM;
constexpr int GATHERED = CLUSTER > 1 ? CLUSTER * SHARE * VALUES : 0; // floats that the blocks of a cluster send to one
static_assert(TILE % VALUES == 0, "stores take whole tiles");
static_assert(CLUSTER == 1 || TEAMS == 1, "blocks that share tiles have one at a time");
// Floats of shared memory ahead of the vectors.
constexpr int PARTS_AT = 0, GATHERED_AT = TURNS * PART, SUMS_AT = GATHERED_AT + 2 * GATHERED;
constexpr int VECTORS_AT = (SUMS_AT + (SHIFTED ? STAGED_SPANS * SUM_ROW : 0) + 3) / 4 * 4;

// What belongs to the groups of a round, of a lane's rows: a quad of lanes holds four groups, each lane one.
struct Scales {
    uint scale[SIDES][HELD], zero[SIDES][HELD];
};

// A team's place in the matrix: a tile, and which of its rounds comes next.
struct Stream {
    const uint8* matrix;
    const scale_t* scales;
    const zero_t* zeros;
    int first_span, quad; // of this warp, and the lane's place in a row
    int tile, round;
    bool inside;           // of the matrix
    const uint8* codes;    // of this lane's part of the next round's first span, in the first of its rows
    int further[SIDES];    // bytes from there to the same in its other rows

    __device__ __forceinline__ static int row_of(int tile, int side, const Params& p)
    {
        int row = tile * TILE + side * 8 + int(threadIdx.x) % 32 / 4;
        return row < p.outputs ? row : p.outputs - 1;
    }

    __device__ __forceinline__ void seek(int place, const Params& p)
    {
        tile = place;
        round = 0;
        inside = place < p.tiles;
        int first = row_of(inside ? tile : 0, 0, p);
        codes = matrix + (long long)first * p.matrix_row + (first_span * 4 + quad) * CHUNK_BYTES;
        #pragma unroll
        for (int side = 0; side < SIDES; ++side) {
            further[side] = (row_of(inside ? tile : 0, side, p) - first) * p.matrix_row;
        }
    }

    __device__ __forceinline__ void advance(int step, const Params& p)
    {
        round += 1;
        if (round == ROUNDS) {
            seek(tile + step, p);
        } else {
            codes += DEPTH * SPAN_BYTES;
        }
    }

    __device__ __forceinline__ void load(uint (&word)[SIDES][WORDS], int pass) const
    {
        int own = round * DEPTH + pass, span = first_span + own;
        bool valid = inside && (EVEN || own < SPANS_EACH && span < SPANS);
        valid = valid && (WHOLE || span * SPAN + quad * CHUNK < COMMON);
        #pragma unroll
        for (int side = 0; side < SIDES; ++side) {
            if (!WHOLE) { // nothing that is no number meets the zeros behind the last element
                #pragma unroll
                for (int index = 0; index < WORDS; ++index) {
                    word[side][index] = 0;
                }
            }
            load_bits<CHUNK_BYTES>(word[side], codes + further[side] + pass * SPAN_BYTES, valid);
        }
    }

    // The group of a round's first span, and the one that this lane holds.
    __device__ __forceinline__ int group_at(int at_round) const { return (first_span + at_round * DEPTH) / RATIO; }
    __device__ __forceinline__ int held_group(int at_round, int slot) const
    {
        int group = group_at(at_round) + slot * 4 + quad;
        return group < ALL_GROUPS ? group : ALL_GROUPS - 1;
    }

    __device__ __forceinline__ void load(Scales& into, const Params& p) const
    {
        #pragma unroll
        for (int side = 0; side < (GROUPED ? SIDES : 0); ++side) {
            int row = row_of(inside ? tile : 0, side, p) / ROWS;
            #pragma unroll
            for (int slot = 0; slot < HELD; ++slot) {
                int group = held_group(round, slot);
                load_element(into.scale[side][slot], scales + (long long)row * p.scale_row + group * SCALE_GROUP, inside);
                if (ZEROS) {
                    const zero_t* source = zeros + (long long)row * p.zero_row;
                    into.zero[side][slot] = uint(int(source[group * ZERO_GROUP * ZERO_BITS / 8]));
                }
            }
        }
    }

    // Brings the zero points of a round, as they were loaded, to the form of `Scales`; with scales of 16 bits one register.
    __device__ __forceinline__ void settle(Scales& loaded, int at_round) const
    {
        #pragma unroll
        for (int slot = 0; slot < (GROUPED && ZEROS ? HELD : 0); ++slot) {
            int shift = ZERO_BITS == 8 ? 0 : held_group(at_round, slot) * ZERO_GROUP * ZERO_BITS % 8;
            #pragma unroll
            for (int side = 0; side < SIDES; ++side) {
                uint& zero = loaded.zero[side][slot];
                zero = ZERO_BITS == 8 ? zero & 0xffffu : zero >> shift & ((1u << ZERO_BITS) - 1u);
                if (sizeof(scale_t) == 2) {
                    loaded.scale[side][slot] = loaded.scale[side][slot] & 0xffffu | zero << 16;
                }
            }
        }
    }
};

// The scale and the zero point of a row's group, from the lane of the quad that has them.
__device__ __forceinline__ void take_group(float& scale, float& zero, const Scales& held, int side, int member)
{
    int slot = RATIO == 1 ? member / 4 : 0, source = int(threadIdx.x) % 32 / 4 * 4 + member % 4;
    uint bits = __shfl_sync(0xffffffffu, held.scale[side][slot], source);
    scale = element_of(bits, scale_t());
    zero = float(ZERO);
    if (ZEROS) {
        uint own = sizeof(scale_t) == 2 ? bits >> 16 : __shfl_sync(0xffffffffu, held.zero[side][slot], source);
        zero = float(int(short(own)));
    }
}
