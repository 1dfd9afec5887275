// Numbers of an octet as they enter a product: of four bits `Numbers::BASE_VALUE` more than the code.
__device__ __forceinline__ void
octet_in_product(uint (&pairs)[4], const uint (&word)[WORDS], int octet, uint zero, const Codebook& codebook)
{
#if BITS == 16
    #pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
        pairs[pair] = word[octet * 4 + pair];
    }
#else
    if (SHIFTED) {
        #pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
            pairs[pair] = and_or(word[octet % WORDS] >> pair * 4, 0x000f000fu, Numbers::BASE);
        }
    } else {
        octet_as_numbers(pairs, word, octet, zero, codebook);
    }
#endif
}

typedef float Sums[TILES][BLOCKS][4]; // in the register layout of mma.m16n8k16

// Adds the products of a span. `vectors` is the lane's part of the first vector there, `zero` what numbers have subtracted.
__device__ __forceinline__ void multiply_octets(
    Sums (&sum)[CHAINS], const uint (&word)[SIDES][WORDS], const vector_t* const (&vectors)[BLOCKS], int first,
    const uint (&zero)[SIDES], const Codebook& codebook)
{
    #pragma unroll
    for (int octet = 0; octet < OCTETS; ++octet) {
        Pack<uint, 4> x[BLOCKS];
        #pragma unroll
        for (int block = 0; block < BLOCKS; ++block) {
            x[block] = load_pack<4>(reinterpret_cast<const uint*>(vectors[block] + first + octet * 32));
        }
        #pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            uint upper[4], lower[4];
            octet_in_product(upper, word[tile * 2], octet, zero[tile * 2], codebook);
            octet_in_product(lower, word[tile * 2 + 1], octet, zero[tile * 2 + 1], codebook);
            #pragma unroll
            for (int side = 0; side < 2; ++side) {
                const uint numbers[4] = {upper[side * 2], lower[side * 2], upper[side * 2 + 1], lower[side * 2 + 1]};
                #pragma unroll
                for (int block = 0; block < BLOCKS; ++block) {
                    float(&own)[4] = sum[side % CHAINS][tile][block];
                    multiply_pairs(own, numbers, x[block][side * 2], x[block][side * 2 + 1]);
                }
            }
        }
    }
}

// The same where a group has a scale: `member` says which of the round's groups it is, `sums` what the vectors add up to.
__device__ __forceinline__ void multiply_group(
    Sums (&sum)[CHAINS], const uint (&word)[SIDES][WORDS], const vector_t* const (&vectors)[BLOCKS], int first,
    const Scales& held, int member, const float* sums, const Codebook& codebook)
{
    Sums own[CHAINS] = {};
    float scale[SIDES], zero[SIDES];
    uint subtracted[SIDES];
    #pragma unroll
    for (int side = 0; side < SIDES; ++side) {
        take_group(scale[side], zero[side], held, side, member);
        subtracted[side] = SHIFTED ? 0 : zero_pair(zero[side]);
    }
    multiply_octets(own, word, vectors, first, subtracted, codebook);
    #pragma unroll
    for (int block = 0; block < BLOCKS; ++block) {
        float2 added = make_float2(0.0f, 0.0f);
        if (SHIFTED) {
            added = *reinterpret_cast<const float2*>(sums + block * 8);
        }
        #pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            #pragma unroll
            for (int index = 0; index < 4; ++index) {
                int side = tile * 2 + index / 2;
                float value = own[0][tile][block][index] + (CHAINS == 2 ? own[CHAINS - 1][tile][block][index] : 0.0f);
                if (SHIFTED) {
                    value -= (zero[side] + float(Numbers::BASE_VALUE)) * (index % 2 ? added.y : added.x);
                }
                sum[0][tile][block][index] += scale[side] * value;
            }
        }
    }
}

// Brings vectors, of so many spans, into shared memory; zero behind the last element.
__device__ __forceinline__ void stage_vectors(vector_t* staged, const vector_t* vector, int first_span, const Params& p)
{
#if !PROLOGUE
    constexpr int ALL = STAGED_SPANS * SPAN / 8;
    #pragma unroll 4
    for (int index = int(threadIdx.x); index < VECTORS * ALL; index += THREADS) {
        int v = index / ALL, octet = index % ALL, k = first_span * SPAN + octet * 8;
        bool valid = k < COMMON;
        copy_chunk(staged + v * VECTOR_ROW + octet * 8, vector + (long long)v * p.vector_row + (valid ? k : 0), valid);
    }
    commit_copies();
    wait_for_copies<0>();
#else
    for (int k = COMMON + int(threadIdx.x) * 8; k < SPANS * SPAN; k += THREADS * 8) {
        for (int v = 0; v < VECTORS; ++v) {
            store_pack(staged + v * VECTOR_ROW + k, Pack<vector_t, 8>{});
        }
    }
#endif
}

// Brings the staged vectors to the order in which lanes read them, each span in its place, and adds up each span.
__device__ __forceinline__ void arrange_vectors(vector_t* staged, float* sums)
{
    constexpr int PLACES = 4 * OCTETS, AT_ONCE = 32 / PLACES, ALL = VECTORS * STAGED_SPANS;
    int lane = int(threadIdx.x) % 32, place = lane % PLACES;
    for (int base = int(threadIdx.x) / 32 * AT_ONCE; base < ALL; base += WARPS * AT_ONCE) {
        int index = base + lane / PLACES, v = index / STAGED_SPANS, span = index % STAGED_SPANS;
        bool inside = index < ALL;
        vector_t* at = staged + (inside ? v * VECTOR_ROW + span * SPAN : 0);
        Pack<vector_t, 8> given = {}, ordered;
        if (inside) {
            given = load_pack<8>(at + place * 8);
        }
        __syncwarp();
        float sum = 0.0f;
        #pragma unroll
        for (int u = 0; u < 8; ++u) {
            ordered[u] = given[place_in_octet(u)];
            sum += float(given[u]);
        }
        if (inside) {
            store_pack(at + (place % OCTETS * 4 + place / OCTETS) * 8, ordered);
        }
        if (SHIFTED) {
            sum = warp_sum<PLACES>(sum);
            if (inside && place == 0) {
                sums[span * SUM_ROW + v] = sum;
            }
        }
    }
}

// A thread's values of a tile's results: which rows of the result, and which neighbours.
struct Item {
    int v, first, at; // `at` is the first of VALUES neighbours, `first` its place in the tile

    __device__ __forceinline__ Item(int index, int tile)
    {
        v = index / (TILE / VALUES);
        first = index % (TILE / VALUES) * VALUES;
        at = tile * TILE + first;
    }
};

// Sums of a tile from their parts, always in the same order: those of a team's warps, and those of a cluster's blocks.
__device__ __forceinline__ float sum_of_warps(const float* parts, int v, int row)
{
    float sum = parts[v * PART_ROW + row];
    #pragma unroll
    for (int warp = 1; warp < WARPS_K; ++warp) {
        sum += parts[(warp * BLOCKS * 8 + v) * PART_ROW + row];
    }
    return sum;
}
__device__ __forceinline__ float sum_of_blocks(const float* gathered)
{
    float sum = gathered[0];
    #pragma unroll
    for (int block = 1; block < CLUSTER; ++block) {
        sum += gathered[block * SHARE * VALUES];
    }
    return sum;
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) few_rows(
    const uint8* matrix, const scale_t* scales, const zero_t* zeros, const codebook_t* entries, VECTOR_PARAMETERS OUT_T* out,
    EPILOGUE_PARAMETERS const Params p)
{
    extern __shared__ __align__(16) unsigned char dynamic_shared[];
    float* floats = reinterpret_cast<float*>(dynamic_shared);
    vector_t* staged = reinterpret_cast<vector_t*>(floats + VECTORS_AT);
    int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32, quad = lane % 4, team = warp / WARPS_K;
    int rank = CLUSTER > 1 ? int(blockIdx.x) % CLUSTER : 0, clusters = int(gridDim.x) / CLUSTER;
    int step = clusters * TEAMS, member = int(threadIdx.x) % TEAM;
    if (CLUSTER > 1) {
        announce_to_cluster();
    }
    if (HURRIES) {
        hurry_next_grid();
    }
    if (!MATRIX_CONSTANT) {
        wait_for_previous_grid();
    }
    Codebook codebook;
    codebook.load(entries);
    int first_span = (rank * WARPS_K + warp % WARPS_K) * SPANS_EACH;
    Stream stream{matrix, scales, zeros, first_span, quad};
    stream.seek(int(blockIdx.x) / CLUSTER + clusters * team, p);
    uint words[DEPTH][SIDES][WORDS];
    Scales ahead;
    #pragma unroll
    for (int pass = 0; pass < DEPTH; ++pass) {
        stream.load(words[pass], pass);
    }
    stream.load(ahead, p);
    stream.advance(step, p);
    if (MATRIX_CONSTANT) {
        wait_for_previous_grid();
    }
    int staged_first = WHOLE_VECTORS ? 0 : rank * WARPS_K * SPANS_EACH;
#if PROLOGUE
    for (int v = int(threadIdx.x) / ROW_THREADS; v < VECTORS; v += THREADS / ROW_THREADS) {
        compute_row(v, int(threadIdx.x) % ROW_THREADS, staged + v * (VECTOR_ROW - COMMON), VECTOR_ARGUMENTS p);
    }
    stage_vectors(staged, nullptr, 0, p);
#else
    stage_vectors(staged, vector, staged_first, p);
#endif
    __syncthreads();
    if (!NUMBERS) {
        arrange_vectors(staged, floats + SUMS_AT);
        __syncthreads();
    }
    const vector_t* vectors[BLOCKS];
    #pragma unroll
    for (int block = 0; block < BLOCKS; ++block) { // columns behind the last vector have another one's numbers, unread
        int v = block * 8 + lane / 4;
        vectors[block] = staged + (v < VECTORS ? v : 0) * VECTOR_ROW + (first_span - staged_first) * SPAN + quad * 8;
    }
    const float* sums = floats + SUMS_AT + (first_span - staged_first) * SUM_ROW + quad * 2;
    if (CLUSTER > 1) {
        wait_for_cluster();
    }
    int turn = 0;
    for (int base = int(blockIdx.x) / CLUSTER; base < p.tiles; base += step, turn ^= 1) {
        int tile = base + clusters * team;
        Sums sum[CHAINS] = {};
        Fetched fetched[SHARE_EACH];
        float row_scale[SHARE_EACH][VALUES];
        #pragma unroll
        for (int index = 0; index < SHARE_EACH; ++index) {
            int own = member + index * TEAM;
            Item item(rank * SHARE + own, tile);
            if (own < SHARE && item.v < VECTORS && item.at < p.outputs && tile < p.tiles) {
                fetched[index] = fetch(0, item.v, item.at / PAIRS, EPILOGUE_ARGUMENTS p);
                #pragma unroll
                for (int u = 0; u < VALUES; ++u) {
                    int limited = item.at + u < p.outputs ? item.at + u : p.outputs - 1;
                    row_scale[index][u] = ROW_SCALES ? float(scales[(long long)(limited / ROWS) * p.scale_row]) : 1.0f;
                }
            }
        }
        #pragma unroll 1
        for (int round = 0; round < ROUNDS; ++round) {
            Scales held = ahead;
            stream.settle(held, round);
            stream.load(ahead, p);
            #pragma unroll
            for (int pass = 0; pass < DEPTH; ++pass) {
                int own = round * DEPTH + pass;
                if (EVEN || own < SPANS_EACH && first_span + own < SPANS) {
                    if (GROUPED) {
                        int group = RATIO == 1 ? pass : (first_span + own) / RATIO - stream.group_at(round);
                        multiply_group(
                            sum, words[pass], vectors, own * SPAN, held, group, sums + own * SUM_ROW, codebook);
                    } else {
                        uint zero[SIDES];
                        #pragma unroll
                        for (int side = 0; side < SIDES; ++side) {
                            zero[side] = NUMBERS ? 0 : zero_pair(float(ZERO));
                        }
                        multiply_octets(sum, words[pass], vectors, own * SPAN, zero, codebook);
                    }
                }
                stream.load(words[pass], pass);
            }
            stream.advance(step, p);
        }
        float* part = floats + PARTS_AT + turn % TURNS * PART;
        float* mine = part + warp * BLOCKS * 8 * PART_ROW + quad * 2 * PART_ROW + lane / 4;
        #pragma unroll
        for (int found = 0; found < TILES * BLOCKS * 4; ++found) {
            int at = found / (BLOCKS * 4), block = found / 4 % BLOCKS, index = found % 4;
            float other = CHAINS == 2 && !GROUPED ? sum[CHAINS - 1][at][block][index] : 0.0f;
            mine[(block * 8 + index % 2) * PART_ROW + at * 16 + index / 2 * 8] = sum[0][at][block][index] + other;
        }
        if (WARPS_K > 1) {
            __syncthreads();
        } else {
            __syncwarp();
        }
        const float* of_team = part + team * WARPS_K * BLOCKS * 8 * PART_ROW;
        float* gathered = floats + GATHERED_AT + turn * GATHERED;
        if (CLUSTER > 1) {
            #pragma unroll
            for (int index = 0; index < ITEMS_EACH; ++index) {
                int own = member + index * TEAM;
                if (own < ITEMS) {
                    Item item(own, tile);
                    float* target = gathered + (rank * SHARE + own % SHARE) * VALUES;
                    #pragma unroll
                    for (int u = 0; u < VALUES; ++u) {
                        store_in_cluster(target + u, own / SHARE, sum_of_warps(of_team, item.v, item.first + u));
                    }
                }
            }
            arrive_at_cluster();
            wait_for_cluster();
        }
        #pragma unroll
        for (int index = 0; index < SHARE_EACH; ++index) {
            int own = member + index * TEAM;
            Item item(rank * SHARE + own, tile);
            if (own < SHARE && item.v < VECTORS && item.at < p.outputs && tile < p.tiles) {
                float value[VALUES];
                #pragma unroll
                for (int u = 0; u < VALUES; ++u) {
                    value[u] = CLUSTER > 1 ? sum_of_blocks(gathered + own * VALUES + u)
                                           : sum_of_warps(of_team, item.v, item.first + u);
                    value[u] *= row_scale[index][u];
                }
                store(value, fetched[index], 0, item.v, item.at / PAIRS, out, EPILOGUE_ARGUMENTS p);
            }
        }
        if (TURNS == 1 && CLUSTER == 1 && WARPS_K > 1) { // a cluster's blocks have read theirs when all have arrived
            __syncthreads();
        } else if (TURNS == 1 && WARPS_K == 1) {
            __syncwarp();
        }
    }
}
