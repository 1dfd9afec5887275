// Products of one vector by a matrix in codes that is read once, on tensor cores for integers:
// result[o] = sum of vector[k] * scale(o, k) * (code(o, k) - zero(o, k)).
// Codes of a byte are multiplied as they lie, those of four bits once pairs of them have been separated. A number of
// the vector is two bytes, and these are two columns of a product; four units take eight columns, each of which has
// zeros in the place of the other units. So there is a sum for each unit, and it is exact. WARPS_K warps share a tile
// of 16 rows; the first steps of their codes are copied before the grid ahead of this one has finished. Where a tile is
// HELD, these are all steps that a warp has. Grid: tiles in turns in x.
constexpr int PART_ROW = TILE + 4, PARTS = 2 * BLOCK_WARPS * PART_ROW; // a warp's sums; tiles take turns
constexpr int VALUES = STORE_SIZE * PAIRS, ITEMS = TILE / VALUES;
constexpr int SIDE_BY_SIDE = STAGES * STEP <= 8 ? STAGES * STEP : 2; // bundles without a branch between them
constexpr int SCALED_AT = BLOCK_WARPS * STAGES * STAGE_BYTES;
constexpr int DIGITS_AT = SCALED_AT + TEAMS * SCALED_TILES * SCALED_BYTES, UNITS_AT = DIGITS_AT + 2 * DIGIT_ROW;
constexpr int PARTS_AT = UNITS_AT + COMMON / UNIT * 8, COMPUTED_AT = PARTS_AT + PARTS * 4;
static_assert(TILE % VALUES == 0, "stores take whole tiles");

typedef TensorCores<PairOfCodes<code_t>> Integers;

// Eight neighbours of a vector in memory.
__device__ __forceinline__ float load_octet(const vector_t* source, float (&value)[8])
{
    Pack<vector_t, 8> given = load_pack<8>(source);
    #pragma unroll
    for (int u = 0; u < 8; ++u) {
        value[u] = float(given[u]);
    }
    return 0.0f;
}

// What a lane multiplies of a bundle, the first or the second of a step: codes, and digits of one of four units.
struct Bundle {
    Codes codes;
    Pack<uint, PRODUCTS * 2> x;

    __device__ __forceinline__ Bundle(const unsigned char* stage, const Vector& vector, int at, int second)
        : codes(stage, second)
    {
        int lane = int(threadIdx.x) % 32, quad = lane % 4, column = lane / 4; // as lanes have the second operand
        const signed char* digits = vector.digits + column % 2 * DIGIT_ROW + quad * (UNIT / 4);
        x = load_pack<PRODUCTS * 2>(reinterpret_cast<const uint*>(digits + (at * 4 + column / 2) * UNIT));
    }

    // Adds the products to a lane's sums of two rows.
    __device__ __forceinline__ void multiply(
        float (&sum)[2], const unsigned char* scaled, const Vector& vector, int at) const
    {
        int lane = int(threadIdx.x) % 32, quad = lane % 4, row = lane / 4, member = lane / 8;
        float product_sum[2][4]; // of two chains of products
        #pragma unroll
        for (int index = 0; index < 8; ++index) {
            product_sum[index / 4][index % 4] = index < 4 ? 0.0f : WHOLE_FLOATS;
        }
        #pragma unroll
        for (int unit = 0; unit < 4; ++unit) {
            #pragma unroll
            for (int product = 0; product < PRODUCTS; ++product) {
                uint a[4];
                codes.of_product(a, unit * PRODUCTS + product);
                int part = SPLIT ? product : product * 2, next = SPLIT ? 2 : 1;
                uint b0 = member == unit ? x[part] : 0, b1 = member == unit ? x[part + next] : 0;
                Integers::multiply(product_sum[(SPLIT ? product : unit) % 2], a, b0, b1);
            }
        }
        float2 own = vector.units[at * 4 + quad];
        #pragma unroll
        for (int side = 0; side < 2; ++side) {
            float number[2];
            #pragma unroll
            for (int digit = 0; digit < 2; ++digit) {
                int first = __float_as_int(product_sum[0][side * 2 + digit]);
                int other = __float_as_int(product_sum[1][side * 2 + digit]);
                number[digit] = __int_as_float((SPLIT ? first * 16 : first) + other) - WHOLE_FLOATS;
            }
            const Scales scales(scaled, row + side * 8, at, quad);
            float value = own.x * (256.0f * number[0] + number[1]);
            if (ZEROS || ZERO != 0) {
                value += scales.zero * own.y;
            }
            sum[side] += scales.scale * value;
        }
    }
};

// The sum of a tile's result from those of a team's warps, always in the same order.
__device__ __forceinline__ float sum_of_warps(const float* parts, int team, int row)
{
    float sum = 0.0f;
    #pragma unroll
    for (int other = 0; other < WARPS_K; ++other) {
        sum += parts[(team * WARPS_K + other) * PART_ROW + row];
    }
    return sum;
}

#if FACTOR
constexpr int FACTOR_PARTS = 4; // of a warp

// Leaves each warp's parts of their row's sum for all others.
__device__ __forceinline__ void leave_parts(float (&parts)[BLOCK_WARPS][FACTOR_PARTS], float part)
{
    #pragma unroll
    for (int distance = 16; distance >= FACTOR_PARTS; distance /= 2) {
        part += __shfl_xor_sync(0xffffffffu, part, distance);
    }
    if (threadIdx.x % 32 < FACTOR_PARTS) {
        parts[threadIdx.x / 32][threadIdx.x % 32] = part;
    }
}

// What all numbers of the vector are yet to be multiplied by.
__device__ __forceinline__ float factor_of(const float (&parts)[BLOCK_WARPS][FACTOR_PARTS])
{
    float sum[FACTOR_PARTS] = {};
    #pragma unroll
    for (int warp = 0; warp < BLOCK_WARPS; ++warp) {
        Pack<float, FACTOR_PARTS> found = load_pack<FACTOR_PARTS>(parts[warp]);
        #pragma unroll
        for (int each = 0; each < FACTOR_PARTS; ++each) {
            sum[each] += found[each];
        }
    }
    return row_factor((sum[0] + sum[1]) + (sum[2] + sum[3]));
}
#endif

// Waits for the other warps that share a tile.
__device__ __forceinline__ void wait_for_team(int team)
{
    if (WARPS_K == 1) {
        __syncwarp();
    } else {
        synchronize(team + 1, TEAM);
    }
}

// A tile's sums in this warp's part of k.
__device__ __forceinline__ void multiply_tile(
    float* part, unsigned char* stages, int& stage, const unsigned char* scaled, Ring& ring, const Vector& vector,
    int further, const Params& p)
{
    int lane = int(threadIdx.x) % 32;
    float sum[2] = {};
#if HELD // no step takes the place of another: a bundle is loaded while the one before is multiplied
    constexpr int ALWAYS = BUNDLES / WARPS_K; // bundles that each warp has; some have one more
    auto load = [&](int index) {
        return Bundle(stages + index / STEP * STAGE_BYTES, vector, ring.first + index, index % STEP);
    };
    wait_for_copies<0>();
    __syncwarp();
    Bundle next = load(0);
    #pragma unroll SIDE_BY_SIDE
    for (int index = 0; index < ALWAYS; ++index) {
        const Bundle own = next;
        if (index + 1 < ALWAYS) {
            next = load(index + 1);
        }
        own.multiply(sum, scaled, vector, ring.first + index);
    }
    if (BUNDLES % WARPS_K && ring.first + ALWAYS < ring.last) {
        load(ALWAYS).multiply(sum, scaled, vector, ring.first + ALWAYS);
    }
#else
    #pragma unroll 1
    for (int bundle = ring.first; bundle < ring.last; bundle += STEP) {
        unsigned char* codes = stages + stage * STAGE_BYTES;
        wait_for_copies<STAGES - 1>();
        __syncwarp();
        Bundle(codes, vector, bundle, 0).multiply(sum, scaled, vector, bundle);
        if (STEP == 2 && bundle + 1 < ring.last) {
            Bundle(codes, vector, bundle + 1, 1).multiply(sum, scaled, vector, bundle + 1);
        }
        __syncwarp(); // all lanes have read what is overwritten
        ring.fill(codes, further, p);
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
#endif
    #pragma unroll
    for (int side = 0; side < 2; ++side) {
        float total = warp_sum<4>(sum[side]); // of lanes that have other units
        int row = side * 8 + lane / 4;
        if (lane % 4 == 0) {
            part[row] = ONE_GROUP ? total * Scales::of_row(scaled, row, 0) : total;
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) integer_rows(
    const uint8* matrix, const scale_t* scales, const zero_t* zeros, VECTOR_PARAMETERS OUT_T* out,
    EPILOGUE_PARAMETERS const Params p)
{
    extern __shared__ __align__(16) unsigned char dynamic_shared[];
    int warp = int(threadIdx.x) / 32, team = warp / WARPS_K, share = warp % WARPS_K, member = int(threadIdx.x) % TEAM;
    int begin = int(blockIdx.x) + int(gridDim.x) * team, further = int(gridDim.x) * TEAMS;
    hurry_next_grid();
#if PROLOGUE
    ask_ahead(THREADS, VECTOR_ARGUMENTS p);
#endif
    auto pack_of = [&](int tile) { return (tile * TILE + member * VALUES) / PAIRS; };
    FetchedByColumn of_columns;
    if (COLUMNS_SETTLED && member < ITEMS && begin < p.tiles) {
        of_columns = fetch_by_column(0, 0, pack_of(begin), EPILOGUE_ARGUMENTS p);
    }
    unsigned char* stages = dynamic_shared + warp * STAGES * STAGE_BYTES;
    unsigned char* scaled = dynamic_shared + SCALED_AT + team * SCALED_TILES * SCALED_BYTES;
    Ring ring{{{matrix, scales, zeros}, BUNDLES * share / WARPS_K, BUNDLES * (share + 1) / WARPS_K}, scaled};
    ring.find_place();
    ring.seek_codes(begin);
    #pragma unroll 1
    for (int stage = 0; stage < STAGES; ++stage) {
        ring.fill(stages + stage * STAGE_BYTES, further, p);
        if (int(blockIdx.x) < PACED && stage + 1 < STAGES) { // what grids ahead wait for would come behind all of them
            wait_for_copies<0>();
        }
    }
    wait_for_previous_grid();
    const Vector digits{
        reinterpret_cast<signed char*>(dynamic_shared + DIGITS_AT),
        reinterpret_cast<float2*>(dynamic_shared + UNITS_AT)};
#if PROLOGUE == 2
    float part = digits.make([&](int c, float(&value)[8]) {
        return row_octet(load_octet(0, c, VECTOR_ARGUMENTS p), 0, c, value, VECTOR_ARGUMENTS p);
    });
#else
#if PROLOGUE
    vector_t* vector = reinterpret_cast<vector_t*>(dynamic_shared + COMPUTED_AT);
    compute_row(0, int(threadIdx.x), vector, VECTOR_ARGUMENTS p);
    __syncthreads();
#endif
    digits.make([&](int c, float(&value)[8]) { return load_octet(vector + c, value); });
#endif
#if FACTOR
    __shared__ __align__(16) float row_parts[BLOCK_WARPS][FACTOR_PARTS];
    leave_parts(row_parts, part);
#endif
    wait_for_copies<STAGES - 1>(); // the first tile's scales, which all of a team copy
    __syncthreads();
    int turn = 0, stage = 0, slot = 0;
    for (int tile = begin; tile < p.tiles; tile += further, turn ^= 1, slot = next_scaled(slot)) {
        float* parts = reinterpret_cast<float*>(dynamic_shared + PARTS_AT) + turn * BLOCK_WARPS * PART_ROW;
        int at = pack_of(tile);
        Fetched fetched;
        if (member < ITEMS) {
            if (!COLUMNS_SETTLED || tile != begin) {
                of_columns = fetch_by_column(0, 0, at, EPILOGUE_ARGUMENTS p);
            }
            fetched = Fetched{
                fetch_by_row(0, 0, at, EPILOGUE_ARGUMENTS p), of_columns,
                fetch_by_element(0, 0, at, EPILOGUE_ARGUMENTS p)};
        }
        if (WARPS_K > 1 && tile != begin) {
            wait_for_copies<STAGES - 1>();
            wait_for_team(team);
        }
        const unsigned char* own = scaled + slot * SCALED_BYTES;
        multiply_tile(parts + warp * PART_ROW, stages, stage, own, ring, digits, further, p);
        wait_for_team(team);
        if (member < ITEMS) {
#if FACTOR
            const float factor = factor_of(row_parts); // of the vector's row: few threads need it, and not before
#else
            const float factor = 1.0f;
#endif
            float value[VALUES];
            #pragma unroll
            for (int u = 0; u < VALUES; ++u) {
                value[u] = sum_of_warps(parts, team, member * VALUES + u) * factor;
            }
            store(value, fetched, 0, 0, at, out, EPILOGUE_ARGUMENTS p);
        }
    }
    wait_for_copies<0>();
}
