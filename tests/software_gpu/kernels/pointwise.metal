// Kernels without synchronisation.
#include <metal_stdlib>
using namespace metal;

struct PoolParams {
  uint height, width, out_height, out_width, kernel_size, stride, padding;
};

kernel void silu(device const half* input [[buffer(0)]],
                 device half* output [[buffer(1)]],
                 constant uint& count [[buffer(2)]],
                 uint i [[thread_position_in_grid]]) {
  if (i >= count) return;
  float x = float(input[i]);
  output[i] = half(x / (1.0f + exp(-x)));
}

kernel void add4(device const half4* a [[buffer(0)]],
                 device const half4* b [[buffer(1)]],
                 device half4* output [[buffer(2)]],
                 uint i [[thread_position_in_grid]]) {
  output[i] = half4(float4(a[i]) + float4(b[i]));
}

kernel void max_pool(device const half* input [[buffer(0)]],
                     device half* output [[buffer(1)]],
                     constant PoolParams& params [[buffer(2)]],
                     uint3 position [[thread_position_in_grid]]) {
  if (position.x >= params.out_width || position.y >= params.out_height) return;
  device const half* plane = input + position.z * params.height * params.width;
  float best = -INFINITY;
  for (uint ky = 0; ky < params.kernel_size; ++ky) {
    int y = int(position.y * params.stride + ky) - int(params.padding);
    if (y < 0 || y >= int(params.height)) continue;
    for (uint kx = 0; kx < params.kernel_size; ++kx) {
      int x = int(position.x * params.stride + kx) - int(params.padding);
      if (x < 0 || x >= int(params.width)) continue;
      best = max(best, float(plane[y * int(params.width) + x]));
    }
  }
  output[(position.z * params.out_height + position.y) * params.out_width + position.x] = half(best);
}
