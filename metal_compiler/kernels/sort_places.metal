// Places of the first entries of sorted rows [rows, length]. Grid: places in x.
kernel void sort_places(
    device const Entry* runs [[buffer(0)]],
    device out_t* out [[buffer(1)]],
    EPILOGUE_BUFFERS
    constant Params& p [[buffer(PARAMS_BUFFER)]],
    uint position [[thread_position_in_grid]])
{
    int row = int(position) / p.count, rank = int(position) % p.count;
    if (row >= p.rows) {
        return;
    }
    int outer = row / p.inner, inner = row % p.inner, place = place_of(runs[row * p.length + rank]);
    out[output_index(outer, inner, rank, p)] = out_t(epilogue(place, outer, inner, rank, EPILOGUE_ARGUMENTS p));
}
