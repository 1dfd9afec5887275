// Scalar, vector and packed types of the Metal Shading Language, as clang's extended vectors.
#pragma once

typedef __INT8_TYPE__ int8_t;
typedef __INT16_TYPE__ int16_t;
typedef __INT32_TYPE__ int32_t;
typedef __INT64_TYPE__ int64_t;
typedef __UINT8_TYPE__ uint8_t;
typedef __UINT16_TYPE__ uint16_t;
typedef __UINT32_TYPE__ uint32_t;
typedef __UINT64_TYPE__ uint64_t;
typedef __SIZE_TYPE__ size_t;
typedef __PTRDIFF_TYPE__ ptrdiff_t;
typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef _Float16 half;

#define MSL_INLINE __attribute__((always_inline)) inline
#define METAL_FUNC inline __attribute__((always_inline))

#ifdef MSL_PLAIN_BFLOAT
#include "msl_bfloat.h"
#else
typedef __bf16 bfloat;
#endif

#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define HUGE_VALF __builtin_inff()
#define FLT_MAX 3.402823466e+38f
#define FLT_MIN 1.175494351e-38f
#define FLT_EPSILON 1.1920928955e-07f
#define HALF_MAX 65504.0h
#define HALF_MIN 6.103515625e-05h
#define INT_MAX 2147483647
#define INT_MIN (-2147483647 - 1)
#define UINT_MAX 4294967295u
#define M_PI_F 3.14159265358979323846f
#define M_PI_2_F 1.57079632679489661923f
#define M_1_PI_F 0.31830988618379067154f
#define M_2_PI_F 0.63661977236758134308f
#define M_2_SQRTPI_F 1.12837916709551257390f
#define M_SQRT2_F 1.41421356237309504880f
#define M_SQRT1_2_F 0.70710678118654752440f
#define M_E_F 2.71828182845904523536f
#define M_LOG2E_F 1.44269504088896340736f
#define M_LN2_F 0.69314718055994530942f

constexpr half operator""h(long double value) { return (half)(float)value; }
constexpr half operator""h(unsigned long long value) { return (half)(float)value; }

// One table of element types: each X(T) below makes something for every one of them.
#define MSL_FOR_ELEMENTS(X) MSL_FOR_BUILTINS(X) X(bfloat)
#define MSL_FOR_BUILTINS(X) \
  X(float) X(half) X(int) X(uint) X(short) X(ushort) X(char) X(uchar) X(long) X(ulong) X(bool)

#define MSL_VECTORS(T)                                  \
  typedef T T##2 __attribute__((ext_vector_type(2)));   \
  typedef T T##3 __attribute__((ext_vector_type(3)));   \
  typedef T T##4 __attribute__((ext_vector_type(4)));
MSL_FOR_BUILTINS(MSL_VECTORS)
#ifndef MSL_PLAIN_BFLOAT
MSL_VECTORS(bfloat)
#endif

// Packed vectors have the alignment of their element, and three elements take no fourth place.
#define MSL_PACKED(T)                                                                       \
  typedef T packed_##T##2 __attribute__((ext_vector_type(2), aligned(__alignof__(T))));     \
  typedef T packed_##T##4 __attribute__((ext_vector_type(4), aligned(__alignof__(T))));     \
  struct packed_##T##3 {                                                                    \
    T x, y, z;                                                                              \
    packed_##T##3() = default;                                                              \
    MSL_INLINE packed_##T##3(T##3 v) : x(v.x), y(v.y), z(v.z) {}                            \
    MSL_INLINE operator T##3() const { return T##3{x, y, z}; }                              \
  };
MSL_PACKED(float)
MSL_PACKED(half)
#ifndef MSL_PLAIN_BFLOAT
MSL_PACKED(bfloat)
#endif
MSL_PACKED(int)
MSL_PACKED(uint)
MSL_PACKED(short)
MSL_PACKED(ushort)

namespace metal {

template <class T, T V> struct integral_constant {
  static constexpr T value = V;
  typedef T value_type;
  constexpr operator T() const { return V; }
};
typedef integral_constant<bool, true> true_type;
typedef integral_constant<bool, false> false_type;
template <class A, class B> struct is_same : false_type {};
template <class A> struct is_same<A, A> : true_type {};
template <class A, class B> constexpr bool is_same_v = is_same<A, B>::value;
template <bool C, class T = void> struct enable_if {};
template <class T> struct enable_if<true, T> { typedef T type; };
template <bool C, class T = void> using enable_if_t = typename enable_if<C, T>::type;
template <bool C, class A, class B> struct conditional { typedef A type; };
template <class A, class B> struct conditional<false, A, B> { typedef B type; };
template <bool C, class A, class B> using conditional_t = typename conditional<C, A, B>::type;
template <class T> using remove_cv_t = __remove_cv(T);
template <class T> using remove_reference_t = __remove_reference_t(T);
template <class T> constexpr bool is_integral_v = __is_integral(T);
template <class T>
constexpr bool is_floating_point_v = is_same_v<T, float> || is_same_v<T, half> || is_same_v<T, bfloat>;
template <class T> constexpr bool is_signed_v = __is_signed(T);
template <class T> constexpr bool is_unsigned_v = __is_unsigned(T);
template <class T> struct is_integral : integral_constant<bool, is_integral_v<T>> {};
template <class T> struct is_floating_point : integral_constant<bool, is_floating_point_v<T>> {};

template <class T> struct numeric_limits;
#define MSL_INTEGER_LIMITS(T, LOW, HIGH)                \
  template <> struct numeric_limits<T> {                \
    static constexpr T min() { return LOW; }            \
    static constexpr T lowest() { return LOW; }         \
    static constexpr T max() { return HIGH; }           \
  };
MSL_INTEGER_LIMITS(char, -128, 127)
MSL_INTEGER_LIMITS(signed char, -128, 127)
MSL_INTEGER_LIMITS(uchar, 0, 255)
MSL_INTEGER_LIMITS(short, -32768, 32767)
MSL_INTEGER_LIMITS(ushort, 0, 65535)
MSL_INTEGER_LIMITS(int, INT_MIN, INT_MAX)
MSL_INTEGER_LIMITS(uint, 0, UINT_MAX)
MSL_INTEGER_LIMITS(long, -0x7fffffffffffffffl - 1, 0x7fffffffffffffffl)
MSL_INTEGER_LIMITS(ulong, 0, ~0ul)
MSL_INTEGER_LIMITS(bool, false, true)
#define MSL_FLOAT_LIMITS(T, SMALLEST, HIGH, STEP)                                   \
  template <> struct numeric_limits<T> {                                            \
    static constexpr T min() { return (T)(SMALLEST); }                              \
    static constexpr T max() { return (T)(HIGH); }                                  \
    static constexpr T lowest() { return (T)(-(HIGH)); }                            \
    static constexpr T epsilon() { return (T)(STEP); }                              \
    static constexpr T infinity() { return (T)__builtin_inff(); }                   \
    static constexpr T quiet_NaN() { return (T)__builtin_nanf(""); }                \
  };
MSL_FLOAT_LIMITS(float, FLT_MIN, FLT_MAX, FLT_EPSILON)
MSL_FLOAT_LIMITS(half, 6.103515625e-05f, 65504.0f, 9.765625e-04f)
MSL_FLOAT_LIMITS(bfloat, FLT_MIN, 3.3895313892515355e+38f, 7.8125e-03f)

template <class T, int N> struct msl_vector { typedef T type __attribute__((ext_vector_type(N))); };
template <class T> struct msl_vector<T, 1> { typedef T type; };
#ifdef MSL_PLAIN_BFLOAT
template <> struct msl_vector<bfloat, 2> { typedef bfloat2 type; };
template <> struct msl_vector<bfloat, 3> { typedef bfloat3 type; };
template <> struct msl_vector<bfloat, 4> { typedef bfloat4 type; };
#endif
template <class T, int N> using vec = typename msl_vector<T, N>::type;

template <class To, class From> MSL_INLINE To as_type(From value) {
  static_assert(!__is_pointer(To) && !__is_pointer(From), "a pointer is no number");
  return __builtin_bit_cast(To, value);
}

}  // namespace metal

namespace msl {

// Element type and width of a vector; a scalar has width 1.
template <class T> struct shape {
  typedef T element;
  static constexpr int width = 1;
};
#define MSL_SHAPE(T)                                                                     \
  template <> struct shape<T##2> { typedef T element; static constexpr int width = 2; }; \
  template <> struct shape<T##3> { typedef T element; static constexpr int width = 3; }; \
  template <> struct shape<T##4> { typedef T element; static constexpr int width = 4; };
MSL_FOR_ELEMENTS(MSL_SHAPE)

// N elements as they lie in memory, and the floats they are.
template <class T, int N> struct row {
  typedef T type __attribute__((ext_vector_type(N)));
  typedef float Floats __attribute__((ext_vector_type(N)));
  MSL_INLINE static Floats widened(type values) { return __builtin_convertvector(values, Floats); }
  MSL_INLINE static type narrowed(Floats values) { return __builtin_convertvector(values, type); }
};
#ifdef MSL_PLAIN_BFLOAT
template <int N> struct row<bfloat, N> {
  typedef bfloats<N> type;
  typedef typename type::Floats Floats;
  MSL_INLINE static Floats widened(type values) { return (Floats)values; }
  MSL_INLINE static type narrowed(Floats values) { return type(values); }
};
#endif

template <class T> using element = typename shape<T>::element;
template <class T> constexpr int width = shape<T>::width;

template <class Vector, class Part> MSL_INLINE void append(Vector& vector, int& at, Part part) {
  typedef element<Vector> E;
  if constexpr (width<Part> == 1) vector[at++] = (E)part;
  else
    for (int i = 0; i < width<Part>; ++i) vector[at++] = (E)part[i];
}

// float4(a, b.xy, c): the constructors of MSL vectors.
template <class T, int N, class... Parts> MSL_INLINE metal::vec<T, N> make(Parts... parts) {
  typedef metal::vec<T, N> V;
  if constexpr (N == 1) return T(parts...);
#ifdef MSL_PLAIN_BFLOAT
  else if constexpr (metal::is_same_v<T, bfloat>) return V(make<float, N>(parts...));
#endif
  else if constexpr (sizeof...(Parts) == 0) return (V)(T)0;
  else {
    static_assert(sizeof...(Parts) == 1 || (width<Parts> + ...) == N, "a vector constructor needs one value per element");
    V result;
    if constexpr (sizeof...(Parts) == 1 && (width<Parts> + ...) == 1) result = (V)((T)parts, ...);
    else {
      static_assert((width<Parts> + ...) == N, "a vector can't be made from a vector of another width");
      int at = 0;
      (append(result, at, parts), ...);
    }
    return result;
  }
}

}  // namespace msl

using metal::as_type;

#define float2(...) msl::make<float, 2>(__VA_ARGS__)
#define float3(...) msl::make<float, 3>(__VA_ARGS__)
#define float4(...) msl::make<float, 4>(__VA_ARGS__)
#define half2(...) msl::make<half, 2>(__VA_ARGS__)
#define half3(...) msl::make<half, 3>(__VA_ARGS__)
#define half4(...) msl::make<half, 4>(__VA_ARGS__)
#define bfloat2(...) msl::make<bfloat, 2>(__VA_ARGS__)
#define bfloat3(...) msl::make<bfloat, 3>(__VA_ARGS__)
#define bfloat4(...) msl::make<bfloat, 4>(__VA_ARGS__)
#define int2(...) msl::make<int, 2>(__VA_ARGS__)
#define int3(...) msl::make<int, 3>(__VA_ARGS__)
#define int4(...) msl::make<int, 4>(__VA_ARGS__)
#define uint2(...) msl::make<uint, 2>(__VA_ARGS__)
#define uint3(...) msl::make<uint, 3>(__VA_ARGS__)
#define uint4(...) msl::make<uint, 4>(__VA_ARGS__)
#define short2(...) msl::make<short, 2>(__VA_ARGS__)
#define short4(...) msl::make<short, 4>(__VA_ARGS__)
#define ushort2(...) msl::make<ushort, 2>(__VA_ARGS__)
#define ushort3(...) msl::make<ushort, 3>(__VA_ARGS__)
#define ushort4(...) msl::make<ushort, 4>(__VA_ARGS__)
#define char4(...) msl::make<char, 4>(__VA_ARGS__)
#define uchar4(...) msl::make<uchar, 4>(__VA_ARGS__)
#define ulong2(...) msl::make<ulong, 2>(__VA_ARGS__)
#define bool2(...) msl::make<bool, 2>(__VA_ARGS__)
#define bool4(...) msl::make<bool, 4>(__VA_ARGS__)
