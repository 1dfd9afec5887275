// Row kernels: 256 threads share a row, reduce over simdgroups and then over the threadgroup.
#include <metal_stdlib>
using namespace metal;

struct RowParams {
  uint columns;
  float epsilon;
};

constant constexpr uint THREADS = 256;

kernel void softmax_rows(device const half* input [[buffer(0)]],
                         device half* output [[buffer(1)]],
                         constant RowParams& params [[buffer(2)]],
                         uint row [[threadgroup_position_in_grid]],
                         uint tid [[thread_index_in_threadgroup]],
                         uint lane [[thread_index_in_simdgroup]],
                         uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup float partial[THREADS / 32];
  const uint start = row * params.columns;

  float highest = -INFINITY;
  for (uint column = tid; column < params.columns; column += THREADS) {
    highest = max(highest, float(input[start + column]));
  }
  highest = simd_max(highest);
  if (lane == 0) partial[simdgroup] = highest;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  highest = simd_max(lane < THREADS / 32 ? partial[lane] : -INFINITY);
  threadgroup_barrier(mem_flags::mem_threadgroup);

  float total = 0.0f;
  for (uint column = tid; column < params.columns; column += THREADS) {
    total += exp(float(input[start + column]) - highest);
  }
  total = simd_sum(total);
  if (lane == 0) partial[simdgroup] = total;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  total = simd_sum(lane < THREADS / 32 ? partial[lane] : 0.0f);

  for (uint column = tid; column < params.columns; column += THREADS) {
    output[start + column] = half(exp(float(input[start + column]) - highest) / total);
  }
}

kernel void rms_norm_rows(device const half* input [[buffer(0)]],
                          device const half* weight [[buffer(1)]],
                          device half* output [[buffer(2)]],
                          constant RowParams& params [[buffer(3)]],
                          uint row [[threadgroup_position_in_grid]],
                          uint tid [[thread_index_in_threadgroup]],
                          uint lane [[thread_index_in_simdgroup]],
                          uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup float partial[THREADS / 32];
  threadgroup float scale;
  device const half* x = input + row * params.columns;

  float squares = 0.0f;
  for (uint column = tid; column < params.columns; column += THREADS) {
    float value = float(x[column]);
    squares += value * value;
  }
  squares = simd_sum(squares);
  if (lane == 0) partial[simdgroup] = squares;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (simdgroup == 0) {
    float total = lane < THREADS / 32 ? partial[lane] : 0.0f;
    total = simd_sum(total);
    if (lane == 0) scale = rsqrt(total / float(params.columns) + params.epsilon);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint column = tid; column < params.columns; column += THREADS) {
    output[row * params.columns + column] = half(float(x[column]) * scale) * weight[column];
  }
}
