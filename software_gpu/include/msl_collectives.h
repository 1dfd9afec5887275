// simd_*, quad_* and the barriers. Each operation is written once, over the 32 lanes of a simdgroup; fibers call it
// from the last lane to arrive, the region form straight away, so both round alike. Lanes that have returned or sit
// out a branch take no part.
#pragma once
#include "msl_execution.h"
#include "msl_math.h"

namespace msl {

// Pairwise halving: log2(32) steps, each of them vectorised.
template <class T, class F> MSL_INLINE T fold(const T* values, uint active, T neutral, F combine) {
  T partial[simd_width];
  for (uint i = 0; i < simd_width; ++i) partial[i] = active >> i & 1 ? values[i] : neutral;
  for (uint half_width = simd_width / 2; half_width; half_width /= 2)
    for (uint i = 0; i < half_width; ++i) partial[i] = combine(partial[i], partial[i + half_width]);
  return partial[0];
}

template <class T> constexpr T lowest_value = (T)metal::numeric_limits<element<T>>::lowest();
template <class T> constexpr T highest_value = (T)metal::numeric_limits<element<T>>::max();
template <> constexpr float lowest_value<float> = -__builtin_inff();
template <> constexpr float highest_value<float> = __builtin_inff();
template <> constexpr half lowest_value<half> = (half)-__builtin_inff();
template <> constexpr half highest_value<half> = (half)__builtin_inff();
template <> constexpr bfloat lowest_value<bfloat> = (bfloat)-__builtin_inff();
template <> constexpr bfloat highest_value<bfloat> = (bfloat)__builtin_inff();

// An operation turns `values` into its results in place; `operands` holds each lane's second argument.
#define MSL_FOLD(NAME, NEUTRAL, RESULT)                                                        \
  struct NAME {                                                                                \
    template <class T> MSL_INLINE static void apply(T* values, const uint*, uint active) {     \
      T result = fold(values, active, NEUTRAL, [](T a, T b) -> T { return RESULT; });          \
      for (uint i = 0; i < simd_width; ++i) values[i] = result;                                \
    }                                                                                          \
  };
MSL_FOLD(sum, (T)0, a + b)
MSL_FOLD(product, (T)1, a * b)
MSL_FOLD(maximum, lowest_value<T>, metal::max(a, b))
MSL_FOLD(minimum, highest_value<T>, metal::min(a, b))
MSL_FOLD(bit_and, (T)~(T)0, a & b)
MSL_FOLD(bit_or, (T)0, a | b)
MSL_FOLD(bit_xor, (T)0, a ^ b)

struct first_active {
  template <class T> MSL_INLINE static void apply(T* values, const uint*, uint active) {
    T result = values[active ? __builtin_ctz(active) : 0];
    for (uint i = 0; i < simd_width; ++i) values[i] = result;
  }
};

// Moves: each lane reads the lane that `SOURCE` names, or keeps its own value when `VALID` is false.
#define MSL_MOVE(NAME, SOURCE, VALID)                                                            \
  struct NAME {                                                                                  \
    template <class T> MSL_INLINE static void apply(T* values, const uint* operands, uint) {     \
      T before[simd_width];                                                                      \
      for (uint i = 0; i < simd_width; ++i) before[i] = values[i];                               \
      for (uint i = 0; i < simd_width; ++i) {                                                    \
        uint operand = operands[i];                                                              \
        values[i] = (VALID) ? before[(SOURCE) % simd_width] : before[i];                         \
      }                                                                                          \
    }                                                                                            \
  };
MSL_MOVE(shuffle, operand, true)
MSL_MOVE(shuffle_xor, i ^ operand, true)
MSL_MOVE(shuffle_down, i + operand, i + operand < simd_width)
MSL_MOVE(shuffle_up, i - operand, i >= operand)
MSL_MOVE(rotate_down, i + operand, true)
MSL_MOVE(rotate_up, i - operand, true)
MSL_MOVE(quad_move, (i & ~3u) | (operand & 3u), true)

template <bool Inclusive> struct prefix_sum {
  template <class T> MSL_INLINE static void apply(T* values, const uint*, uint active) {
    T running = (T)0;
    for (uint i = 0; i < simd_width; ++i) {
      if (!(active >> i & 1)) continue;
      T value = values[i];
      values[i] = Inclusive ? (T)(running + value) : running;
      running = running + value;
    }
  }
};

#define MSL_QUAD_FOLD(NAME, RESULT)                                                              \
  struct NAME {                                                                                  \
    template <class T> MSL_INLINE static void apply(T* values, const uint*, uint) {              \
      for (uint q = 0; q < simd_width; q += 4) {                                                 \
        auto combine = [](T a, T b) -> T { return RESULT; };                                     \
        T result = combine(combine(values[q], values[q + 2]), combine(values[q + 1], values[q + 3])); \
        for (uint i = 0; i < 4; ++i) values[q + i] = result;                                     \
      }                                                                                          \
    }                                                                                            \
  };
MSL_QUAD_FOLD(quad_add, a + b)
MSL_QUAD_FOLD(quad_maximum, metal::max(a, b))
MSL_QUAD_FOLD(quad_minimum, metal::min(a, b))

template <class Operation, class T> MSL_UNCHECKED_INLINE T collective(T value, uint operand, uint site) {
  static_assert(sizeof(T) <= 16, "a simdgroup function takes values of at most 16 bytes");
  Worker* w = msl_worker;
  uint lane = w->current->lane;
  Simdgroup* s = &w->simdgroups[w->current->simdgroup];
  T* values = (T*)s->values;
  values[lane] = value;
  s->operands[lane] = operand;
  simdgroup_wait(site, [=](uint lanes) MSL_UNCHECKED {
    T results[simd_width];  // lanes that wait elsewhere keep what they published
    for (uint i = 0; i < simd_width; ++i) results[i] = values[i];
    Operation::apply(results, s->operands, lanes);
    for (uint i = 0; i < simd_width; ++i)
      if (lanes >> i & 1) values[i] = results[i];
  });
  return values[lane];
}

}  // namespace msl

namespace metal {

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
MSL_INLINE mem_flags operator|(mem_flags a, mem_flags b) { return (mem_flags)((int)a | (int)b); }

// The compiler must not carry a value in a register across a barrier.
MSL_INLINE void threadgroup_barrier(mem_flags flags, uint site = MSL_SITE) {
  __asm__ volatile("" ::: "memory");
  msl::threadgroup_wait(site, (int)flags & (int)mem_flags::mem_threadgroup, (int)flags & (int)mem_flags::mem_device);
  __asm__ volatile("" ::: "memory");
}
MSL_INLINE void simdgroup_barrier(mem_flags, uint site = MSL_SITE) {
  __asm__ volatile("" ::: "memory");
  msl::simdgroup_wait(site, [](uint) {});
  __asm__ volatile("" ::: "memory");
}

#define MSL_COLLECTIVE(NAME, OPERATION)                                  \
  template <class T> MSL_INLINE T NAME(T value, uint site = MSL_SITE) {  \
    return msl::collective<msl::OPERATION>(value, 0, site);              \
  }
#define MSL_COLLECTIVE_WITH(NAME, OPERATION)                                             \
  template <class T> MSL_INLINE T NAME(T value, ushort operand, uint site = MSL_SITE) {  \
    return msl::collective<msl::OPERATION>(value, operand, site);                        \
  }
MSL_COLLECTIVE(simd_sum, sum)
MSL_COLLECTIVE(simd_product, product)
MSL_COLLECTIVE(simd_max, maximum)
MSL_COLLECTIVE(simd_min, minimum)
MSL_COLLECTIVE(simd_and, bit_and)
MSL_COLLECTIVE(simd_or, bit_or)
MSL_COLLECTIVE(simd_xor, bit_xor)
MSL_COLLECTIVE(simd_broadcast_first, first_active)
MSL_COLLECTIVE(simd_prefix_inclusive_sum, prefix_sum<true>)
MSL_COLLECTIVE(simd_prefix_exclusive_sum, prefix_sum<false>)
MSL_COLLECTIVE(quad_sum, quad_add)
MSL_COLLECTIVE(quad_max, quad_maximum)
MSL_COLLECTIVE(quad_min, quad_minimum)
MSL_COLLECTIVE_WITH(simd_broadcast, shuffle)
MSL_COLLECTIVE_WITH(simd_shuffle, shuffle)
MSL_COLLECTIVE_WITH(simd_shuffle_xor, shuffle_xor)
MSL_COLLECTIVE_WITH(simd_shuffle_down, shuffle_down)
MSL_COLLECTIVE_WITH(simd_shuffle_up, shuffle_up)
MSL_COLLECTIVE_WITH(simd_shuffle_rotate_down, rotate_down)
MSL_COLLECTIVE_WITH(simd_shuffle_rotate_up, rotate_up)
MSL_COLLECTIVE_WITH(quad_broadcast, quad_move)

MSL_INLINE bool simd_all(bool value, uint site = MSL_SITE) { return msl::collective<msl::bit_and>((uint)value, 0, site) & 1; }
MSL_INLINE bool simd_any(bool value, uint site = MSL_SITE) { return msl::collective<msl::bit_or>((uint)value, 0, site) & 1; }

}  // namespace metal
