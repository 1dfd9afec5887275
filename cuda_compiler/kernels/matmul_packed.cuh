// Matrix products on compute capability 9.0: a[m, k] by b[k, n], which lies as packed codes along k. As matmul_bulk, but that all
// of the first warpgroup brings b: its threads load codes a step ahead, make numbers of them, and store these where the
// tensor cores read them. A thread has units of 32 codes, half of a line.
constexpr int UNITS = TILE_N * 2, EACH = (UNITS + 127) / 128;
constexpr int COPY_REGISTERS = 96, PRODUCT_REGISTERS = 200;
static_assert(BITS == 4 || BITS == 8, "units are loaded 16 bytes at a time");

// What b is made of.
struct Matrix {
    const uint8* codes;
    const scale_t* scales;
    const zero_t* zeros;
    const bias_t* biases;
};

// A unit as it was loaded.
struct Unit {
    uint word[BITS];
    scale_t scale;
    bias_t bias;
    float zero;
};

// The column of the result that a line of the tile holds: of each 32 they are dealt out so that a thread's results are
// neighbours.
__device__ __forceinline__ int column_of_line(int line)
{
    return line / 32 * 32 + line % 8 / 2 * 8 + line / 8 % 4 * 2 + line % 2;
}

__device__ __forceinline__ void load_unit(Unit& unit, const Matrix& b, int number, int col, int k, const Params& p)
{
    int row = col + column_of_line(number / 2), first = k + number % 2 * 32;
    unit = {};
    if (number >= UNITS || row >= p.n || first >= p.k) {
        return;
    }
    const uint4* source = reinterpret_cast<const uint4*>(b.codes + (long long)row * p.matrix_row + first * BITS / 8);
    #pragma unroll
    for (int part = 0; part < BITS / 4; ++part) {
        uint4 four = __ldg(source + part);
        unit.word[part * 4] = four.x, unit.word[part * 4 + 1] = four.y;
        unit.word[part * 4 + 2] = four.z, unit.word[part * 4 + 3] = four.w;
    }
    int shared_row = row / ROWS, group = first / GROUP;
    unit.scale = b.scales[(long long)shared_row * p.scale_row + group * SCALE_GROUP];
    unit.zero = ZERO;
    if (ZEROS) {
        const zero_t* zeros = b.zeros + (long long)shared_row * p.zero_row;
        int bit = group * ZERO_BITS;
        unit.zero = ZERO_BITS < 8 ? float(int(zeros[bit / 8 * ZERO_GROUP]) >> bit % 8 & (1 << ZERO_BITS) - 1)
                                  : float(zeros[group * ZERO_GROUP]);
    }
    if (BIASES) {
        unit.bias = b.biases[(long long)shared_row * p.bias_row + group * BIAS_GROUP];
    }
}

__device__ __forceinline__ float half_of_pair(uint pair, int side)
{
    vector_t number;
    number.bits = (unsigned short)(side ? pair >> 16 : pair);
    return float(number);
}

// The numbers of a pair times the scale, and with the bias.
__device__ __forceinline__ uint scaled_pair(uint pair, const Unit& unit, uint scale)
{
    if (sizeof(scale_t) == 2 && !BIASES) {
        return Numbers::mul(pair, scale);
    }
    float bias = BIASES ? float(unit.bias) : 0.0f;
    vector_t low(half_of_pair(pair, 0) * float(unit.scale) + bias), high(half_of_pair(pair, 1) * float(unit.scale) + bias);
    return uint(high.bits) << 16 | low.bits;
}

__device__ __forceinline__ void store_unit(
    unsigned char* tile, const Unit& unit, int number, const Codebook& codebook)
{
    if (number >= UNITS) {
        return;
    }
    uint line = number / 2, scale = pair_of(float(unit.scale)), zero = zero_pair(unit.zero);
    #pragma unroll
    for (int octet = 0; octet < 4; ++octet) {
        uint pair[4];
        octet_as_numbers(pair, unit.word, octet, zero, codebook);
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
            pair[i] = scaled_pair(pair[i], unit, scale);
        }
        uint4 chunk = make_uint4(pair[0], pair[1], pair[2], pair[3]);
        if (BITS == 4 && !CODEBOOK) { // pairs are of codes 0 and 4, 1 and 5...
            chunk = make_uint4(__byte_perm(pair[0], pair[1], 0x5410), __byte_perm(pair[2], pair[3], 0x5410),
                               __byte_perm(pair[0], pair[1], 0x7632), __byte_perm(pair[2], pair[3], 0x7632));
        } else if (BITS == 8 && !CODEBOOK) { // of 0 and 2, 1 and 3...
            chunk = make_uint4(__byte_perm(pair[0], pair[1], 0x5410), __byte_perm(pair[0], pair[1], 0x7632),
                               __byte_perm(pair[2], pair[3], 0x5410), __byte_perm(pair[2], pair[3], 0x7632));
        }
        *reinterpret_cast<uint4*>(tile + place_in_panel(line, number % 2 * 4 + octet)) = chunk;
    }
}

// A step along k of one of the tiles that a block computes.
struct Step {
    int tile, step;
    Work work;

    __device__ __forceinline__ explicit Step(const Params& p) : tile(int(blockIdx.x)), step(0), work(tile, p) {}
    __device__ __forceinline__ bool exists(const Params& p) const { return tile < p.tiles_m * p.tiles_n; }
    __device__ __forceinline__ void next(const Params& p)
    {
        if (++step == work.count) {
            tile += int(gridDim.x);
            step = 0;
            work = Work(tile, p);
        }
    }
    __device__ __forceinline__ void load(Unit (&units)[EACH], const Matrix& b, const Params& p) const
    {
        #pragma unroll
        for (int i = 0; i < EACH; ++i) {
            load_unit(units[i], b, int(threadIdx.x) + i * 128, work.col, (work.first + step) * 64, p);
        }
    }
};

// What the copying warpgroup does. Nothing before this grid writes what b is made of.
__device__ __forceinline__ void bring_operands(
    unsigned char* shared, const Ring& ring, const TensorMap& a, const Matrix& b, const Codebook& codebook, const Params& p)
{
    Step step(p), ahead(p);
    Unit loaded[EACH];
    ahead.load(loaded, b, p);
    wait_for_previous_grid();
    Turn turn;
    turn.parity = 1; // the first time around, everything is free
    while (step.exists(p)) {
        Unit units[EACH];
        #pragma unroll
        for (int i = 0; i < EACH; ++i) {
            units[i] = loaded[i];
        }
        ahead.next(p);
        if (ahead.exists(p)) {
            ahead.load(loaded, b, p);
        }
        wait_for_phase(ring.empty(turn.stage), turn.parity);
        if (threadIdx.x == 0) {
            copy_a(ring, turn.stage, a, step.work, step.step);
        }
        #pragma unroll
        for (int i = 0; i < EACH; ++i) {
            store_unit(shared + turn.stage * STAGE_BYTES + A_BYTES, units[i], int(threadIdx.x) + i * 128, codebook);
        }
        publish_to_products();
        synchronize(3, 128);
        if (threadIdx.x == 0) {
            arrive_and_expect(ring.full(turn.stage), A_COPIED);
        }
        step.next(p);
        turn.next();
    }
}

// Grid: blocks that stay in x.
extern "C" __global__ void __launch_bounds__(THREADS, 1) matmul_packed(
    const __grid_constant__ TensorMap a, const uint8* matrix, const scale_t* scales, const zero_t* zeros,
    const bias_t* biases, const codebook_t* entries, OUT_T* out, EPILOGUE_PARAMETERS const Params p)
{
    extern __shared__ __align__(1024) unsigned char shared[];
    Ring ring{shared_address(shared)};
    int role = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
    if (threadIdx.x == 0) {
        ring.make();
        publish_barriers();
        prefetch_map(a);
    }
    __syncthreads();
    if (role == 0) {
        leave_registers<COPY_REGISTERS>();
        Codebook codebook;
        codebook.load(entries);
        bring_operands(shared, ring, a, Matrix{matrix, scales, zeros, biases}, codebook, p);
    } else {
        allow_registers<PRODUCT_REGISTERS>();
        wait_for_previous_grid();
        multiply_and_store(ring, role - 1, out, EPILOGUE_ARGUMENTS p);
    }
}
