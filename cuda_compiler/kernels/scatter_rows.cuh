// Values combined in the rows that an index names: a block has 256 / LANES * EACH rows, of LANES * STORE_SIZE columns
// each. It reads the whole index in chunks, lists the entries that name its rows, always in the same order, and
// combines their values. Grid: blocks in x, columns innermost, then rows. Block: 256.
constexpr int WARPS = 8, GROUPS = 256 / LANES; // of threads that have rows of their own
constexpr int WARP_CHUNK = CHUNK / WARPS;      // a warp's part of a chunk
constexpr int LOADS = WARP_CHUNK / 32;         // a lane's
constexpr int AHEAD = 4;                       // values of a thread that are read together

// The rows that a lane looks at; -1 behind the last.
__device__ __forceinline__ void look(int (&named)[LOADS], int start, int lane, INDEX_PARAMETERS const Params& p)
{
    #pragma unroll
    for (int j = 0; j < LOADS; j += INDEX_PACK) {
        int at = start + (j / INDEX_PACK * 32 + lane) * INDEX_PACK;
#if INDEX_PACK > 1
        if (at + INDEX_PACK <= p.count) {
            Pack<int, INDEX_PACK> found = load_pack<INDEX_PACK>(INDEX_POINTER + at);
            #pragma unroll
            for (int e = 0; e < INDEX_PACK; ++e) {
                named[j + e] = found[e];
            }
        } else
#endif
        {
            #pragma unroll
            for (int e = 0; e < INDEX_PACK; ++e) {
                named[j + e] = at + e < p.count ? row_at(at + e, INDEX_ARGUMENTS p) : -1;
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(256) scatter_rows(
    INDEX_PARAMETERS VALUES_PARAMETERS BASE_PARAMETER OUT_T* out, EPILOGUE_PARAMETERS const Params p)
{
    wait_for_previous_grid();
    __shared__ int listed[CHUNK]; // the row of the block, and behind it the place in the chunk
    __shared__ int counts[WARPS];
    int block = int(blockIdx.x), above = block / p.column_blocks;
    int outer = above / p.row_blocks, first = above % p.row_blocks * (GROUPS * EACH);
    int thread = int(threadIdx.x), lane = thread % 32, warp = thread / 32, group = thread / LANES;
    int column = (block % p.column_blocks * LANES + thread % LANES) * STORE_SIZE;
    bool inside = column < p.width;
    int taken = min(GROUPS * EACH, p.rows - first);

    float sums[EACH][STORE_SIZE];
    int number[EACH];
    #pragma unroll
    for (int i = 0; i < EACH; ++i) {
        number[i] = 0;
        #pragma unroll
        for (int u = 0; u < STORE_SIZE; ++u) {
            sums[i][u] = NEUTRAL;
        }
    }
    int next[LOADS]; // is on its way while a chunk is worked on
    look(next, warp * WARP_CHUNK, lane, INDEX_ARGUMENTS p);
    for (int chunk = 0; chunk < p.count; chunk += CHUNK) {
        int named[LOADS], own = 0; // rows of the block, -1 for others
        #pragma unroll
        for (int j = 0; j < LOADS; ++j) {
            int row = next[j] - first;
            named[j] = next[j] >= 0 && uint(row) < uint(taken) ? row : -1;
        }
        if (chunk + CHUNK < p.count) {
            look(next, chunk + CHUNK + warp * WARP_CHUNK, lane, INDEX_ARGUMENTS p);
        }
        #pragma unroll
        for (int j = 0; j < LOADS; ++j) {
            own += __popc(__ballot_sync(0xffffffffu, named[j] >= 0));
        }
        if (lane == 0) {
            counts[warp] = own;
        }
        __syncthreads();
        int total = 0, place = 0;
        #pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            place += w < warp ? counts[w] : 0;
            total += counts[w];
        }
        if (own) {
            #pragma unroll
            for (int j = 0; j < LOADS; ++j) {
                uint mask = __ballot_sync(0xffffffffu, named[j] >= 0);
                if (named[j] >= 0) {
                    int at = warp * WARP_CHUNK + (j / INDEX_PACK * 32 + lane) * INDEX_PACK + j % INDEX_PACK;
                    listed[place + __popc(mask & ((1u << lane) - 1))] = named[j] * CHUNK + at;
                }
                place += __popc(mask);
            }
        }
        __syncthreads();
        int queue[AHEAD], waiting = 0; // entries of this thread, whose values are read together
        for (int k = 0; k < total; ++k) {
            int entry = listed[k];
            if (inside && entry / CHUNK % GROUPS == group) {
                #pragma unroll
                for (int a = 0; a < AHEAD; ++a) {
                    queue[a] = a == waiting ? entry : queue[a];
                }
                ++waiting;
            }
            if (waiting < AHEAD && k + 1 < total) {
                continue;
            }
            Pack<VALUE_T, STORE_SIZE> part[AHEAD];
            #pragma unroll
            for (int a = 0; a < AHEAD; ++a) {
                if (a < waiting) {
                    part[a] = values_at(outer, chunk + queue[a] % CHUNK, column, VALUES_ARGUMENTS p);
                }
            }
            #pragma unroll
            for (int a = 0; a < AHEAD; ++a) {
                #pragma unroll
                for (int i = 0; i < EACH; ++i) {
                    if (a < waiting && queue[a] / CHUNK / GROUPS == i) {
                        ++number[i];
                        #pragma unroll
                        for (int u = 0; u < STORE_SIZE; ++u) {
                            sums[i][u] = COMBINE(sums[i][u], float(part[a][u]));
                        }
                    }
                }
            }
            waiting = 0;
        }
        __syncthreads();
    }
    #pragma unroll
    for (int i = 0; i < EACH; ++i) {
        int row = first + i * GROUPS + group;
        if (!inside || row >= p.rows) {
            continue;
        }
        store_row(sums[i], number[i], outer, row, column, BASE_ARGUMENT out, EPILOGUE_ARGUMENTS p);
    }
}
