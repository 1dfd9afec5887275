// Stores the combined values of a row, with or without what was in the row before.
#if HAS_BASE
#define BASE_PARAMETER const b_t* base,
#define BASE_ARGUMENT base,
#else
#define BASE_PARAMETER
#define BASE_ARGUMENT
#endif

__device__ __forceinline__ float combine_prod(float a, float b) { return a * b; }

// Stores STORE_SIZE columns of a row, for which so many values were combined.
__device__ __forceinline__ void store_row(
    const float (&sums)[STORE_SIZE], int number, int outer, int row, int column, BASE_PARAMETER OUT_T* out,
    EPILOGUE_PARAMETERS const Params& p)
{
    float value[STORE_SIZE];
#if HAS_BASE
    const b_t* start = base + (long long)outer * p.base_outer + (long long)row * p.base_row;
    Pack<b_t, STORE_SIZE> own = load_pack<STORE_SIZE>(start + (long long)column * p.base_column);
#endif
    #pragma unroll
    for (int u = 0; u < STORE_SIZE; ++u) {
#if HAS_BASE
        float before = float(own[u]);
#else
        float before = FILL;
#endif
        float result = INCLUDED ? COMBINE(before, sums[u]) : sums[u];
        if (MEAN) {
            result /= float(number + INCLUDED);
        }
        value[u] = number ? result : before;
    }
    finish(value, outer, row, column, out, EPILOGUE_ARGUMENTS p);
}
