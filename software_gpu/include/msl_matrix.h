// simdgroup_matrix: 8x8 matrices that belong to a simdgroup as a whole. One lane, the leader, does the work of all 32;
// a load or store that others depend on needs a barrier on a GPU too. Elements are kept as float and rounded to the
// matrix's own type when they change.
#pragma once
#include "msl_arithmetic.h"
#include "msl_execution.h"

namespace msl {

typedef float row8 __attribute__((ext_vector_type(8)));

// Each source says whether fibers run its code. None does in the region form, where the code of a matrix runs once for
// its simdgroup: a look at the fiber would part each function of a matrix in two, and keep matrices out of registers.
static bool runs_on_fibers();

MSL_UNCHECKED_INLINE bool leads_simdgroup() {
  if (!runs_on_fibers()) return true;
  const Fiber* fiber = msl_worker->current;
  return !fiber || fiber->lane == 0;
}

// Vectors this wide escape the instrumentation of a checked library, so it is told.
#ifdef MSL_CHECKED
extern "C" void msl_note_access(const void* address, size_t bytes, bool writes);
MSL_INLINE void note_access(const void* address, size_t bytes, bool writes) { msl_note_access(address, bytes, writes); }
#else
MSL_INLINE void note_access(const void*, size_t, bool) {}
#endif

template <class T> using Row = msl::row<T, 8>;

template <class T> MSL_INLINE row8 rounded(row8 row) {
  if constexpr (metal::is_same_v<T, float>) return row;
  else return Row<T>::widened(Row<T>::narrowed(row));
}

// Swaps the off-diagonal blocks of each 2x2 arrangement of blocks, of size 1, 2 and 4 in turn.
MSL_INLINE void transpose(row8 (&rows)[8]) {
#define MSL_SWAP_BLOCKS(SIZE, FIRST, SECOND)                                     \
  for (int i = 0; i < 8; ++i) {                                                  \
    if (i & SIZE) continue;                                                      \
    row8 a = rows[i], b = rows[i + SIZE];                                        \
    rows[i] = __builtin_shufflevector(a, b, MSL_UNWRAP FIRST);                   \
    rows[i + SIZE] = __builtin_shufflevector(a, b, MSL_UNWRAP SECOND);           \
  }
#define MSL_UNWRAP(...) __VA_ARGS__
  MSL_SWAP_BLOCKS(1, (0, 8, 2, 10, 4, 12, 6, 14), (1, 9, 3, 11, 5, 13, 7, 15))
  MSL_SWAP_BLOCKS(2, (0, 1, 8, 9, 4, 5, 12, 13), (2, 3, 10, 11, 6, 7, 14, 15))
  MSL_SWAP_BLOCKS(4, (0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15))
}

}  // namespace msl

namespace metal {

template <class T, int Columns, int Rows> struct simdgroup_matrix {
  static_assert(Columns == 8 && Rows == 8, "a simdgroup_matrix is 8x8");
  static_assert(is_floating_point_v<T>, "a simdgroup_matrix holds half, bfloat or float");
  typedef T msl_element;
  msl::row8 rows[8];

  simdgroup_matrix() = default;
  MSL_INLINE explicit simdgroup_matrix(T diagonal) {
    for (int i = 0; i < 8; ++i)
      for (int j = 0; j < 8; ++j) rows[i][j] = i == j ? (float)diagonal : 0.0f;
  }
};

typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;

template <class T, int Columns, int Rows> MSL_INLINE simdgroup_matrix<T, Columns, Rows> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, Columns, Rows> result;
  for (int i = 0; i < 8; ++i) result.rows[i] = (msl::row8)(float)value;
  return result;
}

template <class P> using msl_pointee = remove_cv_t<remove_reference_t<decltype(*(P) nullptr)>>;

// Loads in rows of eight so that clang converts a whole row at once.
template <class T, class P>
MSL_INLINE void simdgroup_load(simdgroup_matrix<T, 8, 8>& matrix, P source, ulong elements_per_row = 8,
                               ulong2 origin = (ulong2)(0ul), bool transpose = false) {
  static_assert(is_same_v<msl_pointee<P>, T>, "simdgroup_load needs a pointer to the matrix's own element type");
  if (!msl::leads_simdgroup()) return;
  source += origin.y * elements_per_row + origin.x;
  for (int i = 0; i < 8; ++i) {
    typename msl::Row<T>::type row;
    msl::note_access((const void*)(source + i * elements_per_row), sizeof(row), false);
    __builtin_memcpy(&row, (const void*)(source + i * elements_per_row), sizeof(row));
    matrix.rows[i] = msl::Row<T>::widened(row);
  }
  if (transpose) msl::transpose(matrix.rows);
}

template <class T, class P>
MSL_INLINE void simdgroup_store(const simdgroup_matrix<T, 8, 8>& matrix, P target, ulong elements_per_row = 8,
                                ulong2 origin = (ulong2)(0ul), bool transpose = false) {
  static_assert(is_same_v<msl_pointee<P>, T>, "simdgroup_store needs a pointer to the matrix's own element type");
  if (!msl::leads_simdgroup()) return;
  target += origin.y * elements_per_row + origin.x;
  simdgroup_matrix<T, 8, 8> stored = matrix;
  if (transpose) msl::transpose(stored.rows);
  for (int i = 0; i < 8; ++i) {
    typename msl::Row<T>::type row = msl::Row<T>::narrowed(stored.rows[i]);
    msl::note_access((const void*)(target + i * elements_per_row), sizeof(row), true);
    __builtin_memcpy((void*)(target + i * elements_per_row), &row, sizeof(row));
  }
}

template <class D, class A, class B, class C>
MSL_INLINE void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a,
                                              const simdgroup_matrix<B, 8, 8>& b, const simdgroup_matrix<C, 8, 8>& c) {
  if (!msl::leads_simdgroup()) return;
  simdgroup_matrix<D, 8, 8> result;
  for (int i = 0; i < 8; ++i) {
    msl::row8 sum = c.rows[i];
    for (int k = 0; k < 8; ++k) sum = msl::fused((msl::row8)a.rows[i][k], b.rows[k], sum);
    result.rows[i] = msl::rounded<D>(sum);
  }
  d = result;
}
template <class D, class A, class B>
MSL_INLINE void simdgroup_multiply(simdgroup_matrix<D, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a,
                                   const simdgroup_matrix<B, 8, 8>& b) {
  simdgroup_multiply_accumulate(d, a, b, make_filled_simdgroup_matrix<D, 8, 8>((D)0));
}

}  // namespace metal
