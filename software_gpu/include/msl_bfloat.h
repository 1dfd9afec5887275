// bfloat as 16 bits that are only moved and converted, which is all that most kernels do with it. clang's own type has
// arithmetic too, but calls a library to round, and keeps no loop around that in vectors: its code is rewritten
// (small_floats.py), which takes the compiler a second run.
//
// What compiles with this type means the same with clang's. It has no arithmetic, and nothing converts it unasked: what
// needs more is refused, and then compiled with clang's type.
#pragma once

namespace msl {

template <class T> inline constexpr bool is_number = __is_arithmetic(T);
template <class T> inline constexpr bool is_float = false;
template <> inline constexpr bool is_float<float> = true;
template <bool> struct when {};
template <> struct when<true> { typedef int type; };

// To nearest even; a NaN keeps its upper bits and becomes quiet.
template <class Bits, class Floats> MSL_INLINE constexpr Bits narrowed(Floats x) {
  Bits bits = __builtin_bit_cast(Bits, x), high = bits >> 16, rounded = (bits + (high & 1u) + 0x7fffu) >> 16;
  return x != x ? (high | 64u) : rounded;
}

}  // namespace msl

struct bfloat {
  unsigned short msl_bits;

  bfloat() = default;
  template <class T, typename msl::when<msl::is_number<T>>::type = 0>
  MSL_INLINE explicit constexpr bfloat(T value)
      : msl_bits((unsigned short)msl::narrowed<unsigned>((float)value)) {}
  template <class T, typename msl::when<msl::is_number<T>>::type = 0> MSL_INLINE explicit constexpr operator T() const {
    return (T)__builtin_bit_cast(float, (unsigned)msl_bits << 16);
  }
};

// With a float these are operations on floats, and so are all comparisons. An integer would become a bfloat.
#define MSL_AS_FLOATS(OPERATION)                                                                                 \
  template <class F, typename msl::when<msl::is_float<F>>::type = 0>                                             \
  MSL_INLINE constexpr auto operator OPERATION(bfloat a, F b) { return (float)a OPERATION b; }                   \
  template <class F, typename msl::when<msl::is_float<F>>::type = 0>                                             \
  MSL_INLINE constexpr auto operator OPERATION(F a, bfloat b) { return a OPERATION(float) b; }
#define MSL_COMPARISON(OPERATION) \
  MSL_AS_FLOATS(OPERATION)        \
  MSL_INLINE constexpr bool operator OPERATION(bfloat a, bfloat b) { return (float)a OPERATION(float) b; }
MSL_AS_FLOATS(+) MSL_AS_FLOATS(-) MSL_AS_FLOATS(*) MSL_AS_FLOATS(/)
MSL_COMPARISON(==) MSL_COMPARISON(!=) MSL_COMPARISON(<) MSL_COMPARISON(<=) MSL_COMPARISON(>) MSL_COMPARISON(>=)

namespace msl {

template <int N> struct bfloats {
  typedef unsigned short Stored __attribute__((ext_vector_type(N)));
  typedef unsigned Bits __attribute__((ext_vector_type(N)));
  typedef float Floats __attribute__((ext_vector_type(N)));
  Stored msl_bits;

  bfloats() = default;
  MSL_INLINE explicit bfloats(Floats values)
      : msl_bits(__builtin_convertvector(narrowed<Bits>(values), Stored)) {}
  MSL_INLINE explicit operator Floats() const {
    return __builtin_bit_cast(Floats, __builtin_convertvector(msl_bits, Bits) << 16);
  }
  MSL_INLINE bfloat operator[](int i) const { return __builtin_bit_cast(bfloat, (unsigned short)msl_bits[i]); }
};

}  // namespace msl

typedef msl::bfloats<2> bfloat2;
typedef msl::bfloats<3> bfloat3;
typedef msl::bfloats<4> bfloat4;
