// What happens to the rows of a block of threads: parts of several warps are added, then parts of several blocks.
#if SPLITS > 1
// Arrivals at each tile of the result; the last one leaves zero behind.
__device__ uint arrivals[RESULT_TILES];
#endif

// The tile's number, and where the parts of a split lie: results, and for each row the largest score and the sum.
__device__ __forceinline__ int tile_number() { return int(blockIdx.z * gridDim.x + blockIdx.x); }
__device__ __forceinline__ float2* part_results(float* partial, int split)
{
    return reinterpret_cast<float2*>(partial + ((long long)tile_number() * SPLITS + split) * TILE_M * V_WIDTH);
}
__device__ __forceinline__ float2* part_sums(float* partial, int split)
{
    float* sums = partial + (long long)RESULT_TILES * SPLITS * TILE_M * V_WIDTH;
    return reinterpret_cast<float2*>(sums) + ((long long)tile_number() * SPLITS + split) * TILE_M;
}

// Two results of a row in the tile, with the largest score they are relative to and the sum of the weights.
__device__ __forceinline__ void emit_pair(
    int place, int column, float left, float right, float top, float sum, int row, int batch, int group, int splits,
    SINK_PARAMETER float* partial, OUT_T* out, EPILOGUE_PARAMETERS const Params& p)
{
#if SPLITS > 1
    if (splits > 1) {
        if (row + place >= p.rows * SHARED) {
            return;
        }
        int split = int(blockIdx.y);
        __stcg(part_results(partial, split) + (place * V_WIDTH + column) / 2, make_float2(left, right));
        if (column == 0) {
            __stcg(part_sums(partial, split) + place, make_float2(top, sum));
        }
        return;
    }
#endif
    int head = group * SHARED + min(row + place, p.rows * SHARED - 1) / p.rows;
    sum = whole_sum(sum, top, head, SINK_ARGUMENT p);
    float factor = sum == 0.0f ? 0.0f : 1.0f / sum;
    store_pair(
        p.rows, row + place, column, {left * factor, right * factor}, batch, group, out, EPILOGUE_ARGUMENTS p);
}

#if SPLITS > 1
// Adds up what the splits have of one tile, in the block that arrives last.
__device__ __forceinline__ void add_parts(
    float* shared, int row, int batch, int group, int splits, SINK_PARAMETER float* partial, OUT_T* out,
    EPILOGUE_PARAMETERS const Params& p)
{
    if (!is_last_of(splits, arrivals[tile_number()])) {
        return;
    }
    int count = min(TILE_M, p.rows * SHARED - row);
    for (int place = int(threadIdx.x) / 32; place < count; place += WARPS) { // a split's weight in each row
        float top = CLOSED, sum = 0.0f;
        for (int split = int(threadIdx.x) % 32; split < splits; split += 32) {
            top = fmaxf(top, __ldcg(part_sums(partial, split) + place).x);
        }
        top = warp_max<32>(top);
        for (int split = int(threadIdx.x) % 32; split < splits; split += 32) {
            float2 part = __ldcg(part_sums(partial, split) + place);
            float weight = exp2f(part.x - top);
            shared[place * SPLITS + split] = part.y == 0.0f ? 0.0f : weight;
            sum += part.y * weight;
        }
        sum = whole_sum(warp_sum<32>(sum), top, group * SHARED + (row + place) / p.rows, SINK_ARGUMENT p);
        for (int split = int(threadIdx.x) % 32; split < splits; split += 32) {
            shared[place * SPLITS + split] *= sum == 0.0f ? 0.0f : 1.0f / sum;
        }
    }
    __syncthreads();
    for (int index = int(threadIdx.x); index < count * V_WIDTH / 2; index += THREADS) {
        int place = index / (V_WIDTH / 2);
        float left = 0.0f, right = 0.0f;
        #pragma unroll 8
        for (int split = 0; split < splits; ++split) {
            float weight = shared[place * SPLITS + split];
            float2 part = weight == 0.0f ? make_float2(0.0f, 0.0f) : __ldcg(part_results(partial, split) + index);
            left += weight * part.x;
            right += weight * part.y;
        }
        int column = index % (V_WIDTH / 2) * 2;
        store_pair(p.rows, row + place, column, {left, right}, batch, group, out, EPILOGUE_ARGUMENTS p);
    }
}
#endif

__device__ __forceinline__ void finish_rows(
    const Rows& rows, float* shared, int row, int batch, int group, int splits, SINK_PARAMETER float* partial,
    OUT_T* out, EPILOGUE_PARAMETERS const Params& p)
{
    int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32, part = warp % WARPS_L;
#if WARPS_L == 1
    #pragma unroll
    for (int half_row = 0; half_row < 2; ++half_row) {
        int place = warp * 16 + lane / 4 + half_row * 8;
        #pragma unroll
        for (int e = 0; e < V_WIDTH / 8; ++e) {
            emit_pair(place, e * 8 + lane % 4 * 2, rows.result[e][half_row * 2], rows.result[e][half_row * 2 + 1],
                      rows.top[half_row], rows.sum[half_row], row, batch, group, splits, SINK_ARGUMENT partial, out,
                      EPILOGUE_ARGUMENTS p);
        }
    }
#else
    static_assert(WARPS_L * TILE_M * V_WIDTH * 4 <= STAGES * STAGE_BYTES, "parts are staged where the operands were");
    __shared__ float tops[WARPS_L][TILE_M], sums[WARPS_L][TILE_M];
    __syncthreads();
    #pragma unroll
    for (int half_row = 0; half_row < 2; ++half_row) {
        int place = warp / WARPS_L * 16 + lane / 4 + half_row * 8;
        tops[part][place] = rows.top[half_row];
        sums[part][place] = rows.sum[half_row];
        #pragma unroll
        for (int e = 0; e < V_WIDTH / 8; ++e) {
            float* target = shared + (part * TILE_M + place) * V_WIDTH + e * 8 + lane % 4 * 2;
            const float* pair = rows.result[e] + half_row * 2;
            *reinterpret_cast<float2*>(target) = make_float2(pair[0], pair[1]);
        }
    }
    __syncthreads();
    int count = min(TILE_M, p.rows * SHARED - row);
    for (int index = int(threadIdx.x); index < count * V_WIDTH / 2; index += THREADS) {
        int place = index / (V_WIDTH / 2), column = index % (V_WIDTH / 2) * 2;
        float top = tops[0][place], sum = 0.0f, left = 0.0f, right = 0.0f;
        #pragma unroll
        for (int other = 1; other < WARPS_L; ++other) {
            top = fmaxf(top, tops[other][place]);
        }
        #pragma unroll
        for (int other = 0; other < WARPS_L; ++other) {
            float weight = exp2f(tops[other][place] - top);
            const float* source = shared + (other * TILE_M + place) * V_WIDTH + column;
            sum += weight * sums[other][place];
            left += weight * source[0];
            right += weight * source[1];
        }
        emit_pair(
            place, column, left, right, top, sum, row, batch, group, splits, SINK_ARGUMENT partial, out,
            EPILOGUE_ARGUMENTS p);
    }
#endif
#if SPLITS > 1
    if (splits > 1) {
        add_parts(shared, row, batch, group, splits, SINK_ARGUMENT partial, out, EPILOGUE_ARGUMENTS p);
    }
#endif
}
