// Products of groups of rows, each by a matrix of its own: a simdgroup computes a result of a row, its lanes along k;
// or, where neighbouring columns lie side by side (K_FIRST 0), a lane one each. Ends that do not ascend are brought
// between the bounds; rows behind the last group give zeros. Grid: columns, rows. Block: 32 * SIMDGROUPS.
METAL_FUNC int group_of(int row, device const end_t* ends, constant Params& p)
{
    int group = 0;
    while (group < p.groups && ends[group * p.end_step] <= end_t(row)) {
        ++group;
    }
    return group;
}

kernel void grouped_matmul(
    device const a_t* a [[buffer(0)]],
    device const a_t* b [[buffer(1)]],
    device const end_t* ends [[buffer(2)]],
    device out_t* out [[buffer(3)]],
    EPILOGUE_BUFFERS
    constant Params& p [[buffer(PARAMS_BUFFER)]],
    uint3 place [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]])
{
    int row = int(place.y);
    int unit = int(place.x) * SIMDGROUPS + int(simdgroup);
    int col = K_FIRST ? unit : unit * 32 + int(lane);
    int group = group_of(row, ends, p);
    int depth = group < p.groups && col < p.n ? p.k : 0;
    device const a_t* x = a + row * p.a_row;
    device const a_t* line = b + (depth > 0 ? group * p.b_group + col * p.b_col : 0);
    float sum = 0.0f;
    for (int k = K_FIRST ? int(lane) : 0; k < depth; k += K_FIRST ? 32 : 1) {
        sum += float(x[k * p.a_k]) * float(line[k * p.b_k]);
    }
    float total = simd_sum(sum);
    float sums[1];
    sums[0] = K_FIRST ? total : sum;
    if (col < p.n && (!K_FIRST || lane == 0)) {
        store_group(sums, 1, 0, row, col, out, EPILOGUE_ARGUMENTS p);
    }
}
