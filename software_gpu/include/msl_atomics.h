// Relaxed atomics. Pointers are template parameters so that their address space survives the address-space check.
#pragma once
#include "msl_types.h"

namespace metal {

enum memory_order { memory_order_relaxed = 0 };

template <class T> struct atomic { T value; };
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<float> atomic_float;
typedef atomic<bool> atomic_bool;

template <class P> using msl_atomic_value = remove_cv_t<remove_reference_t<decltype(((P) nullptr)->value)>>;

template <class P> MSL_INLINE msl_atomic_value<P> atomic_load_explicit(P object, memory_order) {
  msl_atomic_value<P> result;
  __atomic_load(&object->value, &result, __ATOMIC_RELAXED);
  return result;
}
template <class P> MSL_INLINE void atomic_store_explicit(P object, msl_atomic_value<P> desired, memory_order) {
  __atomic_store(&object->value, &desired, __ATOMIC_RELAXED);
}
template <class P>
MSL_INLINE msl_atomic_value<P> atomic_exchange_explicit(P object, msl_atomic_value<P> desired, memory_order) {
  msl_atomic_value<P> result;
  __atomic_exchange(&object->value, &desired, &result, __ATOMIC_RELAXED);
  return result;
}
template <class P, class E>
MSL_INLINE bool atomic_compare_exchange_weak_explicit(P object, E expected, msl_atomic_value<P> desired, memory_order,
                                                      memory_order) {
  return __atomic_compare_exchange(&object->value, expected, &desired, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
}

template <class P, class F> MSL_INLINE msl_atomic_value<P> msl_atomic_update(P object, F update) {
  msl_atomic_value<P> old, desired;
  __atomic_load(&object->value, &old, __ATOMIC_RELAXED);
  do desired = update(old);
  while (!__atomic_compare_exchange(&object->value, &old, &desired, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  return old;
}
#define MSL_ATOMIC_FETCH(NAME, RESULT)                                                                   \
  template <class P>                                                                                     \
  MSL_INLINE msl_atomic_value<P> atomic_fetch_##NAME##_explicit(P object, msl_atomic_value<P> operand, memory_order) { \
    typedef msl_atomic_value<P> T;                                                                       \
    return msl_atomic_update(object, [operand](T old) -> T { return RESULT; });                          \
  }
MSL_ATOMIC_FETCH(add, old + operand)
MSL_ATOMIC_FETCH(sub, old - operand)
MSL_ATOMIC_FETCH(max, old > operand ? old : operand)
MSL_ATOMIC_FETCH(min, old < operand ? old : operand)
MSL_ATOMIC_FETCH(and, old & operand)
MSL_ATOMIC_FETCH(or, old | operand)
MSL_ATOMIC_FETCH(xor, old ^ operand)

}  // namespace metal
