// Numbers of packed codes, made in memory beside a product that reads them there: by idle warps of all blocks, each
// number once. Warps take pieces of PIECE_ROWS rows of the matrix, PART places of k, in the order in which tiles need
// them: columns of the result that are multiplied TOGETHER, part by part. Whoever copies a part waits until all pieces
// of it have been made. Only a warp that runs takes a piece, and it waits for nobody, so that blocks need not all run.
constexpr int PART = 512, PIECE_ROWS = 16 / BITS, OCTETS = PIECE_ROWS * PART / 8 / 32; // of a lane
constexpr int PARTS = (COMMON + PART - 1) / PART, PIECES = TILE_N / PIECE_ROWS, PART_STEPS = PART / 64;
constexpr int ROUND = TOGETHER * PARTS * PIECES, ALL_PIECES = (TILES_N + TOGETHER - 1) / TOGETHER * ROUND;
static_assert(BITS == 4 || BITS == 8, "an octet is of whole words");

// Zero before a launch, and again behind it.
__device__ int taken, made[TILES_N * PARTS];
__device__ uint finished;

// Orders what threads store and what the copy engine reads.
__device__ __forceinline__ void order_copies() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// A lane's octet of codes of a row, with what belongs to it.
struct Octet {
    uint word[BITS / 4];
    scale_t scale;
    zero_t zero;
    bias_t bias;

    __device__ __forceinline__ void load(const uint8* matrix, const Groups& b, int row, int k, const Params& p)
    {
        long long own = row_of_scales(row, p);
        #pragma unroll
        for (int i = 0; i < BITS / 4; ++i) {
            word[i] = reinterpret_cast<const uint*>(matrix + (long long)row * p.matrix_row + k * BITS / 8)[i];
        }
        load_belonging(scale, zero, bias, b, own, k / GROUP, p);
    }
    __device__ __forceinline__ void store(vector_t* numbers, int row, int k, const Codebook& codebook) const
    {
        uint pairs[4];
        octet_in_order(pairs, word, 0, zero_pair(ZEROS ? float(zero_of(zero, k / GROUP)) : float(ZERO)), codebook);
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
            pairs[i] = scaled_pair(pairs[i], scale, bias);
        }
        uint4 all = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
        *reinterpret_cast<uint4*>(numbers + (long long)row * COMMON + k) = all;
    }
};

// A piece as the lanes of a warp have it: octets of codes, and where their numbers belong.
struct Piece {
    int number, row, k;
    Octet octet[OCTETS];

    __device__ __forceinline__ int column() const { return number / ROUND * TOGETHER + number / PIECES % TOGETHER; }
    __device__ __forceinline__ int part() const { return number / (PIECES * TOGETHER) % PARTS; }
    __device__ __forceinline__ int row_of(int i) const { return row + i / (PART / 256); }
    __device__ __forceinline__ int k_of(int i) const { return k + i % (PART / 256) * 256; }
    __device__ __forceinline__ bool exists(int i, const Params& p) const
    {
        return row_of(i) < p.n && (COMMON % PART == 0 || k_of(i) < COMMON);
    }

    // Asks for the codes of a piece, if there is one.
    __device__ __forceinline__ void load(int taken, const uint8* matrix, const Groups& b, const Params& p)
    {
        number = taken;
        row = number < ALL_PIECES ? column() * TILE_N + number % PIECES * PIECE_ROWS : p.n;
        k = part() * PART + int(threadIdx.x) % 32 * 8;
        #pragma unroll
        for (int i = 0; i < OCTETS; ++i) {
            if (exists(i, p)) {
                octet[i].load(matrix, b, row_of(i), k_of(i), p);
            }
        }
    }
    __device__ __forceinline__ void store(vector_t* numbers, const Codebook& codebook, const Params& p) const
    {
        #pragma unroll
        for (int i = 0; i < OCTETS; ++i) {
            if (exists(i, p)) {
                octet[i].store(numbers, row_of(i), k_of(i), codebook);
            }
        }
    }
};

// What idle warps do. While the numbers of a piece reach memory, the codes of the next one are on their way.
__device__ __forceinline__ void make_numbers(
    const uint8* matrix, const Groups& b, const codebook_t* entries, vector_t* numbers, const Params& p)
{
    bool is_first = threadIdx.x % 32 == 0;
    Codebook codebook;
    codebook.load(entries);
    Piece piece;
    int next = is_first ? atomicAdd(&taken, 1) : 0;
    piece.load(__shfl_sync(0xffffffffu, next, 0), matrix, b, p);
    while (piece.number < ALL_PIECES) {
        int column = piece.column(), part = piece.part();
        next = is_first ? atomicAdd(&taken, 1) : 0;
        piece.store(numbers, codebook, p);
        piece.load(__shfl_sync(0xffffffffu, next, 0), matrix, b, p);
        order_copies();
        __threadfence();
        __syncwarp();
        if (is_first && column < TILES_N) {
            atomicAdd(&made[column * PARTS + part], 1);
        }
    }
}

// A counter, and what others stored before they counted.
__device__ __forceinline__ int acquired(const int* counter)
{
    int found;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(found) : "l"(counter) : "memory");
    return found;
}

// Waits until a part of the columns of a tile is there.
__device__ __forceinline__ void wait_for_numbers(int column, int part)
{
    while (acquired(made + column * PARTS + part) < PIECES) {
    }
    order_copies();
}

// For one thread of a block, when nobody in it takes pieces or waits for them any more.
__device__ __forceinline__ void finish_numbers()
{
    __threadfence();
    if (atomicInc(&finished, gridDim.x - 1) == gridDim.x - 1) {
        taken = 0;
        for (int at = 0; at < TILES_N * PARTS; ++at) {
            made[at] = 0;
        }
    }
}
