// Products of a matrix in packed codes with groups by up to 16 vectors: result[v, o] = sum of vector[v, k] * number(o,
// k). WARPS_K warps have 16 rows at a time, a tile, on tensor cores: four lanes read a row side by side, CHUNK codes
// each, a span; of a tile DEPTH spans are on their way, the first ones before the grid ahead of this one has finished.
// The columns of a product are the vectors once for each group of a span: where a lane's codes belong to another group,
// its vector is zero. So a span gives the sums of each group, which are multiplied by its scale. Grid: tiles, in turns,
// in x. Block: 256.
constexpr int THREADS = 256, WARPS = THREADS / 32, TILE = 16;
constexpr int TEAMS = WARPS / WARPS_K; // of warps that share a tile
constexpr int OCTETS = CHUNK / 8, SPAN = 4 * CHUNK, SPANS = (COMMON + SPAN - 1) / SPAN;
constexpr int PASSES = (SPANS + WARPS_K - 1) / WARPS_K, ROUNDS = (PASSES + DEPTH - 1) / DEPTH;
constexpr int CHUNK_BYTES = CHUNK * BITS / 8, WORDS = (CHUNK_BYTES + 3) / 4, ROW_BYTES = (COMMON * BITS + 7) / 8;
constexpr bool WHOLE = COMMON % SPAN == 0;
constexpr int SPAN_GROUPS = !ONE_GROUP && GROUP < SPAN ? SPAN / GROUP : 1;
constexpr int RATIO = GROUP < SPAN ? 1 : GROUP / SPAN; // spans of a group
constexpr int ALL_GROUPS = (COMMON + GROUP - 1) / GROUP;
constexpr int COLUMNS = VECTORS <= 2 ? 2 : VECTORS <= 4 ? 4 : VECTORS <= 8 ? 8 : 16; // for each group
constexpr int BLOCKS = (SPAN_GROUPS * COLUMNS + 7) / 8;                              // of eight columns
constexpr int PART_ROW = 20, TURNS = BLOCKS == 1 ? 2 : 1; // with two, tiles take turns, and wait once for each other
constexpr int PART = WARPS * BLOCKS * 8 * PART_ROW, PARTS = TURNS * PART;
constexpr int VALUES = STORE_SIZE * PAIRS, ITEMS = TILE / VALUES * VECTORS;
constexpr int ITEMS_EACH = (ITEMS + 32 * WARPS_K - 1) / (32 * WARPS_K);
constexpr int VECTOR_ROW = SPANS * SPAN + 32, STAGE_ROW = SPAN + 32; // elements; neighbours begin in other banks
constexpr int AHEAD = BLOCKS == 1 ? OCTETS : 1; // octets of the vectors in registers
static_assert(TILE % VALUES == 0, "stores take whole tiles");

// Loads the scale or bias of a group and keeps its bits as they are, so that nothing waits for the load before the
// value is used.
template <typename T>
__device__ __forceinline__ void load_element(uint& bits, const T* source, bool valid)
{
    if (sizeof(T) == 2) {
        unsigned short half_bits = (unsigned short)bits;
        asm volatile("{\n\t.reg .pred valid;\n\tsetp.ne.s32 valid, %2, 0;\n\t@valid ld.global.nc.u16 %0, [%1];\n\t}"
                     : "+h"(half_bits)
                     : "l"(source), "r"(int(valid)));
        bits = half_bits;
    } else {
        asm volatile("{\n\t.reg .pred valid;\n\tsetp.ne.s32 valid, %2, 0;\n\t@valid ld.global.nc.u32 %0, [%1];\n\t}"
                     : "+r"(bits)
                     : "l"(source), "r"(int(valid)));
    }
}

// A lane's codes of two rows of a tile, with their scales, zero points and biases.
struct Codes {
    uint word[2][WORDS];
    uint zero[2];
    uint scale[BLOCKS][2], bias[BLOCKS][2]; // of the groups of this lane's columns
};

struct Parts {
    const uint8* matrix;
    const scale_t* scales;
    const zero_t* zeros;
    const bias_t* biases;
};

// A team's place in the matrix: a tile, and which of its spans come next.
struct Stream {
    Parts from;
    int tile, round, team_warp, quad; // the lane's place in a row
    bool inside;                      // of the matrix
    const uint8* codes[2];            // of this lane's part of the next round's first span, and what belongs to it
    const scale_t* scales[2];
    const zero_t* zeros[2]; // of a row's first group
    const bias_t* biases[2];

    // The group that a block's columns of this lane are for, counted in the span; the last one for columns of none.
    __device__ __forceinline__ static int member_of(int block, int quad)
    {
        int member = (block * 8 + quad * 2) / COLUMNS;
        return member < SPAN_GROUPS ? member : SPAN_GROUPS - 1;
    }

    // Of a place along k.
    __device__ __forceinline__ static int group_at(int span, int quad)
    {
        int group = ONE_GROUP ? 0 : GROUP < SPAN ? span * SPAN_GROUPS + quad * SPAN_GROUPS / 4 : span / RATIO;
        return COMMON % SPAN == 0 || group < ALL_GROUPS ? group : ALL_GROUPS - 1;
    }

    __device__ __forceinline__ void seek(int place, const Params& p)
    {
        tile = place;
        round = 0;
        inside = place < p.tiles;
        #pragma unroll
        for (int side = 0; side < 2; ++side) {
            int wanted = tile * TILE + side * 8 + int(threadIdx.x) % 32 / 4;
            int row = wanted < p.outputs ? wanted : p.outputs - 1, shared_row = row / ROWS;
            codes[side] = from.matrix + (long long)row * p.matrix_row + (team_warp * 4 + quad) * CHUNK_BYTES;
            scales[side] = from.scales + (long long)shared_row * p.scale_row;
            zeros[side] = from.zeros + (long long)shared_row * p.zero_row;
            biases[side] = from.biases + (long long)shared_row * p.bias_row;
        }
    }

    __device__ __forceinline__ void advance(int step, const Params& p)
    {
        round += 1;
        if (round == ROUNDS) {
            seek(tile + step, p);
        } else {
            codes[0] += DEPTH * WARPS_K * 4 * CHUNK_BYTES;
            codes[1] += DEPTH * WARPS_K * 4 * CHUNK_BYTES;
        }
    }

    __device__ __forceinline__ void load(Codes& into, int pass)
    {
        int span = (round * DEPTH + pass) * WARPS_K + team_warp, begin = (span * 4 + quad) * CHUNK_BYTES;
        bool valid = inside && (SPANS % WARPS_K == 0 && PASSES % DEPTH == 0 || span < SPANS);
        #pragma unroll
        for (int side = 0; side < 2; ++side) {
            const uint8* source = codes[side] + pass * WARPS_K * 4 * CHUNK_BYTES;
            if (!WHOLE) {
                #pragma unroll
                for (int index = 0; index < WORDS; ++index) {
                    into.word[side][index] = 0;
                }
            }
            if (ACCESS >= 4) {
                #pragma unroll
                for (int first = 0; first < CHUNK_BYTES; first += ACCESS) {
                    bool known = valid && (WHOLE || begin + first < ROW_BYTES);
                    load_bits<ACCESS>(&into.word[side][first / 4], source + first, known);
                }
            } else {
                #pragma unroll
                for (int index = 0; index < WORDS; ++index) {
                    uint word = 0;
                    #pragma unroll
                    for (int first = index * 4; first < index * 4 + 4 && first < CHUNK_BYTES; first += ACCESS) {
                        uint part = 0;
                        load_bits<ACCESS>(&part, source + first, valid && begin + first < ROW_BYTES);
                        word |= part << first % 4 * 8;
                    }
                    into.word[side][index] = word;
                }
            }
        }
        int place = valid ? span : 0;
        if (ZEROS) {
            int group = group_at(place, quad) * ZERO_GROUP;
            #pragma unroll
            for (int side = 0; side < 2; ++side) {
                load_zero(into.zero[side], zeros[side], group);
            }
        }
        #pragma unroll
        for (int block = 0; block < (ONE_GROUP ? 0 : BLOCKS); ++block) {
            int group = (GROUP < SPAN ? place * SPAN_GROUPS : place / RATIO) + member_of(block, quad);
            group = COMMON % SPAN == 0 || group < ALL_GROUPS ? group : ALL_GROUPS - 1;
            #pragma unroll
            for (int side = 0; side < 2; ++side) {
                load_element(into.scale[block][side], scales[side] + group * SCALE_GROUP, valid);
                if (BIASES) {
                    load_element(into.bias[block][side], biases[side] + group * BIAS_GROUP, valid);
                }
            }
        }
    }

    // Packed zero points come with the bits around them; see `zero_in`.
    __device__ __forceinline__ static void load_zero(uint& zero, const zero_t* row, int group)
    {
        if (ZERO_BITS == 8) {
            zero = uint(int(row[group]));
        } else {
            const zero_t* source = row + group * ZERO_BITS / 8;
            zero = uint(source[0]);
            if (8 % ZERO_BITS != 0 && group * ZERO_BITS % 8 + ZERO_BITS > 8) {
                zero |= uint(source[1]) << 8;
            }
        }
    }
    __device__ __forceinline__ static float zero_in(uint bits, int span, int quad)
    {
        int first = group_at(span, quad) * ZERO_GROUP * ZERO_BITS % 8;
        return float(int(ZERO_BITS == 8 ? bits : bits >> first & ((1u << ZERO_BITS) - 1u)));
    }
};

// The vectors as the columns of this lane's products see them.
struct Columns {
    const vector_t* vector[BLOCKS]; // of the lane's column in each block, its part of the first span
    bool active[BLOCKS];

    // Four pairs of an octet; they stay zero where a column has no vector here.
    __device__ __forceinline__ void load(uint (&pairs)[4], int block, int span, int octet)
    {
#if STAGED
        uint place = shared_address(vector[block] + span * SPAN + octet * 32);
        asm volatile("{\n\t.reg .pred valid;\n\tsetp.ne.s32 valid, %5, 0;\n\t"
                     "@valid ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];\n\t}"
                     : "+r"(pairs[0]), "+r"(pairs[1]), "+r"(pairs[2]), "+r"(pairs[3])
                     : "r"(place), "r"(int(active[block])));
#else
        uint word[4] = {0, 0, 0, 0};
        if (active[block]) {
            Pack<uint, 4> part = load_pack<4>(reinterpret_cast<const uint*>(vector[block] + octet * 32));
            #pragma unroll
            for (int index = 0; index < 4; ++index) {
                word[index] = part[index];
            }
        }
        order_octet(pairs, word);
#endif
    }
};

__device__ __forceinline__ void multiply_span(
    float (&sum)[BLOCKS][4], const Codes& codes, Columns& columns, uint (&pairs)[AHEAD][BLOCKS][4], int span,
    const Codebook& codebook)
{
    float own[BLOCKS][4], other[BLOCKS][4], inputs[BLOCKS][4]; // of two chains of products
    #pragma unroll
    for (int block = 0; block < BLOCKS; ++block) {
        #pragma unroll
        for (int index = 0; index < 4; ++index) {
            own[block][index] = ONE_GROUP && !BIASES ? sum[block][index] : 0.0f;
            other[block][index] = inputs[block][index] = 0.0f;
        }
    }
    uint zero[2];
    #pragma unroll
    for (int side = 0; side < 2; ++side) {
        zero[side] = zero_pair(ZEROS ? Stream::zero_in(codes.zero[side], span, int(threadIdx.x) % 4) : float(ZERO));
    }
    #pragma unroll
    for (int octet = 0; octet < OCTETS; ++octet) {
        uint upper[4], lower[4];
        #pragma unroll
        for (int block = 0; block < (octet % AHEAD == 0 ? BLOCKS : 0); ++block) {
            #pragma unroll
            for (int next = octet; next < octet + AHEAD && next < OCTETS; ++next) {
                columns.load(pairs[next % AHEAD][block], block, span, next);
            }
        }
        octet_as_numbers(upper, codes.word[0], octet, zero[0], codebook);
        octet_as_numbers(lower, codes.word[1], octet, zero[1], codebook);
        #pragma unroll
        for (int half_octet = 0; half_octet < 2; ++half_octet) {
            int first = half_octet * 2;
            const uint numbers[4] = {upper[first], lower[first], upper[first + 1], lower[first + 1]};
            const uint ones[4] = {Numbers::ONE, Numbers::ONE, Numbers::ONE, Numbers::ONE};
            #pragma unroll
            for (int block = 0; block < BLOCKS; ++block) {
                const uint(&x)[4] = pairs[octet % AHEAD][block];
                multiply_pairs(half_octet && BLOCKS == 1 ? other[block] : own[block], numbers, x[first], x[first + 1]);
                if (BIASES) {
                    multiply_pairs(inputs[block], ones, x[first], x[first + 1]);
                }
            }
        }
    }
    #pragma unroll
    for (int block = 0; block < BLOCKS; ++block) {
        #pragma unroll
        for (int index = 0; index < 4; ++index) {
            if (BLOCKS == 1) {
                own[block][index] += other[block][index];
            }
            if (ONE_GROUP) {
                sum[block][index] = own[block][index];
            } else {
                float scale = element_of(codes.scale[block][index / 2], scale_t());
                sum[block][index] += scale * own[block][index];
                if (BIASES) {
                    sum[block][index] += element_of(codes.bias[block][index / 2], bias_t()) * inputs[block][index];
                }
            }
        }
    }
}

#if !STAGED
// A warp's spans of the vectors, which take turns in shared memory: the next one is on its way while one is multiplied.
struct VectorStream {
    vector_t* stages;
    int next, stage, team_warp;

    __device__ __forceinline__ void copy(const vector_t* vector, const Params& p)
    {
        constexpr int CHUNKS = VECTORS * SPAN / 8;
        int span = next * WARPS_K + team_warp, lane = int(threadIdx.x) % 32;
        #pragma unroll
        for (int first = 0; first < CHUNKS; first += 32) {
            int index = first + lane, v = index / (SPAN / 8), octet = index % (SPAN / 8), k = span * SPAN + octet * 8;
            if (CHUNKS % 32 == 0 || index < CHUNKS) {
                vector_t* row = stages + (stage * VECTORS + v) * STAGE_ROW;
                vector_t* target = row + (octet % OCTETS * 4 + octet / OCTETS) * 8;
                bool valid = k < COMMON;
                copy_chunk_cached(target, vector + (long long)v * p.vector_row + (valid ? k : 0), valid);
            }
        }
        commit_copies();
        next = next + 1 == ROUNDS * DEPTH ? 0 : next + 1;
        stage = (stage + 1) % STAGES;
    }
};
#endif

#if STAGED
// Vectors in the order in which lanes read them, zero behind the last element.
__device__ __forceinline__ void stage_vectors(vector_t* target, const vector_t* source, int source_row)
{
    constexpr int ALL = SPANS * SPAN / 8;
    for (int index = int(threadIdx.x); index < VECTORS * ALL; index += THREADS) {
        int v = index / ALL, octet = index % ALL, span = octet / (4 * OCTETS), place = octet % (4 * OCTETS);
        const vector_t* from = source + (long long)v * source_row + octet * 8;
        Pack<vector_t, 8> given, ordered;
        if (COMMON % 8 == 0 && VECTOR_PACKS) {
            given = Pack<vector_t, 8>{};
            if (octet * 8 < COMMON) {
                given = load_pack<8>(from);
            }
        } else {
            #pragma unroll
            for (int u = 0; u < 8; ++u) {
                given[u].bits = octet * 8 + u < COMMON ? from[u].bits : (unsigned short)0;
            }
        }
        #pragma unroll
        for (int u = 0; u < 8; ++u) {
            ordered[u] = given[place_in_octet(u)];
        }
        store_pack(target + v * VECTOR_ROW + span * SPAN + (place % OCTETS * 4 + place / OCTETS) * 8, ordered);
    }
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) grouped_matvec(
    const uint8* matrix, const scale_t* scales, const zero_t* zeros, const bias_t* biases, const codebook_t* entries,
    VECTOR_PARAMETERS OUT_T* out, EPILOGUE_PARAMETERS const Params p)
{
    extern __shared__ __align__(16) unsigned char dynamic_shared[];
    float* parts = reinterpret_cast<float*>(dynamic_shared);
    int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32, quad = lane % 4;
    int team = warp / WARPS_K, step = int(gridDim.x) * TEAMS, member = int(threadIdx.x) % (32 * WARPS_K);
    if (HURRIES) {
        hurry_next_grid();
    }
#if PROLOGUE
    ask_ahead(THREADS, VECTOR_ARGUMENTS p);
#endif
    if (!MATRIX_CONSTANT) {
        wait_for_previous_grid();
    }
    Codebook codebook;
    codebook.load(entries);
    Stream stream{{matrix, scales, zeros, biases}};
    stream.team_warp = warp % WARPS_K;
    stream.quad = quad;
    stream.seek(int(blockIdx.x) + int(gridDim.x) * team, p);
    Codes codes[DEPTH];
    #pragma unroll
    for (int pass = 0; pass < DEPTH; ++pass) {
        stream.load(codes[pass], pass);
    }
    stream.advance(step, p);
    if (MATRIX_CONSTANT) {
        wait_for_previous_grid();
    }
    Columns columns;
    uint pairs[AHEAD][BLOCKS][4] = {};
    #pragma unroll
    for (int block = 0; block < BLOCKS; ++block) {
        int column = block * 8 + lane / 4, group = column / COLUMNS, v = column % COLUMNS;
        columns.active[block] = v < VECTORS && group < SPAN_GROUPS && quad * SPAN_GROUPS / 4 == group;
#if STAGED
        const vector_t* first = reinterpret_cast<const vector_t*>(dynamic_shared + PARTS * 4) + quad * 8;
        columns.vector[block] = first + (v < VECTORS ? v : 0) * VECTOR_ROW;
#endif
    }
#if !STAGED
    vector_t* stages = reinterpret_cast<vector_t*>(dynamic_shared + PARTS * 4) + warp * STAGES * VECTORS * STAGE_ROW;
    VectorStream vectors{stages, 0, 0, warp % WARPS_K};
    #pragma unroll
    for (int ahead = 0; ahead < STAGES - 1; ++ahead) {
        vectors.copy(vector, p);
    }
#endif
#if STAGED
    vector_t* staged = reinterpret_cast<vector_t*>(dynamic_shared + PARTS * 4);
#if PROLOGUE
    constexpr int COMPUTED_ROW = (COMMON + 7) / 8 * 8;
    vector_t* computed = staged + VECTORS * VECTOR_ROW;
    for (int v = int(threadIdx.x) / ROW_THREADS; v < VECTORS; v += THREADS / ROW_THREADS) {
        compute_row(v, int(threadIdx.x) % ROW_THREADS, computed + v * (COMPUTED_ROW - COMMON), VECTOR_ARGUMENTS p);
    }
    __syncthreads();
    stage_vectors(staged, computed, COMPUTED_ROW);
#else
    stage_vectors(staged, vector, p.vector_row);
#endif
    __syncthreads();
#endif
    int turn = 0;
    for (int base = int(blockIdx.x); base < p.tiles; base += step, turn = (turn + 1) % TURNS) {
        int tile = base + int(gridDim.x) * team;
        float sum[BLOCKS][4] = {};
        Fetched fetched[ITEMS_EACH];
        float row_scale[ITEMS_EACH][VALUES];
        #pragma unroll
        for (int index = 0; index < ITEMS_EACH; ++index) {
            int item = member + index * 32 * WARPS_K, v = item / (TILE / VALUES);
            int at = tile * TILE + item % (TILE / VALUES) * VALUES;
            if (item < ITEMS && at < p.outputs && tile < p.tiles) {
                fetched[index] = fetch(0, v, at / PAIRS, EPILOGUE_ARGUMENTS p);
                #pragma unroll
                for (int u = 0; u < VALUES; ++u) {
                    int limited = at + u < p.outputs ? at + u : p.outputs - 1;
                    row_scale[index][u] = ONE_GROUP ? float(scales[(long long)(limited / ROWS) * p.scale_row]) : 1.0f;
                }
            }
        }
        #pragma unroll 1
        for (int round = 0; round < ROUNDS; ++round) {
            #pragma unroll
            for (int pass = 0; pass < DEPTH; ++pass) {
                int span = (round * DEPTH + pass) * WARPS_K + warp % WARPS_K;
#if !STAGED
                __syncwarp(); // all lanes have read the stage that is written next
                int used = (vectors.stage + 1) % STAGES;
                vectors.copy(vector, p);
                wait_for_copies<STAGES - 1>();
                __syncwarp();
                #pragma unroll
                for (int block = 0; block < BLOCKS; ++block) {
                    int v = (block * 8 + lane / 4) % COLUMNS;
                    columns.vector[block] = stages + (used * VECTORS + (v < VECTORS ? v : 0)) * STAGE_ROW + quad * 8;
                }
#endif
                if (SPANS % WARPS_K == 0 && PASSES % DEPTH == 0 || span < SPANS) {
                    multiply_span(sum, codes[pass], columns, pairs, span, codebook);
                }
                stream.load(codes[pass], pass);
            }
            stream.advance(step, p);
        }
        float* part = parts + turn * PART;
        float* own = part + warp * BLOCKS * 8 * PART_ROW + quad * 2 * PART_ROW + lane / 4;
        #pragma unroll
        for (int block = 0; block < BLOCKS; ++block) {
            #pragma unroll
            for (int index = 0; index < 4; ++index) {
                own[(block * 8 + index % 2) * PART_ROW + index / 2 * 8] = sum[block][index];
            }
        }
        if (WARPS_K > 1) {
            __syncthreads();
        } else {
            __syncwarp();
        }
        #pragma unroll
        for (int index = 0; index < ITEMS_EACH; ++index) {
            int item = member + index * 32 * WARPS_K, v = item / (TILE / VALUES);
            int first = item % (TILE / VALUES) * VALUES;
            int at = tile * TILE + first;
            if (item < ITEMS && at < p.outputs && tile < p.tiles) {
                float value[VALUES];
                #pragma unroll
                for (int u = 0; u < VALUES; ++u) {
                    value[u] = 0.0f;
                    #pragma unroll
                    for (int other = 0; other < WARPS_K * SPAN_GROUPS; ++other) {
                        int from_warp = team * WARPS_K + other / SPAN_GROUPS;
                        int from = from_warp * BLOCKS * 8 + other % SPAN_GROUPS * COLUMNS + v;
                        value[u] += part[from * PART_ROW + first + u];
                    }
                    value[u] *= row_scale[index][u];
                }
                store(value, fetched[index], 0, v, at / PAIRS, out, EPILOGUE_ARGUMENTS p);
            }
        }
        if (TURNS == 1 && WARPS_K > 1) {
            __syncthreads();
        } else if (TURNS == 1) {
            __syncwarp();
        }
    }
#if !STAGED
    wait_for_copies<0>();
#endif
}
