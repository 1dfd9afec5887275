// Runs one kernel without an operating system's libraries, so that an emulator of another processor can: a dispatch
// comes through standard input, the buffers as the kernel left them go to standard output.
#include "msl_execution.h"

__attribute__((visibility("default"))) extern "C" {
thread_local msl::Worker* msl_worker = nullptr;
void msl_entry(msl::Worker*, const msl::Dispatch*, ulong, ulong);  // named by the linker

void* memcpy(void* target, const void* source, size_t bytes) {
  for (size_t i = 0; i < bytes; ++i) ((volatile char*)target)[i] = ((const char*)source)[i];
  return target;
}
void* memmove(void* target, const void* source, size_t bytes) {
  if (target <= source) return memcpy(target, source, bytes);
  for (size_t i = bytes; i-- > 0;) ((volatile char*)target)[i] = ((const char*)source)[i];
  return target;
}
void* memset(void* target, int value, size_t bytes) {
  for (size_t i = 0; i < bytes; ++i) ((volatile char*)target)[i] = (char)value;
  return target;
}
}

namespace {

constexpr ulong stack_bytes = 65536;
alignas(4096) unsigned char threadgroup_memory[2 * msl::threadgroup_capacity];
alignas(4096) unsigned char stacks[msl::max_threads * stack_bytes];
alignas(4096) unsigned char data[1 << 24];
msl::Fiber fibers[msl::max_threads];
msl::Simdgroup simdgroups[msl::max_threads / msl::simd_width];
msl::Worker worker;
msl::Dispatch dispatch;
alignas(64) unsigned char thread_area[4096];

long call(long number, long first, long second, long third) {
  register long x8 __asm__("x8") = number;
  register long x0 __asm__("x0") = first;
  register long x1 __asm__("x1") = second;
  register long x2 __asm__("x2") = third;
  __asm__ volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2) : "memory");
  return x0;
}
void read_all(void* target, ulong bytes) {
  for (ulong done = 0; done < bytes;) {
    long count = call(63, 0, (long)target + done, bytes - done);
    if (count <= 0) call(93, 2, 0, 0);
    done += count;
  }
}
void write_all(const void* source, ulong bytes) {
  for (ulong done = 0; done < bytes;) done += call(64, 1, (long)source + done, bytes - done);
}

}  // namespace

// Groups, threads, grid and the number of buffers; then the length of each buffer and its content.
extern "C" __attribute__((used, noinline)) void msl_main() {
  __asm__ volatile("msr tpidr_el0, %0" ::"r"(thread_area));
  uint head[10];
  read_all(head, sizeof(head));
  for (int i = 0; i < 3; ++i) {
    dispatch.groups[i] = head[i];
    dispatch.threads[i] = head[3 + i];
    dispatch.grid[i] = head[6 + i];
  }
  ulong at = 0;
  for (uint i = 0; i < head[9]; ++i) {
    read_all(&dispatch.buffer_bytes[i], 8);
    dispatch.buffers[i] = data + at;
    read_all(data + at, dispatch.buffer_bytes[i]);
    at += (dispatch.buffer_bytes[i] + 4095) / 4096 * 4096;
  }
  dispatch.entry = msl_entry;
  dispatch.threadgroup_bytes = msl::threadgroup_capacity;
  worker.threadgroup_memory = threadgroup_memory;
  worker.fibers = fibers;
  worker.simdgroups = simdgroups;
  worker.stacks = stacks;
  worker.stack_stride = stack_bytes;
  msl_worker = &worker;
  msl_entry(&worker, &dispatch, 0, (ulong)head[0] * head[1] * head[2]);
  if (worker.failure != msl::Failure::none) call(93, 3, 0, 0);
  for (uint i = 0; i < head[9]; ++i) write_all(dispatch.buffers[i], dispatch.buffer_bytes[i]);
  call(93, 0, 0, 0);
}
extern "C" __attribute__((naked, used, visibility("default"))) void _start() {
  __asm__ volatile("bl msl_main");
}
