// Products of 2 to 16 vectors by a matrix in codes that is read once, on tensor cores: result[v, o] = sum of vector[v,
// k] * scale(o, k) * (code(o, k) - zero(o, k)). The matrix is the operand of 16 rows, vectors are its columns, in
// groups of eight; k is permuted alike for both operands. WARPS_K warps share a tile of 16 rows, and CLUSTER blocks
// share k; the first steps of a warp's codes are copied before the grid ahead of this one has finished. Grid: clusters
// with tiles in turns in x.
constexpr int CHAINS = !ONE_GROUP && BLOCK_WARPS >= 16 ? 1 : 2; // of products; in many warps one may wait for another
constexpr int STEPS = ((STAGED_BUNDLES + WARPS_K - 1) / WARPS_K + STEP - 1) / STEP; // of a warp in a tile, at the most
constexpr bool HELD = TURNS == 1 && STEPS <= STAGES;                                // no step takes another's place
constexpr float NUMBER_UNIT = AS_THEY_ARE ? SUBNORMAL_UNIT : 1.0f;

// Steps of codes that a warp asks for ahead of the wait for vectors, and not behind its loads of these. What a warp loads
// comes behind the codes that it has asked for: of several steps only warps without vectors to make ask ahead, and where
// all copy some, half of them. Whole rows that are computed first take so long that all do; and PACED blocks, which begin
// long ahead, have as much time as all steps but the last one take.
__device__ __forceinline__ int steps_ahead(int warp)
{
    bool has_time = PROLOGUE == 2 ? warp / SPLIT >= VECTORS : PROLOGUE || warp < BLOCK_WARPS / 2;
    return PACED ? STAGES - 1 : STAGES == 1 || has_time ? STAGES : 0;
}

// What the chains of a group of columns have added up.
__device__ __forceinline__ float sum_of_chains(const Sums (&chain)[CHAINS], int group, int u)
{
    return CHAINS == 2 ? chain[0][group][u] + chain[CHAINS - 1][group][u] : chain[0][group][u];
}

// Adds the products of a bundle's unit, times the scales of two rows, to their sums.
__device__ __forceinline__ void add_unit(Sums& sum, const Sums (&own)[CHAINS], const Scales (&scales)[2], int unit)
{
    #pragma unroll
    for (int index = 0; index < GROUPS_OF_COLUMNS * 4; ++index) {
        int group = index / 4, u = index % 4;
        sum[group][u] += scales[u / 2].scale(unit) * sum_of_chains(own, group, u);
    }
}

// Where a lane finds what it multiplies, codes and scales in the warp's first stage, and leaves its sums. It is found
// ahead of the wait for the grid ahead: everybody waits for what is computed behind that.
struct Places {
    unsigned char* stages;
    int first; // of the elements of vectors that the block has
    PlaceOfCodes codes;
    PlacesOfScales scales;
    PlacesOfVectors vectors;
    int sums;

    __device__ __forceinline__ Places(unsigned char* stages, const Vectors& vectors, const Params& p)
        : stages(stages), first(vectors.first), codes(shared_address(stages)), scales(p), vectors(vectors.staged)
    {
        sums = int(threadIdx.x) % 4 * 2 * PART_ROW + int(threadIdx.x) % 32 / 4;
        settle(codes.first);
        settle(codes.place);
        settle(sums);
    }
};

// Adds the products of a bundle, the first or the second of a step. A pair of chunks is loaded while the one before is
// multiplied.
__device__ __forceinline__ void multiply_bundle(
    Sums (&sum)[CHAINS], const Places& places, int stage, const Codebook& codebook, int at, int second, const Params& p)
{
    constexpr int PAIR_OCTETS = BITS == 4 ? 2 : 1;
    const unsigned char* own_stage = places.stages + stage * STAGE_BYTES;
    const PlaceOfCodes place = places.codes.moved(stage * STAGE_BYTES);
    uint codes[4], next[4];
    place.load(next, second, 0);
    const Scales scales[2] = {
        {own_stage, places.scales, 0, at, second, p}, {own_stage, places.scales, 8, at, second, p}};
    #pragma unroll
    for (int unit = 0; unit < 4; ++unit) {
        uint offset[2] = {scales[0].offset(unit), scales[1].offset(unit)};
        Sums own[CHAINS] = {};
        #pragma unroll
        for (int octet = unit * OCTETS; octet < (unit + 1) * OCTETS; ++octet) {
            if (octet % PAIR_OCTETS == 0) {
                #pragma unroll
                for (int word = 0; word < 4; ++word) {
                    codes[word] = next[word];
                }
                if (octet / PAIR_OCTETS + 1 < PAIRS_OF_CHUNKS) {
                    place.load(next, second, octet / PAIR_OCTETS + 1);
                }
            }
            uint number[2][4];
            #pragma unroll
            for (int side = 0; side < 2; ++side) {
                const uint word[2] = {codes[BITS == 4 ? octet % 2 * 2 + side : side], codes[2 + side]};
                octet_in_units(number[side], word, offset[side], codebook);
            }
            #pragma unroll
            for (int group = 0; group < GROUPS_OF_COLUMNS; ++group) {
                uint x[4];
                places.vectors.load(x, group, (at * BUNDLE_CODES - places.first) + octet * 32);
                #pragma unroll
                for (int part = 0; part < 4; part += 2) {
                    const uint a[4] = {number[0][part], number[1][part], number[0][part + 1], number[1][part + 1]};
                    Sums& chain = ONE_GROUP ? sum[part / 2 % CHAINS] : own[part / 2 % CHAINS];
                    TensorCores<vector_t>::multiply(chain[group], a, x[part], x[part + 1]);
                }
            }
        }
        if (!ONE_GROUP) {
            add_unit(sum[unit % CHAINS], own, scales, unit);
        }
    }
}

// Makes the vectors ready, by all threads; a barrier is to follow. Each calls `meanwhile` once, while it waits for the
// first of its loads, if any.
template <typename Meanwhile>
__device__ __forceinline__ void make_vectors(
    const Vectors& vectors, const CopiedOctets& copied, float (&row_parts)[VECTORS][SPLIT], Meanwhile meanwhile,
    VECTOR_PARAMETERS const Params& p)
{
#if PROLOGUE == 2
    auto load = [&](int v, int place) { return load_octet(v, place, VECTOR_ARGUMENTS p); };
    auto compute = [&](const RowOctet& loaded, int v, int place, Octet& made) {
        float value[8], part = row_octet(loaded, v, place, value, VECTOR_ARGUMENTS p);
        Pack<bfloat, 8> left, right;
        if (loaded.are_products(left, right)) {
            multiply_octets(made, left, right);
            return part;
        }
        #pragma unroll
        for (int u = 0; u < 8; u += 2) {
            made[u / 2] = as_pair(vector_t(value[u]), vector_t(value[u + 1]));
        }
        return part;
    };
    vectors.compute(row_parts, load, compute, meanwhile);
#else
#if PROLOGUE
    for (int v = int(threadIdx.x) / ROW_THREADS; v < VECTORS; v += THREADS / ROW_THREADS) {
        compute_row(
            v, int(threadIdx.x) % ROW_THREADS, vectors.staged + v * (VECTOR_ROW - COMMON), VECTOR_ARGUMENTS p);
    }
    __syncthreads();
    const vector_t* rows = vectors.staged;
#else
    const vector_t* rows = vector;
#endif
    vectors.copy(rows, copied, meanwhile);
#endif
}

// A tile's sums in this warp's part of k.
__device__ __forceinline__ void multiply_tile(
    float* part, const Places& places, int& stage, Ring& ring, const Codebook& codebook, int further, const Params& p)
{
    Sums sum[CHAINS] = {};
    float row_scale[2] = {1.0f / NUMBER_UNIT, 1.0f / NUMBER_UNIT};
    if (HELD) {
        wait_for_copies<0>();
        __syncwarp();
    }
    #pragma unroll 1
    for (int bundle = ring.first; bundle < ring.last; bundle += STEP) {
        unsigned char* codes = places.stages + stage * STAGE_BYTES;
        if (!HELD) {
            wait_for_copies<STAGES - 1>();
            __syncwarp();
        }
        multiply_bundle(sum, places, stage, codebook, bundle, 0, p);
        if (STEP == 2 && bundle + 1 < ring.last) {
            multiply_bundle(sum, places, stage, codebook, bundle + 1, 1, p);
        }
        if (ONE_GROUP && bundle + STEP >= ring.last) {
            const scale_t* found = reinterpret_cast<const scale_t*>(codes + SCALES_AT) + threadIdx.x % 32 / 4;
            row_scale[0] = float(found[0]) / NUMBER_UNIT;
            row_scale[1] = float(found[8]) / NUMBER_UNIT;
        }
        if (!HELD) {
            __syncwarp(); // all lanes have read what is overwritten
            ring.fill(codes, further, p);
        }
        stage = stage + 1 == STAGES ? 0 : stage + 1;
        if (STEPS == 1) {
            break;
        }
    }
    if (IN_PLACE) { // all lanes have read what is overwritten
        __syncwarp();
    }
    float* own = part + places.sums;
    #pragma unroll
    for (int index = 0; index < GROUPS_OF_COLUMNS * 4; ++index) {
        int group = index / 4, u = index % 4;
        own[(group * 8 + u % 2) * PART_ROW + u / 2 * 8] = sum_of_chains(sum, group, u) * row_scale[u / 2];
    }
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

// One block a multiprocessor has registers enough to ask for all that a vector is made of at once.
extern "C" __global__ void __launch_bounds__(THREADS, 1) few_codes(
    const uint8* matrix, const scale_t* scales, const zero_t* zeros, const codebook_t* entries,
    VECTOR_PARAMETERS OUT_T* out, EPILOGUE_PARAMETERS const Params p)
{
    extern __shared__ __align__(16) unsigned char dynamic_shared[];
    int warp = int(threadIdx.x) / 32, team = warp / WARPS_K, share = warp % WARPS_K, member = int(threadIdx.x) % TEAM;
    int rank = CLUSTER > 1 ? int(blockIdx.x) % CLUSTER : 0, clusters = int(gridDim.x) / CLUSTER;
    int first_tile = int(blockIdx.x) / CLUSTER, further = clusters * TEAMS;
    int first = BUNDLES * rank / CLUSTER, count = BUNDLES * (rank + 1) / CLUSTER - first; // bundles of this block
    settle(team); // quotients
    settle(share);
    settle(member);
    if (CLUSTER > 1) {
        announce_to_cluster();
    }
    hurry_next_grid();
#if PROLOGUE
    ask_ahead(THREADS, VECTOR_ARGUMENTS p);
#endif
    unsigned char* stages = dynamic_shared + warp * STAGES * STAGE_BYTES;
    Ring ring{{{matrix, scales, zeros}, first + count * share / WARPS_K, first + count * (share + 1) / WARPS_K}};
    ring.find_places();
    settle(ring.first);
    settle(ring.last);
    ring.seek(ring.first < ring.last ? first_tile + clusters * team : p.tiles); // a warp may have nothing
    int ahead = steps_ahead(warp);
    settle(ahead); // a constant would have the compiler put loads of vectors behind the codes that are to follow them
    if (ahead > 0) {
        ring.fill<PACED>(stages, further, p);
    }
    const Vectors vectors{reinterpret_cast<vector_t*>(dynamic_shared + VECTORS_AT), first * BUNDLE_CODES};
    const CopiedOctets copied(vectors.first, count * BUNDLE_CODES, PROLOGUE ? VECTOR_ROW : p.vector_row);
    const Places places(stages, vectors, p);
    Results results(rank, member);
    #pragma unroll 1
    for (int stage = 1; stage < ahead; ++stage) {
        if (PACED) {
            wait_for_copies<2>();
        }
        ring.fill<PACED>(stages + stage * STAGE_BYTES, further, p);
    }
    if (COLUMNS_SETTLED) {
        results.fetch_columns(first_tile + clusters * team, EPILOGUE_ARGUMENTS p);
    }
    Codebook codebook;
    codebook.load(entries);
    wait_for_previous_grid();
    __shared__ float row_parts[VECTORS][SPLIT]; // of the sums by which rows have a factor
    auto ask_for_others = [&] {
        #pragma unroll 1
        for (int stage = ahead; stage < STAGES; ++stage) {
            ring.fill(stages + stage * STAGE_BYTES, further, p);
        }
    };
    make_vectors(vectors, copied, row_parts, ask_for_others, VECTOR_ARGUMENTS p);
    __syncthreads();
    if (CLUSTER > 1) {
        wait_for_cluster();
    }
    int turn = 0, stage = 0;
    for (int base = first_tile; base < p.tiles; base += further, turn ^= 1) {
        int tile = base + clusters * team;
        float* parts = reinterpret_cast<float*>(dynamic_shared + PARTS_AT) + (IN_PLACE ? 0 : turn * PART);
        float* gathered = reinterpret_cast<float*>(dynamic_shared + GATHERED_AT) + turn * GATHERED;
        parts += team * WARPS_K * WARP_PART;
        gathered += team * CLUSTER * SHARE * VALUES;
        results.fetch(tile, COLUMNS_SETTLED && base == first_tile, EPILOGUE_ARGUMENTS p);
        if (tile < p.tiles) {
            float* part = parts + share * WARP_PART;
            multiply_tile(part, places, stage, ring, codebook, further, p);
        }
        wait_for_team(team);
        if (CLUSTER > 1) {
            results.send(gathered, parts, tile, p);
            arrive_at_cluster();
            wait_for_cluster();
        }
        results.store_all(gathered, parts, row_parts, tile, out, EPILOGUE_ARGUMENTS p);
        if (TURNS == 1) {
            break;
        }
    }
    wait_for_copies<0>();
}
