// What some processors have an instruction for and clang would otherwise call a library for: products that are added
// with one rounding, and rounding to whole numbers.
#pragma once
#include "msl_types.h"

namespace msl {

// The first x86-64 processors round to whole numbers only as conversions to integers do.
#if defined(__x86_64__) && !defined(__SSE4_1__)
MSL_INLINE float trunc(float x) {
  float whole = __builtin_elementwise_copysign((float)(int)x, x);
  return __builtin_elementwise_abs(x) < 8388608.0f ? whole : x;
}
MSL_INLINE double trunc(double x) {
  const double exact = 4503599627370496.0L;  // 2^52
  double whole = __builtin_elementwise_copysign((double)(long)x, x);
  return __builtin_elementwise_abs(x) < exact ? whole : x;
}
MSL_INLINE float floor(float x) {
  float whole = trunc(x);
  return __builtin_elementwise_copysign(whole > x ? whole - 1.0f : whole, x);
}
MSL_INLINE float ceil(float x) {
  float whole = trunc(x);
  return __builtin_elementwise_copysign(whole < x ? whole + 1.0f : whole, x);
}
MSL_INLINE float rint(float x) {
  const float exact = 8388608.0f;  // 2^23: from there on a float has no fraction
  float size = __builtin_elementwise_abs(x);
  float whole = __builtin_elementwise_copysign((size + exact) - exact, x);
  return size < exact ? whole : x;
}
#else
MSL_INLINE float trunc(float x) { return __builtin_elementwise_trunc(x); }
MSL_INLINE double trunc(double x) { return __builtin_elementwise_trunc(x); }
MSL_INLINE float floor(float x) { return __builtin_elementwise_floor(x); }
MSL_INLINE float ceil(float x) { return __builtin_elementwise_ceil(x); }
MSL_INLINE float rint(float x) { return __builtin_elementwise_roundeven(x); }
#endif

// MSL_UNFUSED gives any processor the arithmetic of one that can't fuse, so that a test can compare the two.
#if (defined(__FMA__) || defined(__aarch64__)) && !defined(MSL_UNFUSED)
template <class T> MSL_INLINE T fused(T a, T b, T c) { return __builtin_elementwise_fma(a, b, c); }
MSL_INLINE float fma(float a, float b, float c) { return __builtin_elementwise_fma(a, b, c); }
#else
// a*b+c with two roundings. Exact fusing takes over ten instructions in double, which products of matrices can't bear;
// it is kept for fma, which promises it.
template <class T> MSL_INLINE T fused(T a, T b, T c) {
#pragma clang fp contract(off)
  return a * b + c;
}
// The product of two floats is exact in double. Its sum with the third is rounded to odd: then rounding it once more,
// to float, is right (Boldo and Melquiond, "Emulation of a FMA and correctly rounded sums", 2008).
MSL_INLINE float fma(float a, float b, float c) {
#pragma clang fp contract(off)
  double product = (double)a * (double)b, added = c;
  double sum = product + added;
  double part = sum - product;
  double error = (product - (sum - part)) + (added - part);
  ulong bits = metal::as_type<ulong>(sum);
  bool inexact = error > (double)0.0L || error < (double)0.0L;  // not so for infinities, whose error is NaN
  bool outward = (error > (double)0.0L) == (sum > (double)0.0L);  // what was lost makes it larger
  ulong odd = outward ? bits | 1 : bits & 1 ? bits : bits - 1;
  return (float)metal::as_type<double>(inexact ? odd : bits);
}
#endif

}  // namespace msl
