// Values combined in the rows that an index names, which has been sorted in slabs: a block has 256 / LANES rows, of
// LANES * STORE_SIZE columns each. It lists the entries that name its rows, in the index's order; each warp takes those
// of its own rows from the list, row by row. Grid: blocks in x, columns innermost, then rows. Block: 256.
constexpr int THREADS = 256, WARPS = 8;
constexpr int GROUPS = THREADS / LANES;
constexpr int WARP_ROWS = LANES < 32 ? 32 / LANES : 1; // rows of a warp; several warps share a wide one
constexpr int LISTED = 512;                            // entries that a block lists at a time
constexpr int AHEAD = 8;                               // values of a thread that are read together
// An entry of the list is the row in its upper bits and the place in the index in these.
constexpr uint PLACE = (1u << 24) - 1;

// The sum of what the lanes up to this one have; every COUNT neighbours by themselves.
template <int COUNT>
__device__ __forceinline__ int sum_through(int number)
{
    int lane = int(threadIdx.x) % 32;
    #pragma unroll
    for (int distance = 1; distance < COUNT; distance *= 2) {
        int other = __shfl_up_sync(0xffffffffu, number, distance);
        number += lane >= distance ? other : 0;
    }
    return number;
}

// The sum of the numbers of the threads ahead, and that of all threads.
__device__ __forceinline__ int sum_ahead(int number, int& total)
{
    __shared__ int totals[WARPS];
    int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32, sum = sum_through<32>(number);
    if (lane == 31) {
        totals[warp] = sum;
    }
    __syncthreads();
    int ahead = sum - number;
    total = 0;
    #pragma unroll
    for (int w = 0; w < WARPS; ++w) {
        ahead += w < warp ? totals[w] : 0;
        total += totals[w];
    }
    return ahead;
}

// Copies the list's entries for a warp's own rows, row by row, each in the list's order. `begin` and `end` become those
// of the lane's row.
__device__ __forceinline__ void take_own(
    const uint* listed, int taken, uint* ordered, int* cursors, int own_row, int& begin, int& end)
{
    int lane = int(threadIdx.x) % 32, first = int(threadIdx.x) / 32 * 32 / LANES;
    if (lane < WARP_ROWS) {
        cursors[lane] = 0;
    }
    __syncwarp();
    #pragma unroll 1
    for (int fills = 0; fills < 2; ++fills) { // counted first, so that it is known where each row's begin
        for (int k = 0; k < taken; k += 32) {
            uint entry = k + lane < taken ? listed[k + lane] : ~0u;
            int row = int(entry >> 24) - first;
            bool is_own = k + lane < taken && uint(row) < uint(WARP_ROWS);
            uint alike = __match_any_sync(0xffffffffu, is_own ? row : -1);
            int place = __popc(alike & ((1u << lane) - 1)), start = is_own ? cursors[row] : 0;
            __syncwarp();
            if (is_own && fills) {
                ordered[start + place] = entry & PLACE;
            }
            if (is_own && place == 0) {
                cursors[row] = start + __popc(alike);
            }
            __syncwarp();
        }
        if (!fills) {
            int number = lane < WARP_ROWS ? cursors[lane] : 0, sum = sum_through<WARP_ROWS>(number);
            if (lane < WARP_ROWS) {
                cursors[lane] = sum - number;
            }
            __syncwarp();
            begin = cursors[own_row - first];
            __syncwarp();
        }
    }
    end = cursors[own_row - first];
}

extern "C" __global__ void __launch_bounds__(THREADS) scatter_sorted(
    const uint* sorted, const int* starts, VALUES_PARAMETERS BASE_PARAMETER OUT_T* out,
    EPILOGUE_PARAMETERS const Params p)
{
    __shared__ uint listed[LISTED], ordered[WARPS][LISTED];
    __shared__ int ahead[THREADS], begins[THREADS], cursors[WARPS][WARP_ROWS];
    wait_for_previous_grid();
    int block = int(blockIdx.x), above = block / p.column_blocks;
    int outer = above / p.row_blocks, row_block = above % p.row_blocks;
    int thread = int(threadIdx.x), warp = thread / 32, group = thread / LANES, row = row_block * GROUPS + group;
    int column = (block % p.column_blocks * LANES + thread % LANES) * STORE_SIZE;
    bool inside = column < p.width;
    float sums[STORE_SIZE];
    int number = 0;
    #pragma unroll
    for (int u = 0; u < STORE_SIZE; ++u) {
        sums[u] = NEUTRAL;
    }
    for (int slab = 0; slab < p.slabs; slab += THREADS) {
        int start = 0, count = 0, total;
        if (slab + thread < p.slabs) {
            const int* found = starts + row_block * p.slabs + slab + thread;
            start = found[0];
            count = found[p.slabs] - start;
        }
        ahead[thread] = sum_ahead(count, total);
        begins[thread] = (slab + thread) * SLAB + start - ahead[thread];
        __syncthreads();
        for (int done = 0; done < total; done += LISTED) {
            int taken = min(LISTED, total - done);
            for (int k = thread; k < taken; k += THREADS) {
                int found = 0; // the last slab that begins there or before
                #pragma unroll
                for (int step = THREADS / 2; step > 0; step /= 2) {
                    found += ahead[found + step] <= done + k ? step : 0;
                }
                uint entry = sorted[begins[found] + done + k];
                uint place = uint(slab + found) * SLAB + entry % SLAB;
                listed[k] = (entry / SLAB - uint(row_block * GROUPS)) << 24 | place;
            }
            __syncthreads();
            int begin, end;
            take_own(listed, taken, ordered[warp], cursors[warp], group, begin, end);
            for (int k = begin; k < end && inside; k += AHEAD) {
                Pack<VALUE_T, STORE_SIZE> part[AHEAD];
                #pragma unroll
                for (int a = 0; a < AHEAD; ++a) {
                    part[a] = values_at(outer, int(ordered[warp][min(k + a, end - 1)]), column, VALUES_ARGUMENTS p);
                }
                #pragma unroll
                for (int a = 0; a < AHEAD; ++a) {
                    #pragma unroll
                    for (int u = 0; u < STORE_SIZE; ++u) {
                        sums[u] = k + a < end ? COMBINE(sums[u], float(part[a][u])) : sums[u];
                    }
                }
            }
            number += end - begin;
            __syncthreads();
        }
    }
    if (inside && row < p.rows) {
        store_row(sums, number, outer, row, column, BASE_ARGUMENT out, EPILOGUE_ARGUMENTS p);
    }
}
