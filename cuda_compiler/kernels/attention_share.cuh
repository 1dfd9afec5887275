// How the positions of a head of keys are shared out among the blocks of threads of one cluster or several.

// The open blocks of positions: each warp looks for itself where it has a lane for each, else all threads list them.
struct Open {
    static constexpr bool BY_LANES = TILES <= 32;

    uint any, all;     // by lanes: bits of those that are open, of those in which the mask changes nothing
    int count, closed; // blocks; pieces at the end of the last one

    __device__ __forceinline__ Open(const unsigned char* states, int batch, int group, const Params& p)
    {
        if (BY_LANES) {
            int state = state_of<TILES>(int(threadIdx.x) % 32, states, batch, group, p);
            any = __ballot_sync(0xffffffffu, state != 0);
            all = __ballot_sync(0xffffffffu, state == 2);
            count = __popc(any);
            closed = __shfl_sync(0xffffffffu, state >> 2, 31 - __clz(any | 1));
        } else {
            any = all = 0;
            count = list_open(states, batch, group, p);
            closed = count == 0 ? 0 : last_closed();
        }
    }

    __device__ __forceinline__ int pieces() const { return count * TILE_PIECES - closed; }

    // A piece by its number among them, by all lanes of a warp.
    __device__ __forceinline__ Piece piece(uint number) const
    {
        int within = int(number % TILE_PIECES) * PIECE, place = int(number / TILE_PIECES);
        if (!BY_LANES) {
            int listed = open_blocks()[place];
            return {(listed >> 1) * BLOCK + within, !(listed & 1)};
        }
        uint own = 1u << int(threadIdx.x) % 32;
        int tile = __ffs(__ballot_sync(0xffffffffu, (any & own) && __popc(any & (own - 1)) == place)) - 1;
        return {tile * BLOCK + within, !(all >> tile & 1)};
    }
};

// A block's share of the pieces of what is open: its warps take them in turns. As few clusters work as have enough to
// do.
struct Share {
    Open open;
    int clusters, split, splits, count, warp;

    __device__ __forceinline__ explicit Share(const Open& open) : open(open)
    {
        int pieces = open.pieces();
        clusters = CLUSTERS == 1 || pieces <= ALONE ? 1 : min(CLUSTERS, (pieces + ENOUGH - 1) / ENOUGH);
        split = int(blockIdx.x);
        splits = clusters * CLUSTER;
        count = max(0, (pieces - split + splits - 1) / splits);
        warp = int(threadIdx.x) / 32;
    }
    __device__ __forceinline__ bool is_nobodys() const { return split >= splits; }
    // The block that has the fewest pieces.
    __device__ __forceinline__ bool is_last() const { return split == splits - 1; }
    __device__ __forceinline__ int busy_warps() const { return min(count, WARPS); }
    __device__ __forceinline__ bool has(int turn) const { return warp + turn * WARPS < count; }
    __device__ __forceinline__ Piece piece(int turn) const
    {
        return open.piece(uint(split + (warp + turn * WARPS) * splits));
    }
};

#if FRESH
// Where in memory new keys and values of a head of keys go, one of each for each thread; negative where there is no such
// place. No branch stands between these loads and those that follow.
struct OwnPlaces {
    int key, value;

    __device__ __forceinline__ OwnPlaces(int batch, int head, OPERAND_PARAMETERS const Params& p)
    {
        int row = int(threadIdx.x) % FRESH;
        key = int(key_place(batch, head, row, 0, OPERAND_ARGUMENTS p));
        value = int(value_place(batch, head, row, 0, OPERAND_ARGUMENTS p));
    }

};

// New keys and values of a head of keys, side by side as they lie in memory, and where they go.
template <typename Stored>
struct FreshRows {
    static constexpr int CHUNK = 16 / int(sizeof(Stored)), KEY_CHUNKS = HEAD_SIZE / CHUNK;
    static constexpr int CHUNKS = KEY_CHUNKS + VALUE_SIZE / CHUNK;
    static_assert(FRESH <= 16, "a place for each lane");

    alignas(16) Stored row[FRESH][HEAD_SIZE + VALUE_SIZE];
    int place[2][FRESH]; // of keys and of values

    // By all threads, of which several have the same: in a branch for few of them the loads would come behind all others.
    __device__ __forceinline__ void leave_places(const OwnPlaces& own)
    {
        place[0][threadIdx.x % FRESH] = own.key;
        place[1][threadIdx.x % FRESH] = own.value;
    }

    // Writes them to memory, the last warps first, which have the fewest pieces.
    __device__ __forceinline__ void write(Stored* k, Stored* v) const
    {
        #pragma unroll
        for (int first = 0; first < FRESH * CHUNKS; first += THREADS) {
            int index = first + THREADS - 1 - int(threadIdx.x), number = index / CHUNKS, chunk = index % CHUNKS;
            if (index < FRESH * CHUNKS) {
                int behind = chunk - KEY_CHUNKS, at = place[behind >= 0][number];
                Stored* target = behind < 0 ? k + (long long)at * K_ROW + chunk * CHUNK
                                            : v + (long long)at * V_ROW + behind * CHUNK;
                if (at >= 0) { // else there is no such place
                    *reinterpret_cast<uint4*>(target) = *reinterpret_cast<const uint4*>(row[number] + chunk * CHUNK);
                }
            }
        }
    }

    // The place that a lane looks out for: of a row of keys, or, in the upper half of a warp, of values.
    __device__ __forceinline__ int watched() const
    {
        int lane = int(threadIdx.x) % 32;
        return lane % 16 < FRESH ? place[lane / 16][lane % 16] : -1;
    }

    // Replaces new rows in a piece, which may have been copied before these were in memory. Calls with the number of
    // each, and the rows of the piece that its keys and its values are, where it has these rows.
    template <typename Also>
    __device__ __forceinline__ void patch(unsigned char* stage, int position, int watched, Also also) const
    {
        if (!__any_sync(0xffffffffu, uint(watched - position) < PIECE)) {
            return;
        }
        #pragma unroll 8
        for (int number = 0; number < FRESH; ++number) {
            int key = place[0][number] - position, value = place[1][number] - position;
            #pragma unroll
            for (int first = 0; first < CHUNKS; first += 32) {
                int chunk = first + int(threadIdx.x) % 32, behind = chunk - KEY_CHUNKS;
                int at = behind < 0 ? key : value;
                int byte = behind < 0 ? key * K_PITCH + (chunk * 16 ^ permutation_of<K_PITCH>(key))
                                      : K_BYTES + value * V_PITCH + (behind * 16 ^ permutation_of<V_PITCH>(value));
                if (uint(at) < PIECE && chunk < CHUNKS) {
                    *reinterpret_cast<uint4*>(stage + byte) =
                        *reinterpret_cast<const uint4*>(row[number] + chunk * CHUNK);
                }
            }
            also(number, key, value);
        }
        __syncwarp();
    }
};

// Records indices beyond their tensors, each by a thread.
__device__ __forceinline__ void report_places(
    const int (&place)[2][FRESH], int batch, int head, OPERAND_PARAMETERS const Params& p)
{
    int row = int(threadIdx.x);
    if (row < FRESH && place[0][row] < 0) {
        report_key_place(batch, head, row, 0, OPERAND_ARGUMENTS p);
    }
    if (row < FRESH && place[1][row] < 0) {
        report_value_place(batch, head, row, 0, OPERAND_ARGUMENTS p);
    }
}
#endif
