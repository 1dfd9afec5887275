// Pointers come from pointers: the language has no address that is made of a number. Casts of the source go through
// `Pointer`, and templates ask `is_plain` of the types they are given.
#pragma once
#include "msl_types.h"

namespace msl {

template <class T> constexpr bool is_plain = !__is_pointer(T) && !__is_reference(T) && !__is_function(T);
template <class T> constexpr bool is_plain<T[]> = is_plain<T>;
template <class T, size_t N> constexpr bool is_plain<T[N]> = is_plain<T>;

struct Pointer {
  const volatile void* address;
  template <class T> MSL_INLINE Pointer(T* pointer) : address(pointer) {
    static_assert(is_plain<T>, "memory that holds pointers can't be read as something else");
  }
  template <class T> MSL_INLINE operator T*() const {
    static_assert(is_plain<T>, "memory can't be read as pointers");
    return (T*)address;
  }
};

}  // namespace msl
