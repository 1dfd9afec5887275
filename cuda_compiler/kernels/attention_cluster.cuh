// How parts of a result are put together: those of a block's warps in its own shared memory, those of a cluster's
// blocks by writing each slice of the result into the shared memory of the block that finishes it, those of several
// clusters through memory, where the last block to arrive at a slice finishes it.
constexpr int RESULTS = ROWS * V_WIDTH;
constexpr int SLICE = (RESULTS / 4 + CLUSTER - 1) / CLUSTER * 4; // the results that a block finishes

// What warps of a block leave for each other, and what all blocks of the cluster send to this one.
struct Parts {
    float4 slice[CLUSTER][SLICE / 4];
    float2 block[CLUSTER][ROWS];
    float top[WARPS][SETS * 8], sum[WARPS][SETS * 8];
    uint64 arrived; // a barrier, of which one phase waits for all that the cluster sends
};

// Makes this block ready for what others send; before it announces itself to the cluster.
__device__ __forceinline__ void expect_parts(Parts& parts)
{
    if (CLUSTER > 1 && threadIdx.x == 0) {
        int own = max(0, min(SLICE, RESULTS - int(blockIdx.x) % CLUSTER * SLICE)); // results that it finishes
        make_barrier(shared_address(&parts.arrived), 1);
        publish_barriers();
        arrive_and_expect(shared_address(&parts.arrived), CLUSTER * (own * 4 + ROWS * int(sizeof(float2))));
    }
}

#if CLUSTERS > 1
// Arrivals at each slice of each result; the last one leaves zero behind.
__device__ uint arrivals[RESULT_TILES * CLUSTER];
#endif

// Stores a value in the shared memory of the block of the cluster that finishes it; without a cluster, in its own.
template <typename T>
__device__ __forceinline__ void give(const Parts& parts, T* target, int owner, const T& value)
{
#if CLUSTER > 1
    send_to_cluster(target, owner, value, &parts.arrived);
#else
    *target = value;
#endif
}

// Adds up the results of `busy` warps of the block, at most MOST, and sends each slice to the block that finishes it.
template <int MOST>
__device__ __forceinline__ void hand_over(Parts& parts, unsigned char* ring, int rank, int busy)
{
    float weight[MOST];
    // The last threads send sums, as the first have results.
    for (int index = THREADS - 1 - int(threadIdx.x); index < ROWS * CLUSTER; index += THREADS) {
        int row = index % ROWS, owner = index / ROWS;
        float top = weigh_warps<MOST>(weight, parts, row, busy), sum = 0.0f;
        #pragma unroll
        for (int warp = 0; warp < MOST; ++warp) {
            sum += warp < busy ? weight[warp] * parts.sum[warp][row] : 0.0f;
        }
        give(parts, &parts.block[rank][row], owner, make_float2(top, sum));
    }
    for (int index = int(threadIdx.x) * 4; index < RESULTS; index += THREADS * 4) {
        int row = index / V_WIDTH, column = index % V_WIDTH;
        float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        weigh_warps<MOST>(weight, parts, row, busy);
        #pragma unroll
        for (int warp = 0; warp < MOST; ++warp) {
            if (warp < busy) {
                const float* source = warp_results(ring, warp) + row * RESULT_PITCH + column;
                float4 part = *reinterpret_cast<const float4*>(source);
                total.x += weight[warp] * part.x;
                total.y += weight[warp] * part.y;
                total.z += weight[warp] * part.z;
                total.w += weight[warp] * part.w;
            }
        }
        give(parts, &parts.slice[rank][index % SLICE / 4], index / SLICE, total);
    }
}

// Two neighbouring results, with the largest score they are relative to and the sum of the weights.
struct Pair {
    float left, right, top, sum;

    // Adds up `count` parts, at most MOST.
    template <int MOST, typename Sums, typename Results>
    __device__ __forceinline__ void add_up(int count, Sums sums, Results results)
    {
        float2 part[MOST], both[MOST];
        top = CLOSED;
        left = right = sum = 0.0f;
        #pragma unroll
        for (int other = 0; other < MOST; ++other) {
            part[other] = other < count ? sums(other) : make_float2(CLOSED, 0.0f);
            both[other] = other < count ? results(other) : make_float2(0.0f, 0.0f);
            top = fmaxf(top, part[other].x);
        }
        #pragma unroll
        for (int other = 0; other < MOST; ++other) {
            float weight = power_of_two(part[other].x - top);
            sum += weight * part[other].y;
            left += weight * both[other].x;
            right += weight * both[other].y;
        }
    }

    __device__ __forceinline__ void store(
        int index, int batch, int group, SINK_PARAMETER OUT_T* out, EPILOGUE_PARAMETERS const Params& p) const
    {
        float whole = whole_sum(sum, top, group * SHARED + index / V_WIDTH / OWN_ROWS, SINK_ARGUMENT p);
        float factor = whole == 0.0f ? 0.0f : quotient(1.0f, whole);
        store_pair(
            OWN_ROWS, index / V_WIDTH, index % V_WIDTH, {left * factor, right * factor}, batch, group, out,
            EPILOGUE_ARGUMENTS p);
    }
};

// Where in memory a cluster has its part of a tile's results and, for each of its blocks, what they are relative to.
__device__ __forceinline__ float2* kept_results(float* partial, int cluster)
{
    return reinterpret_cast<float2*>(partial) + ((long long)blockIdx.z * CLUSTERS + cluster) * (CLUSTER * SLICE / 2);
}
__device__ __forceinline__ float2* kept_sums(float* partial, int cluster, int rank)
{
    float2* sums = reinterpret_cast<float2*>(partial) + (long long)RESULT_TILES * CLUSTERS * (CLUSTER * SLICE / 2);
    return sums + (((long long)blockIdx.z * CLUSTERS + cluster) * CLUSTER + rank) * ROWS;
}

// Puts together what the blocks of a cluster have of this block's slice; then what several clusters have of it.
__device__ __forceinline__ void finish_slice(
    Parts& parts, int rank, int clusters, int batch, int group, SINK_PARAMETER float* partial, OUT_T* out,
    EPILOGUE_PARAMETERS const Params& p)
{
    int first = rank * SLICE, count = min(SLICE, RESULTS - first);
    for (int place = int(threadIdx.x) * 2; place < count; place += THREADS * 2) {
        int index = first + place, row = index / V_WIDTH;
        Pair pair;
        pair.add_up<CLUSTER>(
            CLUSTER, [&](int other) { return parts.block[other][row]; },
            [&](int other) { return reinterpret_cast<const float2*>(parts.slice[other])[place / 2]; });
        if (clusters == 1) {
            pair.store(index, batch, group, SINK_ARGUMENT out, EPILOGUE_ARGUMENTS p);
            continue;
        }
        int cluster = int(blockIdx.x) / CLUSTER;
        __stcg(kept_results(partial, cluster) + index / 2, make_float2(pair.left, pair.right));
        if (place == 0 || index % V_WIDTH == 0) {
            __stcg(kept_sums(partial, cluster, rank) + row, make_float2(pair.top, pair.sum));
        }
    }
#if CLUSTERS > 1
    if (clusters == 1) {
        return;
    }
    if (!is_last_of(clusters, arrivals[int(blockIdx.z) * CLUSTER + rank])) {
        return;
    }
    for (int place = int(threadIdx.x) * 2; place < count; place += THREADS * 2) {
        int index = first + place, row = index / V_WIDTH;
        Pair pair;
        pair.add_up<CLUSTERS>(
            clusters, [&](int other) { return __ldcg(kept_sums(partial, other, rank) + row); },
            [&](int other) { return __ldcg(kept_results(partial, other) + index / 2); });
        pair.store(index, batch, group, SINK_ARGUMENT out, EPILOGUE_ARGUMENTS p);
    }
#endif
}
