// The Metal Shading Language for clang: included before every kernel, in place of <metal_stdlib>.
#pragma once
#include "msl_atomics.h"
#include "msl_collectives.h"
#include "msl_execution.h"
#include "msl_math.h"
#include "msl_matrix.h"
#include "msl_pointers.h"
#include "msl_regions.h"
#include "msl_types.h"

// Only the entries of a library call a kernel: one that no entry calls is not compiled.
#define kernel static
#define thread
#ifdef MSL_ADDRESS_SPACES
#define device __attribute__((address_space(1)))
#define constant const __attribute__((address_space(2)))
#define threadgroup __attribute__((address_space(3)))
#else
#define device
#define constant const
#define threadgroup
#endif
