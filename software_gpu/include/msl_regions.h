// What the region form of a kernel uses. A row is a simdgroup, or the threads of one x row; its lanes are looped over.
#pragma once
#include "msl_collectives.h"

namespace msl {

constexpr uint storage_stride = max_threads + 16;  // arrays of 4096 bytes would share cache sets

#define MSL_LAMBDA __attribute__((always_inline))
#define MSL_VECTORIZE _Pragma("clang loop vectorize(assume_safety)")

template <class Array> struct spread_shape {
  typedef Array base;
  static constexpr uint count = 1;
};
template <class T, size_t N> struct spread_shape<T[N]> {
  typedef typename spread_shape<T>::base base;
  static constexpr uint count = N * spread_shape<T>::count;
};

// A thread's array whose elements lie `Stride` apart, those of the next thread beside them, so that a loop over
// threads reads whole vectors.
template <class Array, uint Stride> struct Spread;
template <class T, size_t N, uint Stride> struct Spread<T[N], Stride> {
  typedef typename spread_shape<T>::base base;
  base* first;
  MSL_INLINE decltype(auto) operator[](size_t i) const {
    if constexpr (spread_shape<T>::count == 1) return (first[i * Stride]);
    else return Spread<T, Stride>{first + i * (spread_shape<T>::count * Stride)};
  }
  MSL_INLINE void operator=(const T (&values)[N]) const {
    for (size_t i = 0; i < N; ++i) {
      if constexpr (spread_shape<T>::count == 1) first[i * Stride] = values[i];
      else (*this)[i] = values[i];
    }
  }
};

// Fills a thread's array, wherever it is kept.
template <class T, uint Stride> MSL_INLINE void fill(const Spread<T, Stride>& array, const T& values) { array = values; }
template <class T, size_t N> MSL_INLINE void fill(T (&array)[N], const T (&values)[N]) {
  __builtin_memcpy(array, values, sizeof(values));
}

// The lanes of a simdgroup for which every mask holds.
template <class... Masks> MSL_INLINE uint active_lanes(const Masks*... masks) {
  uint active = 0;
  for (uint i = 0; i < simd_width; ++i) active |= (uint)((masks[i] && ...) ? 1 : 0) << i;
  return active;
}

MSL_INLINE bool any_lane(const bool* mask, uint lanes) {
  bool found = false;
  for (uint i = 0; i < lanes; ++i) found |= mask[i];
  return found;
}

}  // namespace msl
