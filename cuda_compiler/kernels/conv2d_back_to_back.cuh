// Two convolutions of one tap, one behind the other: what the first makes of a pixel is rounded as it would be stored,
// and stays in registers, where it is the operand of the second one. Both weights stay in shared memory. The copy
// engine brings pixels through a ring of STAGES stages, 64 pixels of 64 channels each, of the image and, where STAGED,
// of what the first epilogue reads; results lie in their place, or in places of their own, until it has stored them.
// Blocks stay, and their TEAMS of one warpgroup take tiles of 64 pixels in turns: MADE results of each, 64 at a time,
// then COLUMNS results of those. With ADDED_COMMON, a third convolution is added to the first. Grid: blocks in x.
static_assert(TILE_M == 64 && TILE_N == 64 && TILE_K == 64 && WARPS == 4 && SPLITS == 1, "64 pixels a team and stage");
static_assert(MADE % 64 == 0 && COLUMNS % 64 == 0 && COMMON % 64 == 0 && ADDED_COMMON % 64 == 0, "whole stages");
static_assert(TEAMS == 3 && BLOCKS == 1, "all registers are given out");
static_assert(sizeof(OUT_T) == 2 && STORE_SIZE == 8 && PAIRS == 1, "two packs of a row a thread");
constexpr int COPY_REGISTERS = 24, PRODUCT_REGISTERS = 160; // of the 128 that a thread begins with
constexpr int OWN_SLICES = COMMON / 64, SLICES = OWN_SLICES + ADDED_COMMON / 64, PARTS = MADE / 64;
constexpr int TILE_STAGES = SLICES + (STAGED ? PARTS : 0); // of a tile
constexpr int PANEL_BYTES = COLUMNS * 128;                 // of the second weight: 64 channels
constexpr int NEXT_WEIGHT_AT = PARTS * SLICES * B_BYTES, RING_AT = NEXT_WEIGHT_AT + PARTS * PANEL_BYTES;
constexpr int PLACES = MADE_STORED && !STAGED ? 2 : 0; // of a team, of first results where nothing leaves them a place
constexpr int PLACES_AT = RING_AT + STAGES * A_BYTES, NEXT_AT = PLACES_AT + TEAMS * PLACES * A_BYTES;
constexpr int NEXT_BYTES = COLUMNS * 128, BARRIERS_AT = NEXT_AT + TEAMS * NEXT_BYTES;
static_assert(BARRIERS_AT + STAGES * 16 == SHARED_BYTES, "layout of shared memory");
static_assert(STAGES % TILE_STAGES == 0, "a stage holds the same of each tile");

// Pixels in shared memory, and where a thread is among them.
struct Ring : StageBarriers<BARRIERS_AT>, Turn {
    __device__ explicit Ring(unsigned char* shared) : StageBarriers<BARRIERS_AT>{shared_address(shared)} {}
    __device__ void wait() const { wait_for_phase(full(stage), parity); }
};

__device__ __forceinline__ int row_of(int place_in_order, const Params& p)
{
    return (p.backwards ? RESULT_TILES - 1 - place_in_order : place_in_order) * TILE_M;
}

// Which of 64 results is multiplied at a position: each of the four lanes that share a row has sixteen neighbours.
__device__ __forceinline__ int result_at(int position)
{
    return position / 64 * 64 + position % 8 / 2 * 16 + position % 64 / 8 * 2 + position % 2;
}

// Copies what is multiplied by a slice of pixels for 64 results.
template <int CHANNELS>
__device__ __forceinline__ void copy_weight(unsigned char* target, const tile_t* weight, int part, int slice)
{
    int chunk = int(threadIdx.x) % 8;
    #pragma unroll
    for (int line = int(threadIdx.x) % 128 / 8; line < 64; line += 16) {
        const tile_t* source = weight + (part * 64 + result_at(line)) * CHANNELS + slice * 64 + chunk * 8;
        copy_chunk(target + place_in_panel(line, chunk), source, true);
    }
}

// Has the teams bring all weights to shared memory. Rows of both weights are dealt out as results are; so are the
// channels of the second, which are results of the first.
__device__ __forceinline__ void load_weights(
    unsigned char* shared, const tile_t* weight, const tile_t* added_weight, const tile_t* next_weight)
{
    constexpr int COPIERS = TEAMS * TEAM_THREADS;
    #pragma unroll 1
    for (int each = int(threadIdx.x) / 128; each < PARTS * SLICES; each += TEAMS) {
        int slice = each % SLICES;
        if (slice < OWN_SLICES) {
            copy_weight<COMMON>(shared + each * B_BYTES, weight, each / SLICES, slice);
        } else {
            copy_weight<ADDED_COMMON>(shared + each * B_BYTES, added_weight, each / SLICES, slice - OWN_SLICES);
        }
    }
    commit_copies();
    #pragma unroll 6
    for (int chunk = int(threadIdx.x); chunk < COLUMNS * MADE / 8; chunk += COPIERS) {
        int line = chunk / (MADE / 8), channel = chunk % (MADE / 8) * 8;
        const tile_t* source = next_weight + result_at(line) * MADE + channel;
        Pack<uint, 4> pairs = load_pack<4>(reinterpret_cast<const uint*>(source));
        unsigned char* panel = shared + NEXT_WEIGHT_AT + channel / 64 * PANEL_BYTES;
        #pragma unroll
        for (int i = 0; i < 4; ++i) { // of its neighbours each two are where they are dealt out to
            uint place = place_in_panel(line, channel % 16 / 8 * 4 + i) + channel % 64 / 16 * 4;
            *reinterpret_cast<uint*>(panel + place) = pairs[i];
        }
    }
    wait_for_copies<0>();
    publish_to_products();
    synchronize(1 + TEAMS, COPIERS);
}

// Has a stage filled with 64 pixels of 64 channels.
__device__ __forceinline__ void fill_stage(Ring& ring, const TensorMap& image, int channel, int row)
{
    wait_for_phase(ring.empty(ring.stage), ring.parity ^ 1); // the first time around, everything is free
    arrive_and_expect(ring.full(ring.stage), A_BYTES);
    copy_lines(ring.base + RING_AT + ring.stage * A_BYTES, image, ring.full(ring.stage), channel, row);
    ring.next();
}

// What the thread does that has pixels copied.
__device__ __forceinline__ void copy_pixels(
    unsigned char* shared, const TensorMap& image, const TensorMap& added_image, const TensorMap& read, const Params& p)
{
    Ring ring(shared);
    for (int tile = int(blockIdx.x); tile < RESULT_TILES; tile += int(gridDim.x)) {
        int row = row_of(tile, p);
        for (int part = 0; part < (STAGED ? PARTS : 0); ++part) {
            fill_stage(ring, read, part * 64, row);
        }
        for (int slice = 0; slice < OWN_SLICES; ++slice) {
            fill_stage(ring, image, slice * 64, row);
        }
        for (int slice = 0; slice < ADDED_COMMON / 64; ++slice) {
            fill_stage(ring, added_image, slice * 64, row);
        }
    }
}

// Sums of 64 rows, of a team.
template <int COUNT>
struct Sums {
    float at[COUNT / 8][4];
};

// A thread's place in 64 x 64 results: two packs in each of two rows.
struct Own {
    int lane = int(threadIdx.x) % 32, row = int(threadIdx.x) % 128 / 32 * 16 + lane / 4, col = lane % 4 * 16;

    __device__ __forceinline__ uint place(int step, int pack) const
    {
        return place_in_panel(row + step * 8, lane % 4 * 2 + pack);
    }
};

// Turns 64 results of each row into packs, which take the place of what is read for them, if anything is. `columns` is
// what the epilogue reads for both packs of a thread.
template <typename EPILOGUE, bool READS, bool STORES, typename Keep, typename... Operands>
__device__ __forceinline__ void finish(
    const float (&sum)[8][4], const typename EPILOGUE::FetchedByColumn (&columns)[2], unsigned char* stage, int row,
    int col, int rows, Keep&& keep, const Operands&... operands)
{
    EPILOGUE epilogue;
    Own own;
    #pragma unroll
    for (int step = 0; step < 2; ++step) {
        int r = min(row + own.row + step * 8, rows - 1); // what is beyond the last row is stored nowhere
        #pragma unroll
        for (int pack = 0; pack < 2; ++pack) {
            typedef Pack<OUT_T, 8> Packed;
            int c = col + own.col + pack * 8;
            Packed* place = reinterpret_cast<Packed*>(stage + own.place(step, pack));
            typename EPILOGUE::FetchedByElement of_element;
            if constexpr (READS) {
                static_assert(sizeof(of_element) == 16, "one pack");
                of_element = *reinterpret_cast<const typename EPILOGUE::FetchedByElement*>(place);
            } else {
                of_element = epilogue.fetch_by_element(0, r, c, operands...);
            }
            typename EPILOGUE::Fetched fetched{
                epilogue.fetch_by_row(0, r, c, operands...), columns[pack], of_element};
            float value[8];
            #pragma unroll
            for (int i = 0; i < 8; ++i) {
                value[i] = sum[pack * 4 + i / 2][step * 2 + i % 2];
            }
            Packed packed = epilogue.results_of(value, fetched, 0, r, c, (OUT_T*)nullptr, operands...);
            if constexpr (STORES) {
                *place = packed;
            }
            keep(packed, step, pack);
        }
    }
}

template <typename EPILOGUE, typename... Operands>
__device__ __forceinline__ void fetch_columns(
    typename EPILOGUE::FetchedByColumn (&columns)[2], int col, const Operands&... operands)
{
    #pragma unroll
    for (int pack = 0; pack < 2; ++pack) {
        columns[pack] = EPILOGUE().fetch_by_column(0, 0, col + Own().col + pack * 8, operands...);
    }
}

// Has what a warp has left in a stage stored: 16 rows.
__device__ __forceinline__ void store_rows(const TensorMap& results, uint stage, int col, int row)
{
    publish_to_products();
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
        int first = int(threadIdx.x) % 128 / 32 * 16;
        store_lines(results, stage + first * 128, col, row + first);
    }
}

// Waits for a tile's pixels. Barriers only tell a phase from the one before and the one after: teams wait in turns, so
// that what the stages held before has been there, and pixels come last of a tile, so that the rest is on its way.
__device__ __forceinline__ void wait_for_pixels(Ring ring, int team, bool is_first, bool is_last)
{
    if (!is_first) {
        synchronize(1 + team, 2 * TEAM_THREADS);
    }
    #pragma unroll
    for (int slice = 0; slice < SLICES; ++slice) {
        ring.wait();
        ring.skip(1);
    }
    if (!is_last) {
        arrive_at(1 + (team + 1) % TEAMS, 2 * TEAM_THREADS);
    }
}

__device__ __forceinline__ void leave_pixels(Ring ring)
{
    #pragma unroll
    for (int slice = 0; slice < SLICES; ++slice) {
        arrive_by_warp(ring.empty(ring.stage));
        ring.skip(1);
    }
}

// Starts the products of 64 results of the first convolution.
__device__ __forceinline__ void multiply_pixels(Sums<64>& sum, Ring ring, int part)
{
    uint64 pixels = matrix_descriptor(ring.base + RING_AT);
    uint64 weights = matrix_descriptor(ring.base) + part * SLICES * (B_BYTES >> 4);
    begin_products();
    #pragma unroll
    for (int slice = 0; slice < SLICES; ++slice) {
        #pragma unroll
        for (int k = 0; k < 4; ++k) {
            uint64 a = pixels + ring.stage * (A_BYTES >> 4) + k * 2;
            multiply_64_rows(sum.at, a, weights + slice * (B_BYTES >> 4) + k * 2, slice + k > 0);
        }
        ring.skip(1);
    }
    commit_products();
}

// Starts adding the products of 64 results that are kept.
__device__ __forceinline__ void multiply_kept(Sums<COLUMNS>& sum, const uint (&operand)[4][4], uint base, int part)
{
    uint64 weights = matrix_descriptor(base + NEXT_WEIGHT_AT) + part * (PANEL_BYTES >> 4);
    begin_products();
    #pragma unroll
    for (int k = 0; k < 4; ++k) {
        multiply_kept_rows(sum.at, operand[k], weights + k * 2, part + k > 0);
    }
    commit_products();
}

// Turns the second results of a tile into packs, at their places, and has them stored. Calls `settle` when it has asked
// for what is the same for all rows: behind that sums and places are ready.
template <typename Settle>
__device__ __forceinline__ void store_next(
    const Sums<COLUMNS>& sum, unsigned char* places, int row, Settle&& settle, const TensorMap& results,
    EPILOGUE_PARAMETERS const Params& p)
{
    OwnEpilogue::FetchedByColumn columns[COLUMNS / 64][2];
    #pragma unroll
    for (int part = 0; part < COLUMNS / 64; ++part) {
        fetch_columns<OwnEpilogue>(columns[part], part * 64, EPILOGUE_ARGUMENTS p);
    }
    settle();
    #pragma unroll
    for (int part = 0; part < COLUMNS / 64; ++part, places += A_BYTES) {
        const float (&own)[8][4] = reinterpret_cast<const float (&)[8][4]>(sum.at[part * 8]);
        auto keep = [](const Pack<OUT_T, 8>&, int, int) {};
        finish<OwnEpilogue, false, true>(
            own, columns[part], places, row, part * 64, p.rows, keep, EPILOGUE_ARGUMENTS p);
        store_rows(results, shared_address(places), part * 64, row);
    }
}

// What a team does.
__device__ __forceinline__ void multiply_tiles(
    unsigned char* shared, int team, const TensorMap& made, const TensorMap& results,
    MADE_PARAMETERS EPILOGUE_PARAMETERS const Params& p)
{
    Ring ring(shared);
    ring.skip(team * TILE_STAGES);
    int step = int(gridDim.x);
    for (int tile = int(blockIdx.x) + team * step; tile < RESULT_TILES; tile += TEAMS * step) {
        int row = row_of(tile, p);
        Ring pixels = ring;
        pixels.skip(TILE_STAGES - SLICES);
        wait_for_pixels(pixels, team, tile == int(blockIdx.x), tile + step >= RESULT_TILES);
        Sums<COLUMNS> next_sum;
        int before = 0; // the stage of the part ahead
        #pragma unroll 1 // teams are at different places: all of these would not fit the cache of instructions
        for (int part = 0; part < PARTS; ++part) {
            Sums<64> sum;
            multiply_pixels(sum, pixels, part);
            MadeEpilogue::FetchedByColumn columns[2];
            int col = part * 64;
            fetch_columns<MadeEpilogue>(columns, col, MADE_ARGUMENTS p);
            uint at = RING_AT + ring.stage * A_BYTES;
            if (STAGED) {
                ring.wait();
            } else if (MADE_STORED) {
                at = PLACES_AT + (team * PLACES + part % 2) * A_BYTES;
                wait_for_reading<1>(); // of the part two ahead
                __syncwarp();
            }
            wait_for_products<0>();
            if (part == PARTS - 1) {
                leave_pixels(pixels);
            }
            uint operand[4][4];
            auto keep = [&](const Pack<OUT_T, 8>& packed, int step, int pack) {
                #pragma unroll
                for (int i = 0; i < 4; ++i) {
                    operand[pack * 2 + i / 2][i % 2 * 2 + step] = reinterpret_cast<const uint*>(&packed)[i];
                }
            };
            finish<MadeEpilogue, STAGED, MADE_STORED>(
                sum.at, columns, shared + at, row, col, p.rows, keep, MADE_ARGUMENTS p);
            multiply_kept(next_sum, operand, ring.base, part);
            if (MADE_STORED) {
                store_rows(made, ring.base + at, col, row);
            }
            if (STAGED) {
                if (MADE_STORED && part > 0) {
                    wait_for_reading<1>();
                    arrive_by_warp(ring.empty(before));
                } else if (!MADE_STORED) {
                    __syncwarp();
                    arrive_by_warp(ring.empty(ring.stage));
                }
                before = ring.stage;
                ring.skip(1);
            }
        }
        auto settle = [&]() {
            wait_for_reading<0>();
            if (STAGED && MADE_STORED) {
                arrive_by_warp(ring.empty(before));
            }
            __syncwarp();
            wait_for_products<0>();
        };
        store_next(next_sum, shared + NEXT_AT + team * NEXT_BYTES, row, settle, results, EPILOGUE_ARGUMENTS p);
        ring.skip(SLICES + (TEAMS - 1) * TILE_STAGES);
    }
    wait_for_storing();
}

extern "C" __global__ void __launch_bounds__(THREADS) conv2d_back_to_back(
    const __grid_constant__ TensorMap image, const tile_t* weight, const __grid_constant__ TensorMap added_image,
    const tile_t* added_weight, const __grid_constant__ TensorMap read, const tile_t* next_weight,
    const __grid_constant__ TensorMap made, const __grid_constant__ TensorMap results, MADE_PARAMETERS OUT_T* out,
    EPILOGUE_PARAMETERS const Params p)
{
    extern __shared__ __align__(1024) unsigned char shared[];
    if (threadIdx.x == 0) {
        Ring(shared).make(1, WARPS);
        publish_barriers();
    }
    __syncthreads();
    int role = __shfl_sync(0xffffffffu, int(threadIdx.x) / 128, 0);
    if (role == TEAMS) {
        leave_registers<COPY_REGISTERS>();
        wait_for_previous_grid();
        if (threadIdx.x % 128 == 0) {
            copy_pixels(shared, image, added_image, read, p);
        }
    } else {
        allow_registers<PRODUCT_REGISTERS>();
        load_weights(shared, weight, added_weight, next_weight);
        wait_for_previous_grid();
        multiply_tiles(shared, role, made, results, MADE_ARGUMENTS EPILOGUE_ARGUMENTS p);
    }
}
