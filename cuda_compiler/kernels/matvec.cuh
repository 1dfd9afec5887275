// Products of a matrix, whose rows are contiguous, by up to a few vectors: result[v, o] = sum of vector[v, k] *
// matrix[o, k]. A group of LANES threads of each of WARPS_K warps has OUTPUTS rows at a time, a chunk; of each row
// DEPTH loads are on their way, the first ones before the grid ahead of this one has finished. Each row is read once.
// Grid: chunks, in turns, in x. Block: 256. With CODES the matrix holds codes of a byte, of which the generated
// number_of makes numbers.
constexpr int THREADS = 256, WARPS = THREADS / 32;
constexpr int GROUPS = WARPS / WARPS_K * (32 / LANES);     // of threads that share a chunk
constexpr int SPAN = LANES * WARPS_K * LOAD;               // elements of a row that they read together
constexpr int PASSES = (COMMON + SPAN - 1) / SPAN, ROUNDS = (PASSES + DEPTH - 1) / DEPTH;
constexpr int LOAD_BYTES = LOAD * int(sizeof(matrix_t)), WORDS = LOAD_BYTES < 4 ? 1 : LOAD_BYTES / 4;
constexpr int STORES = OUTPUTS / (STORE_SIZE * PAIRS);     // of a chunk, for each vector
static_assert(OUTPUTS % (STORE_SIZE * PAIRS) == 0, "stores take whole chunks");

template <typename T>
__device__ __forceinline__ float element_of(const uint (&word)[WORDS], int index, T element)
{
    constexpr int EACH = 4 / int(sizeof(T)); // of a word
    return element_of(word[index / EACH] >> index % EACH * (32 / EACH), element);
}
__device__ __forceinline__ int code_of(const uint (&word)[WORDS], int index, uint8)
{
    return int(word[index / 4] >> index % 4 * 8 & 255u);
}
__device__ __forceinline__ int code_of(const uint (&word)[WORDS], int index, int8)
{
    return int(int8(word[index / 4] >> index % 4 * 8));
}

// Neighbouring elements of a row as they lie in memory.
struct Weights {
    uint word[WORDS];

    __device__ __forceinline__ void load(const matrix_t* source, bool valid)
    {
        load_bits<LOAD_BYTES>(word, reinterpret_cast<const uint8*>(source), valid);
    }

#if CODES
    __device__ __forceinline__ int operator[](int index) const { return code_of(word, index, matrix_t()); }
#else
    __device__ __forceinline__ float operator[](int index) const { return element_of(word, index, matrix_t()); }
#endif
};

// A group's place in the matrix: a chunk, and which of its loads come next.
struct Stream {
    const matrix_t* matrix;
    int chunk, round;
    const matrix_t* rows[OUTPUTS]; // null behind the last chunk

    __device__ __forceinline__ void seek(int place, const Params& p)
    {
        chunk = place;
        round = 0;
        int batch = place / p.chunks, output = place % p.chunks * OUTPUTS;
        #pragma unroll
        for (int o = 0; o < OUTPUTS; ++o) {
            int row = output + o < p.outputs ? output + o : p.outputs - 1;
            rows[o] = batch < p.batches ? matrix + matrix_offset(batch, p) + (long long)row * p.matrix_row : nullptr;
        }
    }

    __device__ __forceinline__ void advance(int step, const Params& p)
    {
        round += 1;
        if (round == ROUNDS) {
            seek(chunk + step, p);
        }
    }

    __device__ __forceinline__ void load(Weights (&weights)[OUTPUTS], int pass, int first)
    {
        int k = (round * DEPTH + pass) * SPAN + first;
        bool valid = rows[0] != nullptr && (COMMON % SPAN == 0 && PASSES % DEPTH == 0 || k < COMMON);
        #pragma unroll
        for (int o = 0; o < OUTPUTS; ++o) {
            weights[o].load(rows[o] + k, valid);
        }
    }
};

// The number that an element stands for; rows behind the last one are not stored.
#if CODES
__device__ __forceinline__ float number_in(int code, int row, const Codes& codes, const Params& p)
{
    return number_of(code, row < p.outputs ? row : p.outputs - 1, codes, p);
}
#else
__device__ __forceinline__ float number_in(float element, int row, const Codes& codes, const Params& p)
{
    return element;
}
#endif

// `output` is the first of the rows.
__device__ __forceinline__ void add_products(
    float (&sum)[OUTPUTS][VECTORS], const Weights (&weights)[OUTPUTS], const vector_t* vector, long long stride,
    int output, const Codes& codes, const Params& p)
{
    #pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        Pack<vector_t, LOAD> part = load_pack<LOAD>(vector + v * stride);
        #pragma unroll
        for (int u = 0; u < LOAD; ++u) {
            #pragma unroll
            for (int o = 0; o < OUTPUTS; ++o) {
                sum[o][v] += number_in(weights[o][u], output + o, codes, p) * float(part[u]);
            }
        }
    }
}

// Adds up what the threads of a group have; every lane of its first warp ends up with the sums.
__device__ __forceinline__ void add_lanes(float (&sum)[OUTPUTS][VECTORS], int turn)
{
    __shared__ float parts[2][WARPS][OUTPUTS][VECTORS];
    int warp = int(threadIdx.x) / 32;
    #pragma unroll
    for (int o = 0; o < OUTPUTS; ++o) {
        #pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            sum[o][v] = warp_sum<LANES>(sum[o][v]);
            if (WARPS_K > 1 && threadIdx.x % 32 == 0) {
                parts[turn % 2][warp][o][v] = sum[o][v];
            }
        }
    }
    if (WARPS_K > 1) {
        __syncthreads();
        #pragma unroll
        for (int o = 0; o < OUTPUTS; ++o) {
            #pragma unroll
            for (int v = 0; v < VECTORS; ++v) {
                sum[o][v] = 0.0f;
                #pragma unroll
                for (int other = 0; other < WARPS_K; ++other) {
                    sum[o][v] += parts[turn % 2][warp / WARPS_K * WARPS_K + other][o][v];
                }
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) matvec(
    const matrix_t* matrix, VECTOR_PARAMETERS CODE_PARAMETERS OUT_T* out, EPILOGUE_PARAMETERS const Params p)
{
#if STAGED
    __shared__ __align__(16) vector_t staged[VECTORS * COMMON];
#endif
    int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % LANES;
    int group = warp / WARPS_K * (32 / LANES) + int(threadIdx.x) % 32 / LANES;
    int first = (warp % WARPS_K * LANES + lane) * LOAD, step = int(gridDim.x) * GROUPS;
    if (HURRIES) {
        hurry_next_grid();
    }
#if PROLOGUE
    ask_ahead(THREADS, VECTOR_ARGUMENTS p);
#endif
    const Codes codes = {CODE_ARGUMENTS};
    Stream stream{matrix};
    Weights weights[DEPTH][OUTPUTS];
    if (!MATRIX_CONSTANT) {
        wait_for_previous_grid();
    }
    stream.seek(int(blockIdx.x) + int(gridDim.x) * group, p);
    #pragma unroll
    for (int pass = 0; pass < DEPTH; ++pass) {
        stream.load(weights[pass], pass, first);
    }
    stream.advance(step, p);
    if (MATRIX_CONSTANT) {
        wait_for_previous_grid();
    }
#if PROLOGUE
    compute_row(0, int(threadIdx.x), staged, VECTOR_ARGUMENTS p);
    __syncthreads();
#elif STAGED
    for (int index = int(threadIdx.x); index < VECTORS * COMMON / LOAD; index += THREADS) {
        int v = index / (COMMON / LOAD), k = index % (COMMON / LOAD) * LOAD;
        store_pack(staged + v * COMMON + k, load_pack<LOAD>(vector + (long long)v * p.vector_row + k));
    }
    __syncthreads();
#endif
    int total = p.chunks * p.batches, turn = 0;
    for (int base = int(blockIdx.x); base < total; base += step, ++turn) {
        int place = base + int(gridDim.x) * group, batch = place / p.chunks, output = place % p.chunks * OUTPUTS;
        float sum[OUTPUTS][VECTORS] = {};
        Fetched fetched[STORES * VECTORS];
        #pragma unroll
        for (int index = 0; index < STORES * VECTORS; ++index) {
            int v = index % VECTORS, at = (output + index / VECTORS * (STORE_SIZE * PAIRS)) / PAIRS;
            if (warp % WARPS_K == 0 && lane == index % LANES && place < total && at * PAIRS < p.outputs) {
                fetched[index] = fetch(batch, BY_ROW ? v : at, BY_ROW ? at : v, EPILOGUE_ARGUMENTS p);
            }
        }
        #pragma unroll 1
        for (int round = 0; round < ROUNDS; ++round) {
            #pragma unroll
            for (int pass = 0; pass < DEPTH; ++pass) {
                int k = (round * DEPTH + pass) * SPAN + first;
                if (COMMON % SPAN == 0 && PASSES % DEPTH == 0 || k < COMMON) {
#if STAGED
                    add_products(sum, weights[pass], staged + k, COMMON, output, codes, p);
#else
                    const vector_t* own = vector + vector_offset(place < total ? batch : 0, p);
                    add_products(sum, weights[pass], own + k, p.vector_row, output, codes, p);
#endif
                }
                stream.load(weights[pass], pass, first);
            }
            stream.advance(step, p);
        }
        add_lanes(sum, turn);
        #pragma unroll
        for (int index = 0; index < STORES * VECTORS; ++index) {
            int v = index % VECTORS, o = index / VECTORS * (STORE_SIZE * PAIRS);
            float value[STORE_SIZE * PAIRS];
            #pragma unroll
            for (int u = 0; u < STORE_SIZE * PAIRS; ++u) {
                value[u] = sum[o + u][v];
            }
            int at = (output + o) / PAIRS;
            if (warp % WARPS_K == 0 && lane == index % LANES && place < total && at * PAIRS < p.outputs) {
                store(value, fetched[index], batch, BY_ROW ? v : at, BY_ROW ? at : v, out, EPILOGUE_ARGUMENTS p);
            }
        }
    }
}
