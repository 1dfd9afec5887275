// Products of a few rows by a matrix in codes that is read once, on tensor cores for integers:
// result[v, o] = sum of vector[v, k] * scale(o, k) * (code(o, k) - zero(o, k)).
// Codes of a byte are multiplied as they lie, those of four bits after two of them have been put apart. A vector's
// numbers are two bytes, two columns of a product; with few vectors the columns are FOLD units, each of which has zeros
// where the others have numbers. So sums of a unit are exact. WARPS_K warps of each of CLUSTER blocks share a tile of
// 16 rows; the first steps of their codes are on their way before the grid ahead of this one has finished. Grid:
// clusters with tiles in turns in x.
constexpr int BLOCKS = FOLD > 1 ? 1 : (VECTORS + 3) / 4; // of eight columns
constexpr int CHAINS = FOLD > 1 ? 2 : 1;                 // of products that do not wait for each other
constexpr int PART_ROW = TILE + 4, PART = BLOCKS * 4 * PART_ROW; // of a warp
constexpr int VALUES = STORE_SIZE * PAIRS, ITEMS = TILE / VALUES * VECTORS, TEAM = 32 * WARPS_K;
constexpr int SHARE = (ITEMS + CLUSTER - 1) / CLUSTER; // of a tile's items, which a block of a cluster stores
constexpr int ITEMS_EACH = (ITEMS + TEAM - 1) / TEAM, SHARE_EACH = (SHARE + TEAM - 1) / TEAM;
constexpr int GATHERED = CLUSTER > 1 ? CLUSTER * SHARE * VALUES : 0; // floats that a team gets from a cluster's blocks
constexpr int DIGITS_AT = BLOCK_WARPS * STAGES * STAGE_BYTES, UNITS_AT = DIGITS_AT + 2 * VECTORS * DIGIT_ROW;
constexpr int PARTS_AT = UNITS_AT + VECTORS * BLOCK_BUNDLES * 32, GATHERED_AT = PARTS_AT + 2 * BLOCK_WARPS * PART * 4;
constexpr int COMPUTED_AT = GATHERED_AT + (2 * TEAMS * GATHERED * 4 + 15) / 16 * 16;
static_assert(TILE % VALUES == 0, "stores take whole tiles");

typedef TensorCores<PairOfCodes<code_t>> Integers;

// A lane's sums: of two rows of a tile for each block of columns.
struct Sums {
    float at[BLOCKS][2];
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
    if (WARPS_K == 1) {
        __syncwarp();
    } else {
        asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "n"(TEAM) : "memory");
    }
}

// A tile's sums in this warp's part of k, by rows of the parts.
__device__ __forceinline__ void multiply_tile(
    float* part, unsigned char* stages, int& stage, Ring& ring, const Vectors& vectors, int tile, int further,
    const Params& p)
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
        for (int distance = VECTORS; distance < FOLD * VECTORS; distance *= 2) { // from lanes that have other units
            total += __shfl_xor_sync(0xffffffffu, total, distance);
        }
        int v = block * 4 + lane % 4;
        if (FOLD == 1 || v < VECTORS) {
            part[v * PART_ROW + side * 8 + lane / 4] = total;
        }
    }
}

// Sends each block of the cluster its share of a tile's sums, by the threads of a team.
__device__ __forceinline__ void send_sums(float* gathered, const float* part, int team, int rank)
{
    #pragma unroll
    for (int index = 0; index < ITEMS_EACH; ++index) {
        int own = int(threadIdx.x) % TEAM + index * TEAM;
        Item item(own, 0);
        if (own < ITEMS) {
            float* target = gathered + (rank * SHARE + own % SHARE) * VALUES;
            #pragma unroll
            for (int u = 0; u < VALUES; ++u) {
                store_in_cluster(target + u, own / SHARE, sum_of_warps(part, team, item.v, item.first + u));
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) integer_rows(
    const uint8* matrix, const scale_t* scales, const zero_t* zeros, VECTOR_PARAMETERS OUT_T* out,
    EPILOGUE_PARAMETERS const Params p)
{
    extern __shared__ __align__(16) unsigned char dynamic_shared[];
    int warp = int(threadIdx.x) / 32, team = warp / WARPS_K;
    int rank = CLUSTER > 1 ? int(blockIdx.x) % CLUSTER : 0, clusters = int(gridDim.x) / CLUSTER;
    int further = clusters * TEAMS, share = rank * WARPS_K + warp % WARPS_K;
    if (CLUSTER > 1) {
        announce_to_cluster();
    }
    hurry_next_grid();
    unsigned char* stages = dynamic_shared + warp * STAGES * STAGE_BYTES;
    constexpr int SHARES = CLUSTER * WARPS_K;
    Ring ring{{matrix, scales, zeros}, BUNDLES * share / SHARES, BUNDLES * (share + 1) / SHARES};
    ring.seek(int(blockIdx.x) / CLUSTER + clusters * team);
    #pragma unroll 1
    for (int stage = 0; stage < STAGES; ++stage) {
        ring.fill(stages + stage * STAGE_BYTES, further, p);
    }
    wait_for_previous_grid();
    const Vectors vectors{
        reinterpret_cast<signed char*>(dynamic_shared + DIGITS_AT),
        reinterpret_cast<float2*>(dynamic_shared + UNITS_AT),
        BUNDLES * (rank * WARPS_K) / SHARES,
        BUNDLES * ((rank + 1) * WARPS_K) / SHARES};
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
    int turn = 0, stage = 0;
    for (int base = int(blockIdx.x) / CLUSTER; base < p.tiles; base += further, turn ^= 1) {
        int tile = base + clusters * team;
        bool inside = tile < p.tiles;
        float* part = reinterpret_cast<float*>(dynamic_shared + PARTS_AT) + turn * BLOCK_WARPS * PART;
        float* gathered = reinterpret_cast<float*>(dynamic_shared + GATHERED_AT) + (turn * TEAMS + team) * GATHERED;
        Fetched fetched[SHARE_EACH];
        #pragma unroll
        for (int index = 0; index < SHARE_EACH; ++index) {
            int own = int(threadIdx.x) % TEAM + index * TEAM;
            Item item(rank * SHARE + own, tile);
            if (inside && own < SHARE && item.v < VECTORS) {
                fetched[index] = fetch(0, item.v, item.at / PAIRS, EPILOGUE_ARGUMENTS p);
            }
        }
        if (inside) {
            multiply_tile(part + warp * PART, stages, stage, ring, vectors, tile, further, p);
        }
        wait_for_team(team);
        if (CLUSTER > 1) {
            if (inside) {
                send_sums(gathered, part, team, rank);
            }
            arrive_at_cluster();
            wait_for_cluster();
        }
        #pragma unroll
        for (int index = 0; index < SHARE_EACH; ++index) {
            int own = int(threadIdx.x) % TEAM + index * TEAM;
            Item item(rank * SHARE + own, tile);
            if (inside && own < SHARE && item.v < VECTORS) {
                float value[VALUES];
                #pragma unroll
                for (int u = 0; u < VALUES; ++u) {
                    int place = own * VALUES + u;
                    value[u] = CLUSTER > 1 ? gathered[place] : sum_of_warps(part, team, item.v, item.first + u);
                    #pragma unroll
                    for (int block = 1; block < CLUSTER; ++block) { // always in the same order
                        value[u] += gathered[block * SHARE * VALUES + place];
                    }
                }
                store(value, fetched[index], 0, item.v, item.at / PAIRS, out, EPILOGUE_ARGUMENTS p);
            }
        }
    }
    wait_for_copies<0>();
}
