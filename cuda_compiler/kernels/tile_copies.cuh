// Starts copying the first FIRST of `count` tiles of both operands, each of which is a group of copies.
// `copier.copy_a(stage)` and `copier.copy_b(stage)` start copying the next tile to a stage; with B_CONSTANT nothing
// before this grid writes what the latter reads.
template <int FIRST, typename Copier>
__device__ __forceinline__ void begin_copies(Copier& copier, int count, unsigned char* shared)
{
    if (!B_CONSTANT) {
        wait_for_previous_grid();
    }
    #pragma unroll
    for (int stage = 0; stage < FIRST; ++stage) {
        if (stage < count) {
            copier.copy_b(shared + stage * STAGE_BYTES + A_BYTES);
        }
    }
    if (B_CONSTANT) {
        wait_for_previous_grid();
    }
    #pragma unroll
    for (int stage = 0; stage < FIRST; ++stage) {
        if (stage < count) {
            copier.copy_a(shared + stage * STAGE_BYTES);
        }
        commit_copies();
    }
}
