// Where the keys and values from a position on lie: in order, or in pages of PAGE positions each, which are looked up.
#ifndef PAGE
#define PAGE_PARAMETERS
#define PAGE_ARGUMENTS
#endif
struct Place {
    long long key, value;
};
__device__ __forceinline__ Place place_of(
    int batch, int position, long long k_row, long long v_row, PAGE_PARAMETERS const Params& p)
{
#ifdef PAGE
    long long page = page_of(0, 0, batch, position / PAGE, PAGE_ARGUMENTS p);
    return {page * K_PAGE + position % PAGE * k_row, page * V_PAGE + position % PAGE * v_row};
#else
    return {position * k_row, position * v_row};
#endif
}
