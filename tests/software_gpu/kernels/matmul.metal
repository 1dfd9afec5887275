// Products of matrices in the forms that a compiler of models needs.
#include <metal_stdlib>
using namespace metal;

struct MatmulParams {
  uint rows, columns, depth;
};

// 64x64 of C for each threadgroup of four simdgroups, each a 32x32 quarter of 4x4 matrices. C = A B^T.
kernel void matmul_simdgroup(device const half* a [[buffer(0)]],
                             device const half* b [[buffer(1)]],
                             device half* c [[buffer(2)]],
                             constant MatmulParams& params [[buffer(3)]],
                             uint2 tile [[threadgroup_position_in_grid]],
                             uint tid [[thread_index_in_threadgroup]],
                             uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup half a_tile[64][32];
  threadgroup half b_tile[64][32];
  threadgroup float c_tile[64][64];
  const uint row0 = tile.y * 64, column0 = tile.x * 64;
  const uint quarter_row = (simdgroup / 2) * 32, quarter_column = (simdgroup % 2) * 32;

  simdgroup_float8x8 sums[4][4];
  for (ushort i = 0; i < 4; ++i) {
    for (ushort j = 0; j < 4; ++j) sums[i][j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  }
  for (uint k0 = 0; k0 < params.depth; k0 += 32) {
    for (uint i = tid; i < 64 * 8; i += 128) {
      uint row = i / 8, part = i % 8;
      uint k = k0 + part * 4;
      half4 from_a = half4(0.0h), from_b = half4(0.0h);
      if (row0 + row < params.rows && k < params.depth) {
        from_a = *(device const half4*)(a + (row0 + row) * params.depth + k);
      }
      if (column0 + row < params.columns && k < params.depth) {
        from_b = *(device const half4*)(b + (column0 + row) * params.depth + k);
      }
      *(threadgroup half4*)(&a_tile[row][part * 4]) = from_a;
      *(threadgroup half4*)(&b_tile[row][part * 4]) = from_b;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (ushort k = 0; k < 32; k += 8) {
      simdgroup_half8x8 left[4], right[4];
      for (ushort i = 0; i < 4; ++i) {
        simdgroup_load(left[i], &a_tile[quarter_row + i * 8][k], 32);
        simdgroup_load(right[i], &b_tile[quarter_column + i * 8][k], 32, ulong2(0, 0), true);
      }
      for (ushort i = 0; i < 4; ++i) {
        for (ushort j = 0; j < 4; ++j) simdgroup_multiply_accumulate(sums[i][j], left[i], right[j], sums[i][j]);
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  for (ushort i = 0; i < 4; ++i) {
    for (ushort j = 0; j < 4; ++j) {
      simdgroup_store(sums[i][j], &c_tile[quarter_row + i * 8][quarter_column + j * 8], 64);
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint i = tid; i < 64 * 64; i += 128) {
    uint row = row0 + i / 64, column = column0 + i % 64;
    if (row < params.rows && column < params.columns) {
      c[row * params.columns + column] = half(max(c_tile[i / 64][i % 64], 0.0f));
    }
  }
}

// 64x64 of C for each threadgroup of 16x16 threads, 4x4 for each thread. C = A B.
kernel void matmul_tiled(device const half* a [[buffer(0)]],
                         device const half* b [[buffer(1)]],
                         device half* c [[buffer(2)]],
                         constant MatmulParams& params [[buffer(3)]],
                         uint2 tile [[threadgroup_position_in_grid]],
                         uint2 place [[thread_position_in_threadgroup]],
                         uint tid [[thread_index_in_threadgroup]]) {
  threadgroup float a_tile[16][64];
  threadgroup float b_tile[16][64];
  float sums[4][4] = {};
  for (uint k0 = 0; k0 < params.depth; k0 += 16) {
    for (uint i = tid; i < 16 * 64; i += 256) {
      uint k = k0 + i % 16, row = tile.y * 64 + i / 16;
      a_tile[i % 16][i / 16] = k < params.depth && row < params.rows ? float(a[row * params.depth + k]) : 0.0f;
      k = k0 + i / 64;
      uint column = tile.x * 64 + i % 64;
      b_tile[i / 64][i % 64] = k < params.depth && column < params.columns ? float(b[k * params.columns + column]) : 0.0f;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint k = 0; k < 16; ++k) {
      for (uint i = 0; i < 4; ++i) {
        for (uint j = 0; j < 4; ++j) sums[i][j] += a_tile[k][place.y + 16 * i] * b_tile[k][place.x + 16 * j];
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  for (uint i = 0; i < 4; ++i) {
    for (uint j = 0; j < 4; ++j) {
      uint row = tile.y * 64 + place.y + 16 * i, column = tile.x * 64 + place.x + 16 * j;
      if (row < params.rows && column < params.columns) c[row * params.columns + column] = half(sums[i][j]);
    }
  }
}

// y = W x: a row of W for each simdgroup, eight of them in a threadgroup.
kernel void matvec(device const half* weight [[buffer(0)]],
                   device const half* x [[buffer(1)]],
                   device half* y [[buffer(2)]],
                   constant MatmulParams& params [[buffer(3)]],
                   uint group [[threadgroup_position_in_grid]],
                   uint lane [[thread_index_in_simdgroup]],
                   uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  const uint row = group * 8 + simdgroup;
  if (row >= params.rows) return;
  device const half4* w4 = (device const half4*)(weight + row * params.depth);
  device const half4* x4 = (device const half4*)x;
  float partial = 0.0f;
  for (uint k = lane; k < params.depth / 4; k += 32) {
    partial += dot(float4(w4[k]), float4(x4[k]));
  }
  float total = simd_sum(partial);
  if (lane == 0) y[row] = half(total);
}
