// Two convolutions of one tap, one behind the other: what the first makes of a pixel is rounded as it would be stored,
// and stays in registers, where it is the operand of the second one. Both weights stay in shared memory; a warpgroup
// copies pixels ahead through a ring of STAGES stages: 64 pixels of 64 channels each, of the image and, where STAGED,
// of what the first epilogue reads. Blocks stay, and their TEAMS of one warpgroup take tiles of 64 pixels in turns:
// MADE results of each, 64 at a time, then COLUMNS results of those. With ADDED_COMMON, a third convolution is added to
// the first. Grid: blocks in x.
static_assert(TILE_M == 64 && TILE_N == 64 && TILE_K == 64 && GROUPS == 1, "64 pixels a team, 64 channels a stage");
static_assert(MADE % 64 == 0 && COMMON % 64 == 0 && ADDED_COMMON % 64 == 0, "whole stages");
static_assert(sizeof(OUT_T) == 2 && STORE_SIZE == 8 && PAIRS == 1, "eight lanes share two rows");
constexpr int OWN_SLICES = COMMON / 64, SLICES = OWN_SLICES + ADDED_COMMON / 64, PARTS = MADE / 64;
constexpr int TILE_STAGES = SLICES + (STAGED ? PARTS : 0); // of a tile
constexpr int PANEL_BYTES = COLUMNS * 128;           // of the second weight: 64 channels
constexpr int NEXT_WEIGHT_AT = PARTS * SLICES * B_BYTES, RING_AT = NEXT_WEIGHT_AT + PARTS * PANEL_BYTES;
constexpr int STAGING_AT = RING_AT + STAGES * A_BYTES; // of results where nothing that is read leaves them a place
constexpr int BARRIERS_AT = STAGING_AT + (MADE_STORED && !STAGED ? TEAMS * A_BYTES : 0);
static_assert(BARRIERS_AT + STAGES * 16 == SHARED_BYTES, "layout of shared memory");
static_assert(2 * TILE_STAGES <= STAGES, "who waits tells phases from those beside them");

// Pixels in shared memory, and where a thread is among them.
struct Ring : StageBarriers<BARRIERS_AT>, Turn {
    __device__ explicit Ring(unsigned char* shared) : StageBarriers<BARRIERS_AT>{shared_address(shared)} {}
    __device__ void wait() const { wait_for_phase(full(stage), parity); }
    __device__ void leave() const { arrive_by_warp(empty(stage)); }
};

__device__ Part part_of(int place_in_order, const Params& p)
{
    return {0, (p.backwards ? RESULT_TILES - 1 - place_in_order : place_in_order) * TILE_M, 0, 0};
}

#if ADDED_COMMON
#define ADDED_IMAGE_PARAMETER const tile_t *added_image,
#define ADDED_WEIGHT_PARAMETER const tile_t *added_weight,
#define ADDED_IMAGE_ARGUMENT added_image,
#define ADDED_WEIGHT_ARGUMENT added_weight,
#else
#define ADDED_IMAGE_PARAMETER
#define ADDED_WEIGHT_PARAMETER
#define ADDED_IMAGE_ARGUMENT
#define ADDED_WEIGHT_ARGUMENT
#endif

// Copies what is multiplied by a slice of pixels for 64 results.
template <int CHANNELS>
__device__ __forceinline__ void copy_weight(unsigned char* target, const tile_t* weight, int part, int slice)
{
    OperandCopier<64, true, true>(weight, part * 64, MADE, CHANNELS, 1, slice, CHANNELS).copy(target);
}

// Has the teams bring all weights to shared memory. Rows of both weights are dealt out as results are (`column_at`); so
// are the channels of the second, which are results of the first.
__device__ __forceinline__ void load_weights(
    unsigned char* shared, const tile_t* weight, ADDED_WEIGHT_PARAMETER const tile_t* next_weight)
{
    constexpr int COPIERS = TEAMS * TEAM_THREADS;
    #pragma unroll 1
    for (int each = int(threadIdx.x) / 128; each < PARTS * SLICES; each += TEAMS) {
        int slice = each % SLICES;
        if (slice < OWN_SLICES) {
            copy_weight<COMMON>(shared + each * B_BYTES, weight, each / SLICES, slice);
        }
#if ADDED_COMMON
        else {
            copy_weight<ADDED_COMMON>(shared + each * B_BYTES, added_weight, each / SLICES, slice - OWN_SLICES);
        }
#endif
    }
    commit_copies();
    #pragma unroll 6
    for (int chunk = int(threadIdx.x); chunk < COLUMNS * MADE / 8; chunk += COPIERS) {
        int line = chunk / (MADE / 8), channel = chunk % (MADE / 8) * 8;
        const tile_t* source = next_weight + column_at<true>(line) * MADE + channel;
        Pack<uint, 4> pairs = load_pack<4>(reinterpret_cast<const uint*>(source));
        unsigned char* panel = shared + NEXT_WEIGHT_AT + channel / 64 * PANEL_BYTES;
        #pragma unroll
        for (int i = 0; i < 4; ++i) { // of its neighbours each two are where they are dealt out to
            uint place = place_in_panel(line, channel % 64 / 32 * 4 + i) + channel % 32 / 8 * 4;
            *reinterpret_cast<uint*>(panel + place) = pairs[i];
        }
    }
    wait_for_copies<0>();
    publish_to_products();
    synchronize(1 + TEAMS, COPIERS);
}

// Where a chunk of 16 bytes lies in a stage of what is STAGED: lanes that have four chunks of a row each, and lanes
// that have all of a row, begin in different banks.
__device__ __forceinline__ uint staged_place(uint row, uint chunk) { return row * 128 + (chunk ^ (row & 1) * 4) * 16; }

// Copies 64 pixels of 64 channels, which `source(row, col)` tells the place of, to their `place(row, chunk)` in a
// stage.
template <typename Source, typename Place>
__device__ __forceinline__ void fill_stage(
    Ring& ring, unsigned char* stages, int row, int col, int rows, Source&& source, Place&& place)
{
    uint line = copy_thread() / 8, chunk = copy_thread() % 8;
    wait_for_phase(ring.empty(ring.stage), ring.parity ^ 1); // the first time around, everything is free
    #pragma unroll
    for (int round = 0; round < 4; ++round, line += 16) {
        int at = row + int(line);
        unsigned char* target = stages + ring.stage * A_BYTES + place(line, chunk);
        copy_chunk(target, source(at, col + int(chunk) * 8), at < rows);
    }
    arrive_with_copies(ring.full(ring.stage));
    ring.skip(1);
}

template <int CHANNELS>
__device__ __forceinline__ void copy_slices(Ring& ring, unsigned char* stages, const tile_t* image, int row, int rows)
{
    #pragma unroll
    for (int channel = 0; channel < CHANNELS; channel += 64) {
        auto source = [&](int r, int c) { return image + (long long)r * CHANNELS + c; };
        fill_stage(ring, stages, row, channel, rows, source, place_in_panel);
    }
}

// What the copying warpgroup does.
__device__ __forceinline__ void copy_pixels(
    unsigned char* shared, const tile_t* image, ADDED_IMAGE_PARAMETER MADE_PARAMETERS const Params& p)
{
    Ring ring(shared);
    unsigned char* stages = shared + RING_AT;
    for (int tile = int(blockIdx.x); tile < RESULT_TILES; tile += int(gridDim.x)) {
        int row = part_of(tile, p).row;
        copy_slices<COMMON>(ring, stages, image, row, p.rows);
#if ADDED_COMMON
        copy_slices<ADDED_COMMON>(ring, stages, added_image, row, p.rows);
#endif
#if STAGED
        #pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            auto source = [&](int r, int c) { return MadeEpilogue().element_source(0, r, c, MADE_ARGUMENTS p); };
            fill_stage(ring, stages, row, part * 64, p.rows, source, staged_place);
        }
#endif
    }
    wait_for_copies<0>();
}

// The epilogue of the first convolution. It finds in a stage what it reads, leaves its packs there and keeps them as
// the second product's operand: of 16 channels at a time a thread has what it would have as results.
struct KeptResults : MadeEpilogue {
    static constexpr bool OWN_ROWS = true;
    typedef Pack<OUT_T, 8> Packed;
    unsigned char* stage;
    uint operand[4][4];
    Packed latest;

    __device__ __forceinline__ explicit KeptResults(unsigned char* stage) : stage(stage) {}
    __device__ __forceinline__ unsigned char* place(int row, int col) const
    {
        return stage + staged_place(row % 64, col % 64 / 8);
    }
#if STAGED
    template <typename... Given>
    __device__ __forceinline__ FetchedByElement fetch_by_element(int batch, int row, int col, const Given&... given)
    {
        static_assert(sizeof(FetchedByElement) == 16, "one pack");
        return *reinterpret_cast<const FetchedByElement*>(place(row, col));
    }
#endif
    template <typename... Given>
    __device__ __forceinline__ void store(
        const float (&value)[8], const Fetched& fetched, int batch, int row, int col, const Given&... given)
    {
        latest = results_of(value, fetched, batch, row, col, given...);
        if (MADE_STORED) {
            *reinterpret_cast<Packed*>(place(row, col)) = latest;
        }
    }
    __device__ __forceinline__ void stored(int step, int pack)
    {
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
            operand[pack * 2 + i / 2][i % 2 * 2 + step] = reinterpret_cast<const uint*>(&latest)[i];
        }
    }

    // Stores what a warp has left in the stage, whole lines at a time.
    template <typename... Given>
    __device__ __forceinline__ void store_rows(int first, int col, int rows, const Given&... given)
    {
        __syncwarp();
        int line = int(threadIdx.x) % 128 / 32 * 16 + int(threadIdx.x) % 32 / 8, chunk = int(threadIdx.x) % 8 * 8;
        #pragma unroll
        for (int round = 0; round < 4; ++round) {
            int row = first + line + round * 4;
            if (row < rows) {
                Packed pack = *reinterpret_cast<const Packed*>(place(row, chunk));
                store_pack(result_target(0, row, col + chunk, given...), pack);
            }
        }
        __syncwarp();
    }
};

typedef float NextSums[1][COLUMNS / 8][4];

// Waits for a tile's pixels. Teams do so in turns, since barriers only tell a phase from the one before and the one
// after.
__device__ __forceinline__ void wait_for_pixels(Ring ring, int team, bool is_first, bool is_last)
{
    if (TEAMS > 1 && !is_first) {
        synchronize(1 + team, 2 * TEAM_THREADS);
    }
    #pragma unroll
    for (int slice = 0; slice < SLICES; ++slice) {
        ring.wait();
        ring.skip(1);
    }
    publish_to_products();
    if (TEAMS > 1 && !is_last) {
        arrive_at(1 + (team + 1) % TEAMS, 2 * TEAM_THREADS);
    }
}

__device__ __forceinline__ void leave_pixels(Ring ring)
{
    #pragma unroll
    for (int slice = 0; slice < SLICES; ++slice) {
        ring.leave();
        ring.skip(1);
    }
}

// Starts the products of 64 results of the first convolution.
__device__ __forceinline__ void multiply_pixels(Accumulator& sum, Ring ring, int part)
{
    uint64 pixels = matrix_descriptor(ring.base + RING_AT);
    uint64 weights = matrix_descriptor(ring.base) + part * SLICES * (B_BYTES >> 4);
    begin_products();
    #pragma unroll
    for (int slice = 0; slice < SLICES; ++slice) {
        #pragma unroll
        for (int k = 0; k < 4; ++k) {
            uint64 a = pixels + ring.stage * (A_BYTES >> 4) + k * 2;
            multiply_64_rows(sum.at[0], a, weights + slice * (B_BYTES >> 4) + k * 2, slice + k > 0);
        }
        ring.skip(1);
    }
    commit_products();
}

// Starts adding the products of 64 results that are kept.
__device__ __forceinline__ void multiply_kept(NextSums& sum, const KeptResults& kept, uint base, int part)
{
    uint64 weights = matrix_descriptor(base + NEXT_WEIGHT_AT) + part * (PANEL_BYTES >> 4);
    begin_products();
    #pragma unroll
    for (int k = 0; k < 4; ++k) {
        multiply_kept_rows(sum[0], kept.operand[k], weights + k * 2, part + k > 0);
    }
    commit_products();
}

// What a team does.
__device__ __forceinline__ void multiply_tiles(
    unsigned char* shared, int team, OUT_T* made, MADE_PARAMETERS OUT_T* out, EPILOGUE_PARAMETERS const Params& p)
{
    Ring ring(shared);
    ring.skip(team * TILE_STAGES);
    for (int tile = int(blockIdx.x) + team * int(gridDim.x); tile < RESULT_TILES; tile += TEAMS * int(gridDim.x)) {
        Part place = part_of(tile, p);
        wait_for_pixels(ring, team, tile == int(blockIdx.x), tile + int(gridDim.x) >= RESULT_TILES);
        Ring pixels = ring;
        ring.skip(SLICES);
        NextSums next_sum;
        #pragma unroll 1 // teams are at different places: all of these would not fit the cache of instructions
        for (int part = 0; part < PARTS; ++part) {
            Accumulator sum;
            multiply_pixels(sum, pixels, part);
            if (STAGED) {
                ring.wait();
            }
            place.col = part * 64;
            unsigned char* stage = shared + (STAGED ? RING_AT + ring.stage * A_BYTES : STAGING_AT + team * A_BYTES);
            TileResults<KeptResults, 64, COLUMNS / 2 + 16> results(
                KeptResults(stage), place, 0, p.rows, MADE, MADE_ARGUMENTS p);
            wait_for_products<0>();
            if (part == PARTS - 1) {
                leave_pixels(pixels);
            }
            results.store_all(sum.at, made, MADE_ARGUMENTS p);
            multiply_kept(next_sum, results.epilogue, ring.base, part);
            if (MADE_STORED) {
                results.epilogue.store_rows(place.row, place.col, p.rows, made, MADE_ARGUMENTS p);
            }
            if (STAGED) {
                ring.leave();
                ring.skip(1);
            }
        }
        ring.skip((TEAMS - 1) * TILE_STAGES);
        place.col = 0;
        TileResults<StoredResults, COLUMNS> results(StoredResults(), place, 0, p.rows, COLUMNS, EPILOGUE_ARGUMENTS p);
        wait_for_products<0>();
        results.store_all(next_sum, out, EPILOGUE_ARGUMENTS p);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) conv2d_back_to_back(
    const tile_t* image, const tile_t* weight, ADDED_IMAGE_PARAMETER ADDED_WEIGHT_PARAMETER const tile_t* next_weight,
    OUT_T* made, MADE_PARAMETERS OUT_T* out, EPILOGUE_PARAMETERS const Params p)
{
    extern __shared__ __align__(1024) unsigned char shared[];
    if (threadIdx.x == 0) {
        Ring(shared).make(COPY_THREADS, WARPS);
    }
    __syncthreads();
    int role = __shfl_sync(0xffffffffu, int(threadIdx.x) / 128, 0);
    if (role == TEAMS) {
        leave_registers<COPY_REGISTERS>();
        wait_for_previous_grid();
        copy_pixels(shared, image, ADDED_IMAGE_ARGUMENT MADE_ARGUMENTS p);
    } else {
        allow_registers<PRODUCT_REGISTERS>();
        load_weights(shared, weight, ADDED_WEIGHT_ARGUMENT next_weight);
        wait_for_previous_grid();
        multiply_tiles(shared, role, made, MADE_ARGUMENTS out, EPILOGUE_ARGUMENTS p);
    }
}
