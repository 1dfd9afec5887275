// Products of 2 to 16 vectors by a matrix in codes that is read once, on tensor cores: result[v, o] = sum of vector[v,
// k] * scale(o, k) * (code(o, k) - zero(o, k)). The matrix is the operand of 16 rows, vectors are its columns, in
// groups of eight; k is permuted alike for both operands. WARPS_K warps share a tile of 16 rows, and CLUSTER blocks
// share k; the first steps of a warp's codes are copied before the grid ahead of this one has finished. Grid: clusters
// with tiles in turns in x.
constexpr int GROUPS_OF_COLUMNS = (VECTORS + 7) / 8, COLUMNS = 8 * GROUPS_OF_COLUMNS;
constexpr int PART_ROW = TILE + 4, PART = BLOCK_WARPS * COLUMNS * PART_ROW, TEAM = 32 * WARPS_K;
constexpr int VALUES = STORE_SIZE * PAIRS, ITEMS = TILE / VALUES * VECTORS, SHARE = (ITEMS + CLUSTER - 1) / CLUSTER;
constexpr int ITEMS_EACH = (ITEMS + TEAM - 1) / TEAM, SHARE_EACH = (SHARE + TEAM - 1) / TEAM;
constexpr int GATHERED = CLUSTER > 1 ? TEAMS * CLUSTER * SHARE * VALUES : 0; // floats that blocks send to one of them
constexpr int OCTETS = UNIT / 32, BUNDLE_CODES = 4 * UNIT; // an octet of codes for each of four lanes
constexpr int STAGED_BUNDLES = (BUNDLES + CLUSTER - 1) / CLUSTER;
constexpr int VECTOR_ROW = STAGED_BUNDLES * BUNDLE_CODES + (BITS == 4 ? 32 : 16); // neighbours begin in other banks
constexpr int VECTORS_AT = BLOCK_WARPS * STAGES * STAGE_BYTES, PARTS_AT = VECTORS_AT + VECTORS * VECTOR_ROW * 2;
constexpr int GATHERED_AT = PARTS_AT + 2 * PART * 4;
static_assert(TILE % VALUES == 0, "stores take whole tiles");
static_assert(!PROLOGUE || CLUSTER == 1, "blocks compute whole vectors");

typedef float Sums[GROUPS_OF_COLUMNS][4]; // in the register layout of mma.m16n8k16

// Vectors in shared memory, each octet in the order in which codes become numbers.
struct Vectors {
    vector_t* staged;
    int first; // of the elements that the block has

    __device__ __forceinline__ static void order(vector_t* target, const Pack<vector_t, 8>& given)
    {
        Pack<vector_t, 8> ordered;
        #pragma unroll
        for (int u = 0; u < 8; ++u) {
            ordered[u] = given[place_in_octet(u)];
        }
        store_pack(target, ordered);
    }

    // By all threads, from memory, or where they have been computed.
    __device__ __forceinline__ void stage(const vector_t* source, int source_row, int count) const
    {
        constexpr int AT_ONCE = 4; // so many loads wait for memory together
        int octets = count / 8, all = VECTORS * octets;
        #pragma unroll 1
        for (int base = int(threadIdx.x); base < all; base += AT_ONCE * THREADS) {
            Pack<vector_t, 8> given[AT_ONCE];
            #pragma unroll
            for (int each = 0; each < AT_ONCE; ++each) {
                int index = min(base + each * THREADS, all - 1), v = index / octets, octet = index % octets;
                given[each] = load_pack<8>(source + (long long)v * source_row + octet * 8);
            }
            #pragma unroll
            for (int each = 0; each < AT_ONCE; ++each) {
                int index = base + each * THREADS, v = index / octets, octet = index % octets;
                if (index < all) {
                    order(staged + v * VECTOR_ROW + octet * 8, given[each]);
                }
            }
        }
    }

    // The four pairs of a lane's octet in its column of a group of columns, at a place along k.
    __device__ __forceinline__ void load(uint (&pairs)[4], int group, int k) const
    {
        int lane = int(threadIdx.x) % 32, quad = lane % 4, column = group * 8 + lane / 4;
        const vector_t* row = staged + (column < VECTORS ? column : 0) * VECTOR_ROW + (k - first); // unread beyond
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
};

// Adds the products of a bundle, the first or the second of a step.
__device__ __forceinline__ void multiply_bundle(
    Sums& sum, const unsigned char* stage, const Vectors& vectors, const Codebook& codebook, int tile, int at,
    int second, const Params& p)
{
    int row = int(threadIdx.x) % 32 / 4;
    const Codes codes(stage, second);
    #pragma unroll
    for (int unit = 0; unit < 4; ++unit) {
        const Scales scales[2] = {
            Scales(stage, tile, row, at, second, unit, p), Scales(stage, tile, row + 8, at, second, unit, p)};
        uint zero[2] = {zero_pair(scales[0].zero), zero_pair(scales[1].zero)};
        Sums own = {};
        #pragma unroll
        for (int octet = unit * OCTETS; octet < (unit + 1) * OCTETS; ++octet) {
            uint number[2][4];
            #pragma unroll
            for (int side = 0; side < 2; ++side) {
                const uint word[2] = {
                    BITS == 4 ? codes.word[octet / 2][octet % 2 * 2 + side] : codes.word[octet % PAIRS_OF_CHUNKS][side],
                    codes.word[octet % PAIRS_OF_CHUNKS][2 + side]};
                octet_as_numbers(number[side], word, 0, zero[side], codebook);
            }
            #pragma unroll
            for (int group = 0; group < GROUPS_OF_COLUMNS; ++group) {
                uint x[4];
                vectors.load(x, group, at * BUNDLE_CODES + octet * 32);
                #pragma unroll
                for (int part = 0; part < 4; part += 2) {
                    const uint a[4] = {number[0][part], number[1][part], number[0][part + 1], number[1][part + 1]};
                    TensorCores<vector_t>::multiply(ONE_GROUP ? sum[group] : own[group], a, x[part], x[part + 1]);
                }
            }
        }
        #pragma unroll
        for (int index = 0; index < (ONE_GROUP ? 0 : GROUPS_OF_COLUMNS * 4); ++index) {
            sum[index / 4][index % 4] += scales[index % 4 / 2].scale * own[index / 4][index % 4];
        }
    }
}

// A tile's sums in this warp's part of k.
__device__ __forceinline__ void multiply_tile(
    float* part, unsigned char* stages, int& stage, Ring& ring, const Vectors& vectors, const Codebook& codebook,
    int tile, int further, const Params& p)
{
    int lane = int(threadIdx.x) % 32;
    Sums sum = {};
    float row_scale[2] = {1.0f, 1.0f};
    #pragma unroll 1
    for (int bundle = ring.first; bundle < ring.last; bundle += STEP) {
        unsigned char* codes = stages + stage * STAGE_BYTES;
        wait_for_copies<STAGES - 1>();
        __syncwarp();
        multiply_bundle(sum, codes, vectors, codebook, tile, bundle, 0, p);
        if (STEP == 2 && bundle + 1 < ring.last) {
            multiply_bundle(sum, codes, vectors, codebook, tile, bundle + 1, 1, p);
        }
        if (ONE_GROUP && bundle + STEP >= ring.last) {
            row_scale[0] = float(reinterpret_cast<const scale_t*>(codes + SCALES_AT)[lane / 4]);
            row_scale[1] = float(reinterpret_cast<const scale_t*>(codes + SCALES_AT)[lane / 4 + 8]);
        }
        __syncwarp(); // all lanes have read what is overwritten
        ring.fill(codes, further, p);
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
    float* own = part + lane % 4 * 2 * PART_ROW + lane / 4;
    #pragma unroll
    for (int index = 0; index < GROUPS_OF_COLUMNS * 4; ++index) {
        int group = index / 4, u = index % 4;
        own[(group * 8 + u % 2) * PART_ROW + u / 2 * 8] = sum[group][u] * row_scale[u / 2];
    }
}

// A thread's values of a tile's results: which vector, and the first of VALUES neighbours in the tile.
struct Item {
    int v, first;

    __device__ __forceinline__ Item(int index)
    {
        v = index / (TILE / VALUES);
        first = index % (TILE / VALUES) * VALUES;
    }
};

// The sum of a tile's result from those of a team's warps, or of a cluster's blocks, always in the same order.
__device__ __forceinline__ float sum_of_warps(const float* parts, const Item& item, int u)
{
    float sum = 0.0f;
    #pragma unroll
    for (int other = 0; other < WARPS_K; ++other) {
        sum += parts[(other * COLUMNS + item.v) * PART_ROW + item.first + u];
    }
    return sum;
}
__device__ __forceinline__ float sum_of_blocks(const float* gathered)
{
    float sum = 0.0f;
    #pragma unroll
    for (int block = 0; block < CLUSTER; ++block) {
        sum += gathered[block * SHARE * VALUES];
    }
    return sum;
}

// Waits for the other warps that share a tile.
__device__ __forceinline__ void wait_for_team(int team)
{
    if (WARPS_K == 1) {
        __syncwarp();
    } else {
        synchronize(team + 1, TEAM);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) few_codes(
    const uint8* matrix, const scale_t* scales, const zero_t* zeros, const codebook_t* entries,
    VECTOR_PARAMETERS OUT_T* out, EPILOGUE_PARAMETERS const Params p)
{
    extern __shared__ __align__(16) unsigned char dynamic_shared[];
    int warp = int(threadIdx.x) / 32, team = warp / WARPS_K, share = warp % WARPS_K, member = int(threadIdx.x) % TEAM;
    int rank = CLUSTER > 1 ? int(blockIdx.x) % CLUSTER : 0, clusters = int(gridDim.x) / CLUSTER;
    int first_tile = int(blockIdx.x) / CLUSTER, further = clusters * TEAMS;
    int first = BUNDLES * rank / CLUSTER, count = BUNDLES * (rank + 1) / CLUSTER - first; // bundles of this block
    if (CLUSTER > 1) {
        announce_to_cluster();
    }
    hurry_next_grid();
    unsigned char* stages = dynamic_shared + warp * STAGES * STAGE_BYTES;
    Ring ring{{matrix, scales, zeros}, first + count * share / WARPS_K, first + count * (share + 1) / WARPS_K};
    ring.seek(first_tile + clusters * team);
    #pragma unroll 1
    for (int stage = 0; stage < STAGES; ++stage) {
        ring.fill(stages + stage * STAGE_BYTES, further, p);
    }
    Codebook codebook;
    codebook.load(entries);
    wait_for_previous_grid();
    const Vectors vectors{reinterpret_cast<vector_t*>(dynamic_shared + VECTORS_AT), first * BUNDLE_CODES};
#if PROLOGUE
    for (int v = int(threadIdx.x) / ROW_THREADS; v < VECTORS; v += THREADS / ROW_THREADS) {
        compute_row(
            v, int(threadIdx.x) % ROW_THREADS, vectors.staged + v * (VECTOR_ROW - COMMON), VECTOR_ARGUMENTS p);
    }
    __syncthreads();
    vectors.stage(vectors.staged, VECTOR_ROW, COMMON);
#else
    vectors.stage(vector + vectors.first, p.vector_row, count * BUNDLE_CODES);
#endif
    __syncthreads();
    if (CLUSTER > 1) {
        wait_for_cluster();
    }
    int turn = 0, stage = 0;
    for (int base = first_tile; base < p.tiles; base += further, turn ^= 1) {
        int tile = base + clusters * team;
        bool inside = tile < p.tiles;
        float* parts = reinterpret_cast<float*>(dynamic_shared + PARTS_AT) + turn * PART;
        float* gathered = reinterpret_cast<float*>(dynamic_shared + GATHERED_AT) + turn * GATHERED;
        parts += team * WARPS_K * COLUMNS * PART_ROW;
        gathered += team * CLUSTER * SHARE * VALUES;
        Fetched fetched[SHARE_EACH];
        #pragma unroll
        for (int index = 0; index < SHARE_EACH; ++index) {
            int own = member + index * TEAM;
            Item item(rank * SHARE + own);
            if (inside && own < SHARE && item.v < VECTORS) {
                fetched[index] = fetch(0, item.v, (tile * TILE + item.first) / PAIRS, EPILOGUE_ARGUMENTS p);
            }
        }
        if (inside) {
            float* part = parts + share * COLUMNS * PART_ROW;
            multiply_tile(part, stages, stage, ring, vectors, codebook, tile, further, p);
        }
        wait_for_team(team);
        if (CLUSTER > 1) {
            #pragma unroll
            for (int index = 0; index < ITEMS_EACH; ++index) {
                int own = member + index * TEAM;
                if (inside && own < ITEMS) {
                    float* target = gathered + (rank * SHARE + own % SHARE) * VALUES;
                    #pragma unroll
                    for (int u = 0; u < VALUES; ++u) {
                        store_in_cluster(target + u, own / SHARE, sum_of_warps(parts, Item(own), u));
                    }
                }
            }
            arrive_at_cluster();
            wait_for_cluster();
        }
        #pragma unroll
        for (int index = 0; index < SHARE_EACH; ++index) {
            int own = member + index * TEAM;
            Item item(rank * SHARE + own);
            if (inside && own < SHARE && item.v < VECTORS) {
                float value[VALUES];
                #pragma unroll
                for (int u = 0; u < VALUES; ++u) {
                    value[u] = CLUSTER > 1 ? sum_of_blocks(gathered + own * VALUES + u) : sum_of_warps(parts, item, u);
                }
                store(value, fetched[index], 0, item.v, (tile * TILE + item.first) / PAIRS, out, EPILOGUE_ARGUMENTS p);
            }
        }
    }
    wait_for_copies<0>();
}
