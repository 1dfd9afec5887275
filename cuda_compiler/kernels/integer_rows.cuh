// Products of a few rows by a matrix in codes that is read once, on tensor cores for integers:
// result[v, o] = sum of vector[v, k] * scale(o, k) * (code(o, k) - zero(o, k)).
// Codes of a byte are multiplied as they lie, those of four bits after two of them have been put apart. A vector is a number of
// 16 bits for each element, times a power of two for each UNIT of them; its two bytes are two columns of a product, and with
// few vectors the columns are FOLD units, of which each has zeros where the others have numbers. So sums of a unit are exact.
// Each warp has codes on their way in shared memory of its own, STAGES parts of 8 units in 16 rows, a tile, the first ones
// before the grid ahead of this one has finished; WARPS_K warps share a tile. Grid: tiles, in turns, in x.
constexpr int BLOCK_WARPS = TEAMS * WARPS_K, THREADS = 32 * BLOCK_WARPS, TILE = 16;
constexpr int UNITS = COMMON / UNIT, BUNDLES = UNITS / 4; // a bundle is four units, a step one bundle or two
constexpr int UNIT_BYTES = UNIT * BITS / 8, BUNDLE_BYTES = 4 * UNIT_BYTES, STEP_BYTES = STEP * BUNDLE_BYTES; // of a row
constexpr int ROW_BYTES = COMMON * BITS / 8;
constexpr int FOLD = VECTORS == 1 ? 4 : VECTORS == 2 ? 2 : 1, BLOCKS = FOLD > 1 ? 1 : (VECTORS + 3) / 4; // of eight columns
constexpr int CHAINS = FOLD > 1 ? 2 : 1; // of products that do not wait for each other
constexpr bool SPLIT = BITS == 4 && UNIT == 64 && CHAINS == 2; // the upper halves of bytes are multiplied apart, 16 times as large
constexpr int PAIRS_OF_CHUNKS = BUNDLE_BYTES / 32, PRODUCTS = UNIT / 32; // of a bundle's row; of a unit
constexpr int BUNDLE_GROUPS = ONE_GROUP ? 0 : 4 * UNIT / GROUP;
constexpr int SCALE_BYTES = ONE_GROUP ? int(sizeof(scale_t)) : STEP * BUNDLE_GROUPS * int(sizeof(scale_t)); // of a row's step
constexpr int ZERO_BYTES = ZEROS ? (STEP * BUNDLE_GROUPS * ZERO_BITS / 8 + 3 + 3) / 4 * 4 : 0;               // in whole words
constexpr int SCALES_AT = TILE * STEP_BYTES, ZEROS_AT = SCALES_AT + TILE * SCALE_BYTES;
constexpr int STAGE_BYTES = ZEROS_AT + TILE * ZERO_BYTES;
constexpr float COUNTED_FROM = 12582912.0f; // 1.5 * 2^23: bits of such floats, plus an integer, are those of their sum
constexpr int ALL_SHARES = CLUSTER * WARPS_K, BLOCK_BUNDLES = (BUNDLES + CLUSTER - 1) / CLUSTER; // at the most
constexpr int DIGIT_ROW = BLOCK_BUNDLES * 4 * UNIT + 64; // neighbours begin in other banks
constexpr int PART_ROW = TILE + 4, PART = BLOCKS * 4 * PART_ROW; // of a warp
constexpr int VALUES = STORE_SIZE * PAIRS, ITEMS = TILE / VALUES * VECTORS;
constexpr int SHARE = (ITEMS + CLUSTER - 1) / CLUSTER; // of a tile's items, which a block of a cluster stores
constexpr int ITEMS_EACH = (ITEMS + 32 * WARPS_K - 1) / (32 * WARPS_K), SHARE_EACH = (SHARE + 32 * WARPS_K - 1) / (32 * WARPS_K);
constexpr int DIGITS_AT = BLOCK_WARPS * STAGES * STAGE_BYTES, UNITS_AT = DIGITS_AT + 2 * VECTORS * DIGIT_ROW;
constexpr int PARTS_AT = UNITS_AT + VECTORS * BLOCK_BUNDLES * 32, GATHERED_AT = PARTS_AT + 2 * BLOCK_WARPS * PART * 4;
constexpr int COMPUTED_AT = GATHERED_AT + (CLUSTER > 1 ? (2 * TEAMS * CLUSTER * SHARE * VALUES * 4 + 15) / 16 * 16 : 0);
static_assert(TILE % VALUES == 0, "stores take whole tiles");
static_assert(COMMON % (4 * UNIT) == 0 && (UNIT == 32 || UNIT == 64), "whole bundles");
static_assert(STEP_BYTES % 128 == 0 && STAGE_BYTES % 16 == 0, "rows of shared memory that lanes read side by side");

typedef TensorCores<PairOfCodes<code_t>> Integers;

// Copies 4, 8 or 16 bytes, or fewer and zeros behind them.
template <int BYTES>
__device__ __forceinline__ void copy_part(void* target, const void* source, int bytes)
{
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(target)), "l"(source), "n"(BYTES),
                 "r"(bytes)
                 : "memory");
#endif
}

struct Parts {
    const uint8* matrix;
    const scale_t* scales;
    const zero_t* zeros;
};

// Rows of a stage have their chunks in another order each, so that eight of them are read from different banks.
__device__ __forceinline__ int place_in_row(int byte, int row) { return byte ^ (row & 7) * 16; }

// A warp's codes on their way, and what belongs to them.
struct Ring {
    Parts from;
    int first, last;       // bundles of this warp
    int tile, bundle;      // what comes next
    const uint8* codes;    // this lane's part of it
    const scale_t* scales; // its groups in the row whose scales this lane copies

    static constexpr int CHUNKS = STEP_BYTES / 16, TOGETHER = 32 / CHUNKS; // of a row's step; rows that lanes copy at a time
    static constexpr int ZERO_WORDS = ZERO_BYTES / 4;
    static_assert(CHUNKS <= 32, "a step of a row is one access of a warp at the most");

    __device__ __forceinline__ void seek(int place)
    {
        int lane = int(threadIdx.x) % 32;
        tile = place;
        bundle = first;
        codes = from.matrix + (long long)(tile * TILE + lane / CHUNKS) * ROW_BYTES + bundle * BUNDLE_BYTES + lane % CHUNKS * 16;
        if (!ONE_GROUP) {
            int own = bundle + lane % STEP;
            scales = from.scales + (long long)(tile * TILE + lane / STEP) * (UNITS * UNIT / GROUP) + own * BUNDLE_GROUPS;
        }
    }

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
                seek(tile + further);
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

// The vectors in shared memory: for each its upper and its lower bytes; for each unit the power of two and, with its sign turned,
// the sum.
struct Vectors {
    signed char* digits;
    float2* units;
    int first, last; // bundles that this block has

    // By all threads, which have 8 elements at a time.
    __device__ __forceinline__ void make(const vector_t* source, int source_row) const
    {
        constexpr int OCTETS = BLOCK_BUNDLES * UNIT / 2, ALL = VECTORS * OCTETS, ROUNDS = (ALL + THREADS - 1) / THREADS;
        constexpr int AT_ONCE = ROUNDS < 4 ? ROUNDS : 4; // so many loads wait for memory together
        #pragma unroll 1
        for (int base = int(threadIdx.x); base / 32 * 32 < ALL; base += AT_ONCE * THREADS) {
            Pack<vector_t, 8> given[AT_ONCE];
            #pragma unroll
            for (int each = 0; each < AT_ONCE; ++each) {
                int index = base + each * THREADS, octet = index % OCTETS + first * (UNIT / 2);
                bool exists = index < ALL && (BUNDLES % CLUSTER == 0 || octet < last * (UNIT / 2));
                const vector_t* from = source + (long long)(index / OCTETS) * source_row + octet * 8;
                given[each] = load_pack<8>(exists ? from : source);
            }
            #pragma unroll
            for (int each = 0; each < AT_ONCE; ++each) {
                int index = base + each * THREADS;
                make_octet(given[each], index / OCTETS, index % OCTETS, index < ALL);
            }
        }
    }

private:
    // Numbers of a unit, whose octets neighbouring lanes have, get 14 bits and a sign where they are the largest.
    __device__ __forceinline__ void make_octet(const Pack<vector_t, 8>& given, int v, int octet, bool exists) const
    {
        constexpr int SHARERS = UNIT / 8;
        float largest = 0.0f;
        #pragma unroll
        for (int u = 0; u < 8; ++u) {
            largest = greater(largest, __uint_as_float(__float_as_uint(float(given[u])) & 0x7fffffffu));
        }
        uint exponent = __float_as_uint(warp_max<SHARERS>(largest)) >> 23;
        bool is_number = exponent < 255;
        exponent = exponent < 14 ? 14 : exponent;
        float factor = __uint_as_float((267u - exponent) << 23); // times this, the largest is below 2^14
        int sum = 0;
        uint upper[8], lower[8];
        #pragma unroll
        for (int u = 0; u < 8; ++u) {
            int bits = __float_as_int(float(given[u]) * factor + COUNTED_FROM);
            sum += bits - __float_as_int(COUNTED_FROM);
            lower[u] = uint(bits), upper[u] = uint(bits + 128) >> 8;
        }
        float total = ZEROS || ZERO != 0 ? warp_sum<SHARERS>(float(sum)) : 0.0f;
        if (exists) {
            signed char* unit = digits + 2 * v * DIGIT_ROW + octet / SHARERS * UNIT;
            store_bytes(unit, octet % SHARERS, upper);
            store_bytes(unit + DIGIT_ROW, octet % SHARERS, lower);
            if (octet % SHARERS == 0) {
                float scale = is_number ? __uint_as_float((exponent - 13u) << 23) : __uint_as_float(0x7fc00000u);
                units[v * BLOCK_BUNDLES * 4 + octet / SHARERS] = make_float2(scale, -scale * total);
            }
        }
    }

    // Each lane reads its part of a unit's products from one place: of each product two words, of codes of four bits those of the
    // lower halves of bytes first.
    __device__ __forceinline__ static void store_bytes(signed char* unit, int octet, const uint (&byte)[8])
    {
        constexpr int APART = BITS == 4 ? 2 : 1, SECOND = BITS == 4 ? 1 : 4;
        uint word[2];
        #pragma unroll
        for (int side = 0; side < 2; ++side) {
            int first = side * SECOND;
            uint low = __byte_perm(byte[first], byte[first + APART], 0x0040);
            uint high = __byte_perm(byte[first + 2 * APART], byte[first + 3 * APART], 0x0040);
            word[side] = __byte_perm(low, high, 0x5410);
        }
        if (BITS == 4) {
            Pack<uint, 2> both;
            both[0] = word[0], both[1] = word[1];
            store_pack(reinterpret_cast<uint*>(unit + octet % 4 * (UNIT / 4) + octet / 4 * 8), both);
        } else {
            uint* target = reinterpret_cast<uint*>(unit + octet % 2 * 2 * (UNIT / 4) + octet / 2 * 4);
            target[0] = word[0];
            target[UNIT / 16] = word[1];
        }
    }
};

// A lane's sums: of two rows of a tile for each block of columns.
struct Sums {
    float at[BLOCKS][2];
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
            zero = __int_as_float(found + __float_as_int(COUNTED_FROM)) - COUNTED_FROM;
        }
    }
};

// Adds the products of a bundle, the first or the second of a step.
__device__ __forceinline__ void multiply_bundle(
    Sums& sum, const unsigned char* stage, const Vectors& vectors, int tile, int at, int second, const Params& p)
{
    int lane = int(threadIdx.x) % 32, quad = lane % 4, row = lane / 4;
    int column = lane / 4, member = FOLD > 1 ? column / 2 / VECTORS : 0; // as this lane has them of the second operand
    const Codes codes(stage, second);
    #pragma unroll
    for (int first = 0; first < 4; first += FOLD) {
        uint x[BLOCKS][PRODUCTS * 2];
        #pragma unroll
        for (int block = 0; block < BLOCKS; ++block) {
            int v = FOLD > 1 ? column / 2 % VECTORS : block * 4 + column / 2;
            const signed char* digits = vectors.digits + (2 * (v < VECTORS ? v : 0) + column % 2) * DIGIT_ROW;
            digits += ((at - vectors.first) * 4 + first + member) * UNIT + quad * (UNIT / 4);
            Pack<uint, PRODUCTS * 2> found = load_pack<PRODUCTS * 2>(reinterpret_cast<const uint*>(digits));
            #pragma unroll
            for (int word = 0; word < PRODUCTS * 2; ++word) {
                x[block][word] = found[word];
            }
        }
        float product_sum[CHAINS][BLOCKS][4];
        #pragma unroll
        for (int index = 0; index < CHAINS * BLOCKS * 4; ++index) {
            product_sum[index / 4 / BLOCKS][index / 4 % BLOCKS][index % 4] = COUNTED_FROM;
        }
        #pragma unroll
        for (int turn = 0; turn < FOLD; ++turn) {
            #pragma unroll
            for (int product = 0; product < PRODUCTS; ++product) {
                uint a[4];
                codes.of_product(a, (first + turn) * PRODUCTS + product);
                #pragma unroll
                for (int block = 0; block < BLOCKS; ++block) {
                    int part = SPLIT ? product : product * 2, next = SPLIT ? 2 : 1;
                    uint b0 = member == turn ? x[block][part] : 0, b1 = member == turn ? x[block][part + next] : 0;
                    Integers::multiply(product_sum[(SPLIT ? product : turn) % CHAINS][block], a, b0, b1);
                }
            }
        }
        #pragma unroll
        for (int block = 0; block < BLOCKS; ++block) {
            int v = FOLD > 1 ? quad % VECTORS : block * 4 + quad, unit = FOLD > 1 ? first + quad / VECTORS : first;
            float2 own = vectors.units[((v < VECTORS ? v : 0) * BLOCK_BUNDLES + at - vectors.first) * 4 + unit];
            #pragma unroll
            for (int side = 0; side < 2; ++side) {
                float number[2];
                #pragma unroll
                for (int digit = 0; digit < 2; ++digit) {
                    float own_sum = product_sum[0][block][side * 2 + digit];
                    float other = product_sum[CHAINS - 1][block][side * 2 + digit];
                    if (SPLIT) {
                        number[digit] = other * 0.0625f + (own_sum - COUNTED_FROM * 1.0625f);
                    } else {
                        int added = CHAINS == 2 ? __float_as_int(other) - __float_as_int(COUNTED_FROM) : 0;
                        number[digit] = __int_as_float(__float_as_int(own_sum) + added) - COUNTED_FROM;
                    }
                }
                const Scales scales(stage, tile, row + side * 8, at, second, unit, p);
                float value = own.x * (256.0f * number[0] + number[1]);
                if (ZEROS || ZERO != 0) {
                    value += scales.zero * own.y;
                }
                sum.at[block][side] += scales.scale * value;
            }
        }
    }
}

// A thread's values of a tile's results: which row of the result, and which neighbours.
struct Item {
    int v, first, at; // `at` is the first of VALUES neighbours, `first` its place in the tile

    __device__ __forceinline__ Item(int index, int tile)
        : v(index / (TILE / VALUES)), first(index % (TILE / VALUES) * VALUES), at(tile * TILE + first)
    {
    }
};

// The sum of a tile's result from those of a team's warps, always in the same order.
__device__ __forceinline__ float sum_of_warps(const float* parts, int team, int v, int row)
{
    float sum = 0.0f;
    #pragma unroll
    for (int other = 0; other < WARPS_K; ++other) {
        sum += parts[(team * WARPS_K + other) * PART + v * PART_ROW + row];
    }
    return sum;
}

// Waits for the other warps that share a tile.
__device__ __forceinline__ void wait_for_team(int team)
{
    asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "n"(32 * WARPS_K) : "memory");
}

// A tile's sums in this warp's part of k, by rows of the parts.
__device__ __forceinline__ void multiply_tile(
    float* part, unsigned char* stages, int& stage, Ring& ring, const Vectors& vectors, int tile, int further, const Params& p)
{
    int lane = int(threadIdx.x) % 32;
    Sums sum = {};
    float row_scale[2] = {1.0f, 1.0f};
    #pragma unroll 1
    for (int bundle = ring.first; bundle < ring.last; bundle += STEP) {
        unsigned char* codes = stages + stage * STAGE_BYTES;
        wait_for_copies<STAGES - 1>();
        __syncwarp();
        multiply_bundle(sum, codes, vectors, tile, bundle, 0, p);
        if (STEP == 2 && bundle + 1 < ring.last) {
            multiply_bundle(sum, codes, vectors, tile, bundle + 1, 1, p);
        }
        if (ONE_GROUP && bundle + STEP >= ring.last) {
            row_scale[0] = float(reinterpret_cast<const scale_t*>(codes + SCALES_AT)[lane / 4]);
            row_scale[1] = float(reinterpret_cast<const scale_t*>(codes + SCALES_AT)[lane / 4 + 8]);
        }
        __syncwarp(); // all lanes have read what is overwritten
        ring.fill(codes, further, p);
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
    #pragma unroll
    for (int index = 0; index < BLOCKS * 2; ++index) {
        int block = index / 2, side = index % 2;
        float total = sum.at[block][side] * row_scale[side];
        #pragma unroll
        for (int distance = VECTORS; distance < FOLD * VECTORS; distance *= 2) { // lanes that have other units of a vector
            total += __shfl_xor_sync(0xffffffffu, total, distance);
        }
        int v = block * 4 + lane % 4;
        if (FOLD == 1 || v < VECTORS) {
            part[v * PART_ROW + side * 8 + lane / 4] = total;
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) integer_rows(
    const uint8* matrix, const scale_t* scales, const zero_t* zeros, VECTOR_PARAMETERS OUT_T* out,
    EPILOGUE_PARAMETERS const Params p)
{
    extern __shared__ __align__(16) unsigned char dynamic_shared[];
    int warp = int(threadIdx.x) / 32, team = warp / WARPS_K, member = int(threadIdx.x) % (32 * WARPS_K);
    int rank = CLUSTER > 1 ? int(blockIdx.x) % CLUSTER : 0, clusters = int(gridDim.x) / CLUSTER;
    int further = clusters * TEAMS;
    if (CLUSTER > 1) {
        announce_to_cluster();
    }
    hurry_next_grid();
    unsigned char* stages = dynamic_shared + warp * STAGES * STAGE_BYTES;
    int share = rank * WARPS_K + warp % WARPS_K;
    Ring ring{{matrix, scales, zeros}, BUNDLES * share / ALL_SHARES, BUNDLES * (share + 1) / ALL_SHARES};
    ring.seek(int(blockIdx.x) / CLUSTER + clusters * team);
    #pragma unroll 1
    for (int stage = 0; stage < STAGES; ++stage) {
        ring.fill(stages + stage * STAGE_BYTES, further, p);
    }
    wait_for_previous_grid();
    const Vectors vectors{
        reinterpret_cast<signed char*>(dynamic_shared + DIGITS_AT), reinterpret_cast<float2*>(dynamic_shared + UNITS_AT),
        BUNDLES * (rank * WARPS_K) / ALL_SHARES, BUNDLES * ((rank + 1) * WARPS_K) / ALL_SHARES};
#if PROLOGUE
    vector_t* computed = reinterpret_cast<vector_t*>(dynamic_shared + COMPUTED_AT);
    for (int v = int(threadIdx.x) / ROW_THREADS; v < VECTORS; v += THREADS / ROW_THREADS) {
        compute_row(v, int(threadIdx.x) % ROW_THREADS, computed, VECTOR_ARGUMENTS p);
    }
    __syncthreads();
    vectors.make(computed, COMMON);
#else
    vectors.make(vector, p.vector_row);
#endif
    __syncthreads();
    if (CLUSTER > 1) {
        wait_for_cluster();
    }
    float* parts = reinterpret_cast<float*>(dynamic_shared + PARTS_AT);
    float* gathered = reinterpret_cast<float*>(dynamic_shared + GATHERED_AT) + team * CLUSTER * SHARE * VALUES;
    int turn = 0, stage = 0;
    for (int base = int(blockIdx.x) / CLUSTER; base < p.tiles; base += further, turn ^= 1) {
        int tile = base + clusters * team;
        bool inside = tile < p.tiles;
        Fetched fetched[SHARE_EACH];
        #pragma unroll
        for (int index = 0; index < SHARE_EACH; ++index) {
            int own = member + index * 32 * WARPS_K;
            Item item(rank * SHARE + own, tile);
            if (inside && own < SHARE && item.v < VECTORS) {
                fetched[index] = fetch(0, item.v, item.at / PAIRS, EPILOGUE_ARGUMENTS p);
            }
        }
        float* part = parts + turn * BLOCK_WARPS * PART;
        if (inside) {
            multiply_tile(part + warp * PART, stages, stage, ring, vectors, tile, further, p);
        }
        if (WARPS_K > 1) {
            wait_for_team(team);
        } else {
            __syncwarp();
        }
        float* theirs = gathered + turn * TEAMS * CLUSTER * SHARE * VALUES;
        if (CLUSTER > 1) {
            #pragma unroll
            for (int index = 0; index < ITEMS_EACH; ++index) {
                int own = member + index * 32 * WARPS_K;
                Item item(own, tile);
                if (inside && own < ITEMS) {
                    float* target = theirs + (rank * SHARE + own % SHARE) * VALUES;
                    #pragma unroll
                    for (int u = 0; u < VALUES; ++u) {
                        store_in_cluster(target + u, own / SHARE, sum_of_warps(part, team, item.v, item.first + u));
                    }
                }
            }
            arrive_at_cluster();
            wait_for_cluster();
        }
        #pragma unroll
        for (int index = 0; index < SHARE_EACH; ++index) {
            int own = member + index * 32 * WARPS_K;
            Item item(rank * SHARE + own, tile);
            if (inside && own < SHARE && item.v < VECTORS) {
                float value[VALUES];
                #pragma unroll
                for (int u = 0; u < VALUES; ++u) {
                    value[u] = CLUSTER > 1 ? theirs[own * VALUES + u] : sum_of_warps(part, team, item.v, item.first + u);
                    #pragma unroll
                    for (int block = 1; block < CLUSTER; ++block) {
                        value[u] += theirs[(block * SHARE + own) * VALUES + u];
                    }
                }
                store(value, fetched[index], 0, item.v, item.at / PAIRS, out, EPILOGUE_ARGUMENTS p);
            }
        }
    }
    wait_for_copies<0>();
}
