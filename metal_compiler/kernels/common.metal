// What every kernel begins with.
#include <metal_stdlib>
using namespace metal;

// The error function, which Metal lacks; within 2 units in the last place. Both polynomials are minimax fits: erf(x) /
// x over x * x for |x| < 1, the logarithm of 1 - erf(x) beyond, where from 4 on the result rounds to 1.
METAL_FUNC float npu_erf(float x)
{
    float a = fabs(x);
    float t = x * x;
    float near = 7.8891193e-05f;
    near = fma(near, t, -8.02084105e-4f);
    near = fma(near, t, 5.18953521e-3f);
    near = fma(near, t, -2.68544443e-2f);
    near = fma(near, t, 1.12836003e-1f);
    near = fma(near, t, -3.7612626e-1f);
    near = fma(near, t, 1.12837911f);
    float b = a < 4.0f ? a : 4.0f;
    float far = -2.16868502e-05f;
    far = fma(far, b, 4.41336364e-4f);
    far = fma(far, b, -4.20456193e-3f);
    far = fma(far, b, 2.52082571e-2f);
    far = fma(far, b, -1.08418576e-1f);
    far = fma(far, b, -6.33219898e-1f);
    far = fma(far, b, -1.12957847f);
    far = fma(far, b, 1.88040227e-4f);
    float result = a < 1.0f ? x * near : copysign(1.0f - precise::exp(far), x);
    return x != x ? x : result;
}
