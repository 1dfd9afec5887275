// What one warp does with a piece of 16 positions for all rows: scores are keys by queries, 16 x 8 for each set of eight rows,
// and results are values transposed by weights transposed, so that few rows leave no part of a tensor core idle.
constexpr int THREADS = WARPS * 32, PIECE = 16;
constexpr int QK_WIDTH = (HEAD_SIZE + 15) / 16 * 16, V_WIDTH = (VALUE_SIZE + 15) / 16 * 16;
constexpr int ROWS = SHARED * OWN_ROWS, SETS = (ROWS + 7) / 8;
constexpr int K_PITCH = QK_WIDTH * 2 + 16, V_PITCH = V_WIDTH * 2 + 16; // bytes from row to row, so that banks differ
constexpr int K_BYTES = PIECE * K_PITCH, SLOT_BYTES = K_BYTES + PIECE * V_PITCH;
constexpr int Q_PITCH = QK_WIDTH + 8, RESULT_PITCH = V_WIDTH + 4; // elements from row to row
static_assert(SETS * 8 * RESULT_PITCH * 4 <= DEPTH * SLOT_BYTES, "a warp's results lie where its pieces were");

// Of each set a lane has the rows 2 * (l % 4) and the next: scores at the positions l / 4 and l / 4 + 8, the two rows side
// by side; results at the columns l / 4 and l / 4 + 8 of each 16. The sums are over the lane's own positions.
struct Rows {
    float result[SETS][V_WIDTH / 16][4], top[SETS][2], sum[SETS][2];
};
typedef float Scores[SETS][4];
typedef uint Queries[SETS][QK_WIDTH / 16][2];

__device__ __forceinline__ int lane_row(int set, int u) { return set * 8 + int(threadIdx.x) % 4 * 2 + u % 2; }
__device__ __forceinline__ int lane_place(int u) { return int(threadIdx.x) % 32 / 4 + u / 2 * 8; }

// A barrier in shared memory that counts bytes copied in the background.
__device__ __forceinline__ void init_barrier(uint64* barrier)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}
__device__ __forceinline__ void expect_bytes(uint64* barrier, int bytes)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
#endif
}
__device__ __forceinline__ void wait_for_bytes(uint64* barrier, int phase)
{
#if __CUDA_ARCH__ >= 900
    uint done = 0;
    while (!done) {
        asm volatile("{\n\t.reg .pred done;\n\t"
                     "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n\tselp.u32 %0, 1, 0, done;\n\t}"
                     : "=r"(done)
                     : "r"(shared_address(barrier)), "r"(phase & 1)
                     : "memory");
    }
#endif
}

// Starts copying a row, or writes zeros where `valid` is false.
template <int SIZE>
__device__ __forceinline__ void copy_row(unsigned char* target, const tile_t* source, bool valid, uint64* barrier)
{
#if __CUDA_ARCH__ >= 900
    if (valid) {
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                         shared_address(target)),
                     "l"(source), "n"(SIZE * 2), "r"(shared_address(barrier))
                     : "memory");
        return;
    }
#endif
    for (int at = 0; at < SIZE * 2; at += 16) {
        *reinterpret_cast<uint4*>(target + at) = make_uint4(0, 0, 0, 0);
    }
}

// Starts copying a piece into a slot, a row of keys or of values by each lane. Columns behind a head are left alone.
__device__ __forceinline__ void copy_piece(
    unsigned char* slot, uint64* barrier, const tile_t* k, const tile_t* v, int position, const Params& p)
{
    int lane = int(threadIdx.x) % 32, row = lane % PIECE, rows = min(PIECE, LENGTH - position);
    if (lane == 0) {
        expect_bytes(barrier, max(rows, 0) * (HEAD_SIZE + VALUE_SIZE) * 2);
    }
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); // behind what this lane wrote there
#endif
    __syncwarp();
    if (lane < PIECE) {
        copy_row<HEAD_SIZE>(slot + row * K_PITCH, k + (long long)(position + row) * p.k_row, row < rows, barrier);
    } else {
        const tile_t* source = v + (long long)(position + row) * p.v_row;
        copy_row<VALUE_SIZE>(slot + K_BYTES + row * V_PITCH, source, row < rows, barrier);
    }
}

// Zeros behind a head in the rows of a slot, which copies leave alone.
__device__ __forceinline__ void clear_padding(unsigned char* slot)
{
    int lane = int(threadIdx.x) % 32, row = lane % PIECE;
    if (HEAD_SIZE < QK_WIDTH && lane < PIECE) {
        *reinterpret_cast<uint4*>(slot + row * K_PITCH + HEAD_SIZE * 2) = make_uint4(0, 0, 0, 0);
    }
    if (VALUE_SIZE < V_WIDTH && lane >= PIECE) {
        *reinterpret_cast<uint4*>(slot + K_BYTES + row * V_PITCH + VALUE_SIZE * 2) = make_uint4(0, 0, 0, 0);
    }
}

// What the mask adds to the scores of a piece; nothing, where the mask leaves it alone.
__device__ __forceinline__ void load_mask(Scores& added, const mask_t* mask, int position, bool is_masked, const Params& p)
{
    #pragma unroll
    for (int set = 0; set < SETS; ++set) {
        #pragma unroll
        for (int u = 0; u < 4; ++u) {
            added[set][u] = 0.0f;
#if MASK
            int row = min(lane_row(set, u), ROWS - 1), at = min(position + lane_place(u), LENGTH - 1);
            const mask_t* source = mask + (long long)(row / OWN_ROWS) * p.mask_head +
                                   (long long)(row % OWN_ROWS) * p.mask_row + (long long)at * p.mask_step;
            if (is_masked) {
                added[set][u] = mask_value(*source);
            }
#endif
        }
    }
}

__device__ __forceinline__ void multiply_keys(Scores& score, const Queries& query, const unsigned char* keys)
{
    int lane = int(threadIdx.x) % 32;
    uint first = shared_address(keys) + lane % 16 * K_PITCH + lane / 16 * 16;
    Scores odd = {};
    #pragma unroll
    for (int set = 0; set < SETS; ++set) {
        score[set][0] = score[set][1] = score[set][2] = score[set][3] = 0.0f;
    }
    #pragma unroll
    for (int d = 0; d < QK_WIDTH / 16; ++d) {
        uint part[4];
        load_matrices(part, first + d * 32);
        #pragma unroll
        for (int set = 0; set < SETS; ++set) {
            TensorCores<tile_t>::multiply(d % 2 ? odd[set] : score[set], part, query[set][d][0], query[set][d][1]);
        }
    }
    #pragma unroll
    for (int set = 0; set < SETS; ++set) {
        #pragma unroll
        for (int u = 0; u < 4; ++u) {
            score[set][u] += odd[set][u];
        }
    }
}

__device__ __forceinline__ float place_max(float value)
{
    value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 4));
    value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 8));
    return fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 16));
}

// Scores become weights, in powers of two, beside the largest score so far.
__device__ __forceinline__ void soften(Rows& rows, Scores& score, const Scores& added, int position)
{
    constexpr float LOG2_E = 1.44269504088896341f;
    #pragma unroll
    for (int set = 0; set < SETS; ++set) {
        #pragma unroll
        for (int u = 0; u < 4; ++u) {
            bool closed = position + lane_place(u) >= LENGTH || added[set][u] <= MASK_CLOSED;
            score[set][u] = closed ? CLOSED : score[set][u] * (SCALE * LOG2_E) + added[set][u] * LOG2_E;
        }
        #pragma unroll
        for (int u = 0; u < 2; ++u) {
            float top = fmaxf(rows.top[set][u], place_max(fmaxf(score[set][u], score[set][u + 2])));
            float shrink = exp2f(rows.top[set][u] - top); // one where both are CLOSED, and all is zero
            #pragma unroll
            for (int at = u; at < 4; at += 2) {
                score[set][at] = score[set][at] == CLOSED ? 0.0f : exp2f(score[set][at] - top);
            }
            rows.top[set][u] = top;
            rows.sum[set][u] = rows.sum[set][u] * shrink + score[set][u] + score[set][u + 2];
            #pragma unroll
            for (int e = 0; e < V_WIDTH / 16; ++e) {
                rows.result[set][e][u] *= shrink;
                rows.result[set][e][u + 2] *= shrink;
            }
        }
    }
}

__device__ __forceinline__ uint transposed(uint matrix)
{
    uint result = 0;
#if __CUDA_ARCH__ >= 750
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(matrix));
#endif
    return result;
}

// result += values * weight
__device__ __forceinline__ void add_values(Rows& rows, const Scores& weight, const unsigned char* values)
{
    int lane = int(threadIdx.x) % 32;
    uint first = shared_address(values) + (lane / 16 * 8 + lane % 8) * V_PITCH + lane / 8 % 2 * 16;
    uint part[SETS][2];
    #pragma unroll
    for (int set = 0; set < SETS; ++set) {
        part[set][0] = transposed(pack_pair(weight[set][0], weight[set][1]));
        part[set][1] = transposed(pack_pair(weight[set][2], weight[set][3]));
    }
    #pragma unroll
    for (int e = 0; e < V_WIDTH / 16; ++e) {
        uint value[4];
        load_matrices_transposed(value, first + e * 32);
        #pragma unroll
        for (int set = 0; set < SETS; ++set) {
            TensorCores<tile_t>::multiply(rows.result[set][e], value, part[set][0], part[set][1]);
        }
    }
}
