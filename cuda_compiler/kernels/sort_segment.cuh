// Sorts segments of long rows, of each of which the first RUN entries are kept: [rows, segments, RUN].
// Grid: rows in x, segments in y.
extern "C" __global__ void __launch_bounds__(THREADS) sort_segment(
    INPUT_PARAMETERS Entry* kept, const Params p)
{
    wait_for_previous_grid();
    sort_segments(INPUT_ARGUMENTS p);
    for (int at = int(threadIdx.x); at < RUN; at += THREADS) {
        kept[((long long)blockIdx.x * gridDim.y + blockIdx.y) * RUN + at] = entries[at];
    }
}
