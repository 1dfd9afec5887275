// Mathematics of MSL, a few units in the last place from exact, written so that clang vectorises it: selects, no
// branches, no calls. The polynomials of log and atan are those of Cephes (S. Moshier); the others are Taylor
// expansions in double, where 32-bit results need no more.
#pragma once
#include "msl_arithmetic.h"

namespace msl {

MSL_INLINE float power_of_two(int n) { return metal::as_type<float>((n + 127) << 23); }
MSL_INLINE double power_of_two_double(long n) { return metal::as_type<double>((n + 1023) << 52); }

// Adding 1.5 * 2^23 rounds a float to an integer that stays readable in its low bits, NaN included.
struct Rounded {
  float value;
  int integer;
};
MSL_INLINE Rounded round_to_int(float x) {
  const float magic = 12582912.0f;
  float shifted = x + magic;
  return {shifted - magic, metal::as_type<int>(shifted) - 0x4b400000};
}

MSL_INLINE float scale(float x, int n) {
  int half_n = n >> 1;
  return x * power_of_two(half_n) * power_of_two(n - half_n);
}

MSL_INLINE float exp_taylor(float r) {
  float p = fused(r, 1.98412698e-4f, 1.38888889e-3f);
  p = fused(p, r, 8.33333333e-3f);
  p = fused(p, r, 4.16666667e-2f);
  p = fused(p, r, 1.66666667e-1f);
  p = fused(p, r, 0.5f);
  return fused(p * r, r, r) + 1.0f;
}

MSL_INLINE float exp(float x) {
  float bounded = x > 89.0f ? 89.0f : x < -104.0f ? -104.0f : x;
  Rounded n = round_to_int(bounded * 1.44269504f);
  float r = fused(n.value, -0.693359375f, bounded);  // ln 2 in two parts, the first exact in nine bits
  r = fused(n.value, 2.12194440e-4f, r);
  return scale(exp_taylor(r), n.integer);
}

MSL_INLINE float exp2(float x) {
  float bounded = x > 129.0f ? 129.0f : x < -151.0f ? -151.0f : x;
  Rounded n = round_to_int(bounded);
  return scale(exp_taylor((bounded - n.value) * 0.693147181f), n.integer);
}

// x = m * 2^e with m in [sqrt(1/2), sqrt(2)).
struct Split {
  float mantissa, exponent;
};
MSL_INLINE Split split(float x) {
  bool tiny = x < FLT_MIN;
  uint bits = metal::as_type<uint>(tiny ? x * 8388608.0f : x);
  uint shifted = bits - 0x3f3504f3u;
  int e = (int)shifted >> 23;
  float m = metal::as_type<float>((shifted & 0x007fffffu) + 0x3f3504f3u);
  return {m, (float)(tiny ? e - 23 : e)};
}

MSL_INLINE float log_special(float x, float result) {
  result = x == 0.0f ? -INFINITY : result;
  result = x == INFINITY ? INFINITY : result;
  return x >= 0.0f ? result : NAN;
}

// log(1 + f) - f for 1 + f in [sqrt(1/2), sqrt(2)).
MSL_INLINE float log_tail(float f) {
  float z = f * f;
  float p = fused(f, 7.0376836292e-2f, -1.1514610310e-1f);
  p = fused(p, f, 1.1676998740e-1f);
  p = fused(p, f, -1.2420140846e-1f);
  p = fused(p, f, 1.4249322787e-1f);
  p = fused(p, f, -1.6668057665e-1f);
  p = fused(p, f, 2.0000714765e-1f);
  p = fused(p, f, -2.4999993993e-1f);
  p = fused(p, f, 3.3333331174e-1f);
  return fused(p * f, z, -0.5f * z);
}

MSL_INLINE float log(float x) {
  Split s = split(x);
  float f = s.mantissa - 1.0f;
  float tail = fused(s.exponent, -2.12194440e-4f, log_tail(f));
  return log_special(x, fused(s.exponent, 0.693359375f, f + tail));
}

MSL_INLINE float log_in_base(float x, double per_octave, double per_unit) {
  Split s = split(x);
  float f = s.mantissa - 1.0f;
  double natural = (double)f + (double)log_tail(f);
  return log_special(x, (float)((double)s.exponent * per_octave + natural * per_unit));
}
MSL_INLINE float log2(float x) { return log_in_base(x, 1.0L, 1.4426950408889634L); }
MSL_INLINE float log10(float x) { return log_in_base(x, 0.30102999566398120L, 0.43429448190325183L); }

// 2^x in double for |x| < 1000, with a relative error near 1e-12.
MSL_INLINE double exp2_double(double x) {
  const double magic = 6755399441055744.0L;
  double shifted = x + magic;
  long n = metal::as_type<long>(shifted) - metal::as_type<long>(magic);
  double r = (x - (shifted - magic)) * (double)0.69314718055994531L;
  double p = fused(r, (double)2.7557319e-7L, (double)2.75573192e-6L);
  p = fused(p, r, (double)2.480158730159e-5L);
  p = fused(p, r, (double)1.98412698412698e-4L);
  p = fused(p, r, (double)1.38888888888889e-3L);
  p = fused(p, r, (double)8.33333333333333e-3L);
  p = fused(p, r, (double)4.16666666666667e-2L);
  p = fused(p, r, (double)1.66666666666667e-1L);
  p = fused(p, r, (double)0.5L);
  p = fused(p, r, (double)1.0L);
  return fused(p, r, (double)1.0L) * power_of_two_double(n);
}

// log2 of a positive finite float in double, by the series of artanh.
MSL_INLINE double log2_double(float x) {
  Split parts = split(x);
  double m = parts.mantissa;
  double s = (m - (double)1.0L) / (m + (double)1.0L);
  double z = s * s;
  double p = fused(z, (double)(1.0L / 15), (double)(1.0L / 13));
  p = fused(p, z, (double)(1.0L / 11));
  p = fused(p, z, (double)(1.0L / 9));
  p = fused(p, z, (double)(1.0L / 7));
  p = fused(p, z, (double)(1.0L / 5));
  p = fused(p, z, (double)(1.0L / 3));
  p = fused(p, z, (double)1.0L);
  return (double)parts.exponent + s * p * (double)2.8853900817779268L;
}

MSL_INLINE float pow(float x, float y) {
  float magnitude = __builtin_elementwise_abs(x);
  bool finite = magnitude > 0.0f && magnitude < INFINITY;
  double exponent = (double)y * log2_double(finite ? magnitude : 1.0f);
  exponent = exponent > (double)200.0L ? (double)200.0L : exponent;
  exponent = exponent < (double)-200.0L ? (double)-200.0L : exponent;
  float result = (float)exp2_double(exponent);
  result = magnitude == 0.0f ? (y < 0.0f ? INFINITY : 0.0f) : result;
  result = magnitude == INFINITY ? (y < 0.0f ? 0.0f : INFINITY) : result;
  bool whole = trunc(y) == y;
  float halved = y * 0.5f;
  bool odd = whole && trunc(halved) != halved;
  bool negative = metal::as_type<int>(x) < 0;
  result = negative && odd ? -result : result;
  result = x < 0.0f && x > -INFINITY && !whole ? NAN : result;
  result = x != x || y != y ? NAN : result;
  return x == 1.0f || y == 0.0f ? 1.0f : result;
}

// x = n * pi/2 + r with |r| <= pi/4. Of pi/2 two parts of 22 bits, whose products with n are exact up to 1e9, fused or
// not, and the rest.
struct Quadrant {
  double r;
  int n;
};
MSL_INLINE Quadrant quadrant(float x) {
  const double magic = 6755399441055744.0L;
  double shifted = fused((double)x, (double)0.63661977236758134L, magic);
  double n = shifted - magic;
  double r = fused(n, (double)-1.570796012878418L, (double)x);
  r = fused(n, (double)-3.139164164167596e-07L, r);
  r = fused(n, (double)-6.223372171896613e-14L, r);
  return {r, (int)metal::as_type<long>(shifted)};
}
MSL_INLINE double sin_taylor(double r) {
  double z = r * r;
  double p = fused(z, (double)(-1.0L / 39916800), (double)(1.0L / 362880));
  p = fused(p, z, (double)(-1.0L / 5040));
  p = fused(p, z, (double)(1.0L / 120));
  p = fused(p, z, (double)(-1.0L / 6));
  return fused(p * z, r, r);
}
MSL_INLINE double cos_taylor(double r) {
  double z = r * r;
  double p = fused(z, (double)(1.0L / 479001600), (double)(-1.0L / 3628800));
  p = fused(p, z, (double)(1.0L / 40320));
  p = fused(p, z, (double)(-1.0L / 720));
  p = fused(p, z, (double)(1.0L / 24));
  p = fused(p, z, (double)-0.5L);
  return fused(p, z, (double)1.0L);
}
MSL_INLINE float sin(float x) {
  Quadrant q = quadrant(x);
  double value = q.n & 1 ? cos_taylor(q.r) : sin_taylor(q.r);
  return (float)(q.n & 2 ? -value : value);
}
MSL_INLINE float cos(float x) {
  Quadrant q = quadrant(x);
  double value = q.n & 1 ? sin_taylor(q.r) : cos_taylor(q.r);
  return (float)((q.n + 1) & 2 ? -value : value);
}
MSL_INLINE float tan(float x) {
  Quadrant q = quadrant(x);
  double s = sin_taylor(q.r), c = cos_taylor(q.r);
  return (float)(q.n & 1 ? -c / s : s / c);
}

MSL_INLINE double exp_double(float x, float bound) {
  float bounded = x > bound ? bound : x < -bound ? -bound : x;
  return exp2_double((double)bounded * (double)1.4426950408889634L);
}
MSL_INLINE float sinh(float x) {
  double e = exp_double(x, 100.0f);
  float large = (float)((double)0.5L * (e - (double)1.0L / e));
  float z = x * x;
  float small = fused(fused(fused(z, 1.98412698e-4f, 8.33333333e-3f), z, 1.66666667e-1f) * z, x, x);
  return z < 0.04f ? small : large;
}
MSL_INLINE float cosh(float x) {
  double e = exp_double(x, 100.0f);
  return (float)((double)0.5L * (e + (double)1.0L / e));
}
MSL_INLINE float tanh(float x) {
  double e = exp_double(x + x, 40.0f);
  float large = (float)((e - (double)1.0L) / (e + (double)1.0L));
  float z = x * x;
  float small = fused(fused(fused(fused(z, 2.18694885e-2f, -5.39682540e-2f), z, 1.33333333e-1f), z, -3.33333333e-1f) * z, x, x);
  return z < 0.01f ? small : large;
}

MSL_INLINE float atan(float x) {
  float a = __builtin_elementwise_abs(x);
  bool large = a > 2.414213562f, medium = a > 0.4142135624f;
  float base = large ? 1.57079633f : medium ? 0.785398163f : 0.0f;
  float t = large ? -1.0f / a : medium ? (a - 1.0f) / (a + 1.0f) : a;
  float z = t * t;
  float p = fused(z, 8.05374449538e-2f, -1.38776856032e-1f);
  p = fused(p, z, 1.99777106478e-1f);
  p = fused(p, z, -3.33329491539e-1f);
  return __builtin_elementwise_copysign(base + fused(p * z, t, t), x);
}
MSL_INLINE float atan2(float y, float x) {
  float ay = __builtin_elementwise_abs(y), ax = __builtin_elementwise_abs(x);
  float small = ay < ax ? ay : ax, large = ay < ax ? ax : ay;
  float ratio = large == 0.0f ? 0.0f : small == large ? 1.0f : small / large;
  float angle = atan(ratio);
  angle = ay > ax ? 1.57079633f - angle : angle;
  angle = metal::as_type<int>(x) < 0 ? 3.14159265f - angle : angle;
  angle = __builtin_elementwise_copysign(angle, y);
  return x != x || y != y ? NAN : angle;
}
MSL_INLINE float asin(float x) { return atan2(x, __builtin_elementwise_sqrt((1.0f - x) * (1.0f + x))); }
MSL_INLINE float acos(float x) { return atan2(__builtin_elementwise_sqrt((1.0f - x) * (1.0f + x)), x); }
MSL_INLINE float fmod(float x, float y) {
  // The remainder of two floats is exact in double for quotients below 2^29; larger ones lose their low bits.
  double quotient = trunc((double)x / (double)y);
  float result = (float)fused(-quotient, (double)y, (double)x);
  return __builtin_elementwise_abs(y) == INFINITY && __builtin_elementwise_abs(x) < INFINITY ? x : result;
}

MSL_INLINE float sqrt(float x) { return __builtin_elementwise_sqrt(x); }
MSL_INLINE float rsqrt(float x) { return 1.0f / __builtin_elementwise_sqrt(x); }
MSL_INLINE float round(float x) {
  float whole = trunc(x);
  bool up = __builtin_elementwise_abs(x - whole) >= 0.5f;
  return up ? whole + __builtin_elementwise_copysign(1.0f, x) : whole;
}

// Applies a function of floats to each element, whatever the floating type.
template <class F, class T, class... More> MSL_INLINE T map(F f, T first, More... more) {
  static_assert(metal::is_floating_point_v<element<T>>, "this function takes half, bfloat or float");
  static_assert((metal::is_same_v<T, More> && ...), "the arguments must have one type");
  if constexpr (width<T> == 1) return (T)f((float)first, (float)more...);
  else {
    T result;
    for (int i = 0; i < width<T>; ++i) result[i] = (element<T>)f((float)first[i], (float)more[i]...);
    return result;
  }
}

}  // namespace msl

namespace metal {

#define MSL_UNARY(NAME)                                                             \
  template <class T> MSL_INLINE T NAME(T x) {                                       \
    return msl::map([](float a) __attribute__((always_inline)) { return msl::NAME(a); }, x); \
  }
#define MSL_BINARY(NAME)                                                            \
  template <class T> MSL_INLINE T NAME(T x, T y) {                                  \
    return msl::map([](float a, float b) __attribute__((always_inline)) { return msl::NAME(a, b); }, x, y); \
  }
MSL_UNARY(exp) MSL_UNARY(exp2) MSL_UNARY(log) MSL_UNARY(log2) MSL_UNARY(log10)
MSL_UNARY(sin) MSL_UNARY(cos) MSL_UNARY(tan) MSL_UNARY(asin) MSL_UNARY(acos) MSL_UNARY(atan)
MSL_UNARY(sinh) MSL_UNARY(cosh) MSL_UNARY(tanh) MSL_UNARY(sqrt) MSL_UNARY(rsqrt)
MSL_UNARY(floor) MSL_UNARY(ceil) MSL_UNARY(trunc) MSL_UNARY(rint) MSL_UNARY(round)
MSL_BINARY(pow) MSL_BINARY(atan2) MSL_BINARY(fmod)

template <class T> MSL_INLINE T powr(T x, T y) { return pow(x, y); }
template <class T> MSL_INLINE T exp10(T x) { return pow((T)10.0f, x); }
template <class T> MSL_INLINE T fract(T x) { return x - floor(x); }
template <class T> MSL_INLINE T divide(T x, T y) { return x / y; }
template <class T> MSL_INLINE T abs(T x) { return __builtin_elementwise_abs(x); }
template <class T> MSL_INLINE T fabs(T x) {
  static_assert(is_floating_point_v<msl::element<T>>, "fabs takes a floating-point value");
  return __builtin_elementwise_abs(x);
}
template <class T> MSL_INLINE T copysign(T x, T y) { return __builtin_elementwise_copysign(x, y); }

// Of a number and a NaN, the number: Metal's max and min, spelled so that one instruction and one blend do it.
template <class T> MSL_INLINE T max(T a, T b) {
  if constexpr (is_floating_point_v<T>) return a > b ? a : b == b ? b : a;
  else if constexpr (is_floating_point_v<msl::element<T>>) {
    T result;
    for (int i = 0; i < msl::width<T>; ++i) result[i] = max((msl::element<T>)a[i], (msl::element<T>)b[i]);
    return result;
  } else return __builtin_elementwise_max(a, b);
}
template <class T> MSL_INLINE T min(T a, T b) {
  if constexpr (is_floating_point_v<T>) return a < b ? a : b == b ? b : a;
  else if constexpr (is_floating_point_v<msl::element<T>>) {
    T result;
    for (int i = 0; i < msl::width<T>; ++i) result[i] = min((msl::element<T>)a[i], (msl::element<T>)b[i]);
    return result;
  } else return __builtin_elementwise_min(a, b);
}
template <class T> MSL_INLINE T fmax(T a, T b) { return max(a, b); }
template <class T> MSL_INLINE T fmin(T a, T b) { return min(a, b); }
template <class T> MSL_INLINE T max3(T a, T b, T c) { return max(a, max(b, c)); }
template <class T> MSL_INLINE T min3(T a, T b, T c) { return min(a, min(b, c)); }
template <class T> MSL_INLINE T clamp(T x, T low, T high) { return min(max(x, low), high); }
template <class T> MSL_INLINE T saturate(T x) { return clamp(x, (T)0.0f, (T)1.0f); }
template <class T> MSL_INLINE T fma(T a, T b, T c) {
  return msl::map([](float x, float y, float z) __attribute__((always_inline)) { return msl::fma(x, y, z); }, a, b, c);
}
template <class T> MSL_INLINE T mix(T a, T b, T t) { return a + (b - a) * t; }
template <class T> MSL_INLINE T sign(T x) {
  if constexpr (msl::width<T> == 1) return x > (T)0 ? (T)1 : x < (T)0 ? (T)-1 : (T)0;
  else {
    T result;
    for (int i = 0; i < msl::width<T>; ++i) result[i] = sign((msl::element<T>)x[i]);
    return result;
  }
}
template <class T> MSL_INLINE T step(T edge, T x) { return x < edge ? (T)0 : (T)1; }
template <class T, class B> MSL_INLINE T select(T otherwise, T chosen, B condition) {
  if constexpr (msl::width<T> == 1) return condition ? chosen : otherwise;
  else {
    T result;
    for (int i = 0; i < msl::width<T>; ++i) result[i] = condition[i] ? chosen[i] : otherwise[i];
    return result;
  }
}
template <class T> MSL_INLINE bool isnan(T x) { return x != x; }
template <class T> MSL_INLINE bool isinf(T x) { return __builtin_elementwise_abs((float)x) == INFINITY; }
template <class T> MSL_INLINE bool isfinite(T x) { return __builtin_elementwise_abs((float)x) < INFINITY; }
template <class T> MSL_INLINE bool signbit(T x) { return as_type<int>((float)x) < 0; }

template <class T> MSL_INLINE msl::element<T> dot(T a, T b) {
  static_assert(msl::width<T> > 1, "dot takes vectors");
  msl::element<T> sum = a[0] * b[0];
  for (int i = 1; i < msl::width<T>; ++i) sum = (msl::element<T>)msl::fused((float)a[i], (float)b[i], (float)sum);
  return sum;
}
template <class T> MSL_INLINE msl::element<T> length(T a) { return sqrt(dot(a, a)); }
template <class T> MSL_INLINE T normalize(T a) { return a * rsqrt(dot(a, a)); }

template <class T> MSL_INLINE bool any(T a) {
  bool result = false;
  for (int i = 0; i < msl::width<T>; ++i) result |= (bool)a[i];
  return result;
}
template <class T> MSL_INLINE bool all(T a) {
  bool result = true;
  for (int i = 0; i < msl::width<T>; ++i) result &= (bool)a[i];
  return result;
}

template <class T> MSL_INLINE T popcount(T x) { return __builtin_elementwise_popcount(x); }
template <class T> MSL_INLINE T reverse_bits(T x) { return __builtin_elementwise_bitreverse(x); }
template <class T> MSL_INLINE T clz(T x) { return x ? (T)__builtin_clzg(x) : (T)(sizeof(T) * 8); }
template <class T> MSL_INLINE T ctz(T x) { return x ? (T)__builtin_ctzg(x) : (T)(sizeof(T) * 8); }
template <class T> MSL_INLINE T mulhi(T a, T b) {
  static_assert(sizeof(T) == 4, "mulhi is offered for 32-bit integers");
  if constexpr (is_signed_v<T>) return (T)(((long)a * (long)b) >> 32);
  else return (T)(((ulong)a * (ulong)b) >> 32);
}

// The host computes both variants alike; the names are all that differs.
namespace fast { using namespace metal; }
namespace precise { using namespace metal; }

}  // namespace metal
