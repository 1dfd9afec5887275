// What tiled products share. A threadgroup computes TILE_M x TILE_N results in steps of TILE_K; each of its simdgroups,
// four unless said otherwise, has all the rows of its share of the columns, as 8x8 matrices. Operands are staged in
// threadgroup memory as tile_t, sums are float.
#include <metal_simdgroup_matrix>

#ifndef SIMDGROUPS
#define SIMDGROUPS 4
#endif

constant constexpr int THREADS = 32 * SIMDGROUPS;
constant constexpr int SIMDGROUP_COLUMNS = TILE_N / SIMDGROUPS;
constant constexpr int MATRICES_M = TILE_M / 8;
constant constexpr int MATRICES_N = SIMDGROUP_COLUMNS / 8;

// Rows of a staged tile lie 16 bytes further apart than they are long: on a GPU neighbouring rows then fall into
// different banks, and each stays aligned to 16 bytes.
constant constexpr int PAD = 16 / sizeof(tile_t);

constexpr int staged_bytes(int rows, int columns)
{
    return rows * (columns + PAD) * int(sizeof(tile_t));
}

constexpr int larger(int a, int b)
{
    return a > b ? a : b;
}

// Stages ROWS x COLUMNS elements, in chunks of CHUNK neighbours of a row: 16 bytes, or one element of any stride and
// type. Elements beyond `rows` or `columns` become zero; a chunk lies either inside or outside. What lies outside is
// read at the source's first element instead, and dropped, so that threads do not diverge.
template <int ROWS, int COLUMNS, int CHUNK, typename T>
METAL_FUNC void stage(
    threadgroup tile_t* tile, device const T* source, int rows, int columns, int row_stride, int column_stride,
    uint thread_index)
{
    constexpr uint chunks = COLUMNS / CHUNK;
    for (uint i = thread_index; i < ROWS * chunks; i += THREADS) {
        int row = int(i / chunks);
        int column = int(i % chunks * CHUNK);
        bool inside = (row < rows) & (column < columns);
        threadgroup tile_t* target = tile + row * (COLUMNS + PAD) + column;
        if (CHUNK > 1) {
            uint4 chunk = *(device const uint4*)(source + (inside ? row * row_stride + column : 0));
            *(threadgroup uint4*)target = inside ? chunk : uint4(0);
        } else {
            tile_t value = tile_t(source[inside ? row * row_stride + column * column_stride : 0]);
            *target = inside ? value : tile_t(0);
        }
    }
}
