// One kernel for each form that region splitting knows; all write a float for each thread.
#include <metal_stdlib>
using namespace metal;

kernel void early_return(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                         uint tid [[thread_index_in_threadgroup]], uint group [[threadgroup_position_in_grid]]) {
  threadgroup float shared[128];
  shared[tid] = x[group * 128 + tid];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (tid >= 100) return;
  float value = shared[99 - tid];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint i = 0; i < 3; ++i) {
    if (value < 0.0f) return;
    value -= 0.25f;
  }
  y[group * 128 + tid] = value;
}

kernel void collectives(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                        uint tid [[thread_index_in_threadgroup]], uint group [[threadgroup_position_in_grid]],
                        uint lane [[thread_index_in_simdgroup]]) {
  float value = x[group * 128 + tid];
  float sum = value + simd_shuffle_xor(value, 3);
  sum += simd_shuffle_down(value, 2) * simd_shuffle_up(value, 1);
  sum -= simd_broadcast(value, 5) + simd_broadcast_first(sum);
  for (ushort step = 16; step > 0; step /= 2) sum = max(sum, simd_shuffle_xor(sum, step));
  sum += simd_prefix_inclusive_sum(value) - simd_prefix_exclusive_sum(value * 2.0f);
  sum += quad_sum(value) * quad_max(value);
  sum = simd_shuffle(sum, 31 - lane) + float(simd_sum(uint(tid)) & 255);
  y[group * 128 + tid] = sum * simd_product(1.0f + value * 0.01f);
}

kernel void masked_collectives(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                               uint tid [[thread_index_in_threadgroup]], uint group [[threadgroup_position_in_grid]],
                               uint lane [[thread_index_in_simdgroup]]) {
  float value = x[group * 128 + tid];
  float result = 0.0f;
  if (value > 0.0f) {
    result = simd_sum(value);
    result += float(lane);
  } else {
    result = simd_min(value) - 1.0f;
  }
  if (tid < 64) {
    float highest = simd_max(result);
    result = result - highest;
  }
  if (lane > 20) return;
  y[group * 128 + tid] = simd_sum(result);
}

kernel void uniform_branches(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                             constant uint* steps [[buffer(2)]],
                             uint tid [[thread_index_in_threadgroup]], uint group [[threadgroup_position_in_grid]],
                             uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup float shared[2][128];
  uint side = 0, turn = steps[0];
  shared[0][tid] = x[group * 128 + tid];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  while (turn > 0) {
    if (turn % 2 == 0) {
      shared[1 - side][tid] = shared[side][(tid + turn) % 128];
      threadgroup_barrier(mem_flags::mem_threadgroup);
      side = 1 - side;
    } else {
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    turn--;
  }
  float sum = 0.0f;
  for (uint row = simdgroup; row < 8; row += 4) {
    sum += simd_sum(shared[side][tid] * float(row));
    if (row > 5) break;
  }
  y[group * 128 + tid] = sum + shared[side][tid];
}

kernel void local_arrays(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                         uint tid [[thread_index_in_threadgroup]], uint group [[threadgroup_position_in_grid]]) {
  threadgroup float shared[128];
  float own[4] = {1.0f, 2.0f, 3.0f, 4.0f};
  float grid[2][3];
  for (uint i = 0; i < 2; ++i)
    for (uint j = 0; j < 3; ++j) grid[i][j] = float(i * 3 + j) * x[group * 128 + tid];
  own[tid % 4] += x[group * 128 + tid];
  shared[tid] = own[(tid + 1) % 4];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  own[tid % 3] *= shared[127 - tid];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float4 both = float4(own[0], own[1], own[2], own[3]);
  both[tid % 4] += grid[tid % 2][tid % 3];
  y[group * 128 + tid] = both.x + both.y * both.z - both.w + grid[1][2];
}

inline void accumulate(thread float& sum, float value) { sum += value * value; }

kernel void long_loops(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                       uint tid [[thread_index_in_threadgroup]], uint group [[threadgroup_position_in_grid]]) {
  threadgroup float shared[128];
  shared[tid] = x[group * 128 + tid];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float sum = 0.0f, last = 0.0f;
  for (uint i = 0; i < 100; ++i) {
    if (i % 7 == 3) continue;
    float value = shared[(i * 5 + tid) % 128];
    if (value < -1.0f) continue;
    accumulate(sum, value);
    for (uint j = tid % 2; j < 70; j += 3) sum += 0.001f * shared[(i + j) % 128];
    last = value;
  }
  for (uint i = tid; i < 300; i += 128) {
    float value = shared[i % 128];
    sum -= value;
    last += value * float(i);
  }
  y[group * 128 + tid] = sum + last;
}

kernel void atomics(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                    uint tid [[thread_index_in_threadgroup]], uint group [[threadgroup_position_in_grid]]) {
  threadgroup atomic_uint count;
  if (tid == 0) atomic_store_explicit(&count, 0u, memory_order_relaxed);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (x[group * 128 + tid] > 0.0f) atomic_fetch_add_explicit(&count, 1u, memory_order_relaxed);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  y[group * 128 + tid] = float(atomic_load_explicit(&count, memory_order_relaxed));
}

kernel void shared_scalars(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                           uint tid [[thread_index_in_threadgroup]], uint group [[threadgroup_position_in_grid]]) {
  threadgroup float shared[128];
  threadgroup float total;
  threadgroup uint rounds;
  if (tid == 0) {
    total = x[group];
    rounds = 3 + group;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float first = total, own = total * float(tid);
  uint count = rounds;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (tid == 5) total = 1.0f + own;
  for (uint i = 0; i < count; ++i) {
    shared[tid] = own + float(i);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    own += shared[127 - tid] - first;
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  y[group * 128 + tid] = own + total + first;
}

kernel void matrices_by_index(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                              uint tid [[thread_index_in_threadgroup]],
                              uint group [[threadgroup_position_in_grid]]) {
  threadgroup float tile[4][64];
  threadgroup float* tiles = (threadgroup float*)tile;
  tile[tid / 32][tid % 32] = x[group * 128 + tid];
  tile[tid / 32][tid % 32 + 32] = x[group * 128 + 127 - tid];
  uint own = tid / 32;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  simdgroup_float8x8 left, right, sum(0.0f);
  simdgroup_load(left, tiles + own * 64);
  simdgroup_load(right, &tile[(own + 1) % 4][0], 8, ulong2(0, 0), true);
  simdgroup_multiply_accumulate(sum, left, right, sum);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  simdgroup_store(sum, &tile[tid / 32][0]);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  y[group * 128 + tid] = tile[own][tid % 32] + tile[own][tid % 32 + 32];
}

kernel void uniform_between(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                            constant uint& count [[buffer(2)]], uint tid [[thread_index_in_threadgroup]],
                            uint group [[threadgroup_position_in_grid]]) {
  float own = 0.0f;
  for (uint i = tid; i < 300 + group; i += 128) {
    float read = x[i];
    float scaled = read * 3.0f;
    float whole = floor(scaled);
    float rest = scaled - whole;
    float bound = float(long(group)) + float(count);
    own += rest < 0.5f && whole < bound ? rest : whole;
  }
  y[group * 128 + tid] = simd_sum(own) + own;
}

struct Extrema {
  float low, high;
};

METAL_FUNC Extrema joined(Extrema a, Extrema b) { return Extrema{min(a.low, b.low), max(a.high, b.high)}; }

// What the threads ahead have between them; `all` becomes what all have.
METAL_FUNC Extrema ahead_of(Extrema own, thread Extrema& all, uint tid, threadgroup Extrema* shared) {
  threadgroup_barrier(mem_flags::mem_threadgroup);
  shared[tid] = own;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint distance = 1; distance < 128; distance *= 2) {
    Extrema below = own;
    if (tid >= distance) {
      below = shared[tid - distance];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    own = joined(below, own);
    shared[tid] = own;
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  all = shared[127];
  Extrema ahead = Extrema{0.5f, -0.5f};
  if (tid > 0) ahead = shared[tid - 1];
  return ahead;
}

METAL_FUNC float spread_of(float value, thread Extrema& all, threadgroup Extrema* shared, uint tid) {
  Extrema before = ahead_of(Extrema{value, value}, all, tid, shared);
  float gap = before.high - before.low;
  return gap;
}

kernel void functions_with_barriers(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                                    constant uint& count [[buffer(2)]], uint tid [[thread_index_in_threadgroup]],
                                    uint group [[threadgroup_position_in_grid]]) {
  threadgroup Extrema extrema[128];
  Extrema all = Extrema{0.0f, 0.0f};
  float own = 1.0f, gap = 2.0f;
  for (uint round = 0; round < count; ++round) {
    float below = x[group * 128 + (tid + round * 7) % 128];
    gap = spread_of(below + own, all, extrema, tid);
    own += gap * 0.5f - all.low;
  }
  Extrema mine = Extrema{own, own};
  ahead_of(mine, all, tid, extrema);
  y[group * 128 + tid] = own + gap + all.high - mine.low;
}

METAL_FUNC float balanced(float value) {
  float sum = simd_sum(value);
  return value - sum / 32.0f;
}

kernel void functions_with_collectives(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                                       uint tid [[thread_index_in_threadgroup]],
                                       uint group [[threadgroup_position_in_grid]]) {
  float value = balanced(x[group * 128 + tid]);
  if (value > 0.25f) {
    value = balanced(value * value);
  }
  y[group * 128 + tid] = value;
}

METAL_FUNC void order(threadgroup ulong* entries, int low, int high) {
  ulong a = entries[low], b = entries[high];
  if (b < a) {
    entries[low] = b;
    entries[high] = a;
  }
}

METAL_FUNC void sort_all(threadgroup ulong* entries, int total, int tid) {
  for (int size = 2; size <= total; size *= 2) {
    for (int pair = tid; pair < total / 2; pair += 128) {
      int low = pair * 2 - (pair & (size / 2 - 1));
      order(entries, low, low ^ (size - 1));
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int stride = size >> 2; stride > 0; stride >>= 1) {
      for (int pair = tid; pair < total / 2; pair += 128) {
        int low = pair * 2 - (pair & (stride - 1));
        order(entries, low, low + stride);
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
  }
}

kernel void sorting_network(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                            uint tid [[thread_index_in_threadgroup]], uint group [[threadgroup_position_in_grid]]) {
  threadgroup ulong entries[256];
  for (uint i = tid; i < 256; i += 128) {
    uint bits = as_type<uint>(x[(group * 128 + i) % 512]);
    uint key = (bits >> 31) != 0 ? ~bits : bits | 0x80000000u;
    entries[i] = ulong(key) << 32 | ulong(i);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  int total = 256;
  sort_all(entries, total, int(tid));
  y[group * 128 + tid] = float(entries[tid] >> 40) + float(entries[255 - tid] & 0xffff);
}

kernel void guarded_steps(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                          uint tid [[thread_index_in_threadgroup]], uint group [[threadgroup_position_in_grid]]) {
  float own = simd_max(x[tid]);
  for (uint i = tid; i < 300; i += 128) {
    uint share = 1000u / (300u - i);  // which no lane may divide that has come too far
    float sum = float(share);
    for (uint j = 0; j < 70 + group; ++j) sum += x[(j + share) % 512];
    own += sum * float(share);
  }
  y[group * 128 + tid] = own;
}

kernel void values_of_all(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                          uint tid [[thread_index_in_threadgroup]], uint group [[threadgroup_position_in_grid]]) {
  threadgroup float shared[128];
  shared[tid] = x[group * 128 + tid];
  float read = abs(x[group]);
  float twice = read * 2.0f;
  uint count = uint(read) + 1;
  count += 1;
  float moved = simd_shuffle_xor(shared[tid], 3);
  float more = moved * 2.0f;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint i = 0; i < count; ++i) {
    float next = shared[(tid + 1) % 128] + moved;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    shared[tid] = next * 0.5f + more;
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  y[group * 128 + tid] = shared[tid] + twice + more;
}

kernel void arrays_by_pointer(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                              uint tid [[thread_index_in_threadgroup]], uint group [[threadgroup_position_in_grid]]) {
  float own[4] = {1.0f, 2.0f, 3.0f, 4.0f};
  thread float* place = own;
  place[tid % 4] += x[group * 128 + tid];
  float sum = simd_sum(own[1]);
  y[group * 128 + tid] = sum + own[0] * own[2] - own[3];
}
