// What a kernel runs on: the dispatch record, the worker (one host thread), and fibers, one per GPU thread, which give
// the reference meaning of barriers. `software_gpu/native_runtime.py` mirrors Dispatch.
#pragma once
#include "msl_types.h"

namespace msl {

constexpr uint simd_width = 32;
constexpr uint max_threads = 1024;
constexpr uint buffer_slots = 31;
constexpr uint threadgroup_capacity = 32768;

struct Worker;

struct Dispatch {
  void (*entry)(Worker*, const Dispatch*, ulong first_group, ulong last_group);
  void* buffers[buffer_slots];
  ulong buffer_bytes[buffer_slots];  // from the address to the end of what is bound
  uint threadgroup_offsets[buffer_slots];
  uint threadgroup_bytes;  // all that a group may use
  uint groups[3];   // threadgroups in the grid
  uint threads[3];  // threads in a full threadgroup
  uint grid[3];     // threads in the grid
};

struct Fiber {
  void* stack_pointer;
  uint index, lane, simdgroup;
  uint position[3];
  uint next, previous;  // the ring of fibers that still run
  uint site;            // the barrier or collective it last reached
};

// Where in the source a barrier or collective stands; later in the source is larger.
constexpr uint column_bits = 12;
#define MSL_SITE ((__builtin_LINE() << msl::column_bits) | (__builtin_COLUMN() & ((1 << msl::column_bits) - 1)))

// Each lane that arrives at a simdgroup function publishes its value and its second argument here.
struct Simdgroup {
  uint live, waiting_lanes, phase;
  uint sites[simd_width], operands[simd_width];
  alignas(64) unsigned char values[simd_width * 16];
};

enum class Failure : uint { none = 0, divergent_barrier = 1, out_of_bounds = 2, race = 3, out_of_array = 4 };
constexpr uint most_arrays = 64;

constexpr uint many_threads = ~0u;

struct Worker {
  unsigned char* threadgroup_memory;
  Fiber* fibers;
  Simdgroup* simdgroups;
  unsigned char* stacks;
  ulong stack_stride;
  void* scheduler_stack;
  Fiber* current;
  uint live, arrived, phase, idle_switches, threads;
  uint reversed;  // run the fibers last to first, to show what depends on their order
  Failure failure;
  uint failure_line, failure_other_line;
  uint failure_thread, failure_other_thread;
  ulong failure_address;
  void (*body)(void*);
  void* body_argument;
  // For a checked run: what the group may touch, and how often barriers have ordered its accesses.
  const Dispatch* checked;
  ulong checked_group;
  uint threadgroup_phase, device_phase;
  ulong image_begin, image_end;  // the library itself, whose constants a kernel may read
  uint arrays, array_begins[most_arrays], array_ends[most_arrays];  // in threadgroup memory; what is between them is no one's
};

#define MSL_EXPORT __attribute__((visibility("default")))

// One word for each host thread, owned by the native runtime.
extern "C" __attribute__((tls_model("initial-exec"))) thread_local Worker* msl_worker;

// The position of a thread or group as the type that the kernel's parameter has.
template <class T> MSL_INLINE T position(uint x, uint y, uint z) {
  typedef element<T> E;
  if constexpr (width<T> == 1) return (T)x;
  else if constexpr (width<T> == 2) return T{(E)x, (E)y};
  else return T{(E)x, (E)y, (E)z};
}

MSL_INLINE uint smaller(uint a, uint b) { return a < b ? a : b; }

// Threads of group `g` along one axis: the last group of dispatchThreads may be cut.
MSL_INLINE uint extent(const Dispatch& d, uint axis, uint g) {
  return smaller(d.threads[axis], d.grid[axis] - g * d.threads[axis]);
}

// One group, as its fibers see it.
struct Group {
  const Dispatch* d;
  uint gx, gy, gz, nx, ny, nz;
};

// What the host must have bound for an argument: at least `bytes`, at a multiple of `alignment`.
struct ArgumentNeed { uint kernel, index, bytes, alignment; };

// How much static threadgroup memory a kernel takes, left in a section of the library for the host to read.
struct ThreadgroupLength { uint kernel, bytes; };
template <uint Kernel, uint Bytes> struct threadgroup_length {
  static const ThreadgroupLength record;
};
template <uint Kernel, uint Bytes>
__attribute__((used, section("msl_lengths"))) const ThreadgroupLength threadgroup_length<Kernel, Bytes>::record = {Kernel, Bytes};

// Between threadgroup variables of a checked library lies memory that is no one's.
#ifdef MSL_RED_ZONE
constexpr uint red_zone = MSL_RED_ZONE;
#else
constexpr uint red_zone = 0;
#endif

// The end of a threadgroup variable that follows others ending at `start`; far beyond what there is, it stays there.
template <class T> constexpr uint end_of(uint start) {
  return sizeof(T) > 1u << 30 || start > 1u << 30
             ? 1u << 31
             : ((start ? start + red_zone : 0) + 15u) / 16u * 16u + (uint)sizeof(T);
}

// A checked library calls out at each access of memory; what belongs to the machinery does not.
#ifdef MSL_CHECKED
#define MSL_UNCHECKED __attribute__((no_sanitize("thread"), disable_sanitizer_instrumentation))
#define MSL_UNCHECKED_INLINE MSL_UNCHECKED __attribute__((noinline)) static
#else
#define MSL_UNCHECKED
#define MSL_UNCHECKED_INLINE MSL_INLINE
#endif

// Says where a threadgroup variable lies.
MSL_UNCHECKED_INLINE void placed([[maybe_unused]] uint begin, [[maybe_unused]] uint end) {
#ifdef MSL_CHECKED
  Worker* w = msl_worker;
  for (uint i = 0; i < w->arrays; ++i)
    if (w->array_begins[i] == begin) return;
  if (w->arrays == most_arrays) return;
  w->array_begins[w->arrays] = begin;
  w->array_ends[w->arrays++] = end;
#endif
}

MSL_UNCHECKED_INLINE unsigned char* threadgroup_memory(uint offset) {
  return msl_worker->threadgroup_memory + offset;
}

#if defined(__x86_64__)
__attribute__((naked, noinline)) MSL_UNCHECKED static void switch_stack(void** save, void* next) {
  __asm__ volatile(
      "pushq %rbp\n pushq %rbx\n pushq %r12\n pushq %r13\n pushq %r14\n pushq %r15\n"
      "movq %rsp, (%rdi)\n movq %rsi, %rsp\n"
      "popq %r15\n popq %r14\n popq %r13\n popq %r12\n popq %rbx\n popq %rbp\n"
      "popq %rcx\n jmpq *%rcx\n");  // a return would defeat the branch predictor's stack
}
// Six zeroed registers, the entry, and one word that keeps the stack aligned as after a call.
MSL_UNCHECKED static void* first_frame(unsigned char* top, void (*entry)()) {
  void** sp = (void**)((ulong)top & ~63ul);
  *--sp = nullptr;
  *--sp = (void*)entry;
  for (int i = 0; i < 6; ++i) *--sp = nullptr;
  return sp;
}
#elif defined(__aarch64__)
__attribute__((naked, noinline)) MSL_UNCHECKED static void switch_stack(void** save, void* next) {
  __asm__ volatile(
      "sub sp, sp, #160\n"
      "stp x19, x20, [sp]\n stp x21, x22, [sp, #16]\n stp x23, x24, [sp, #32]\n stp x25, x26, [sp, #48]\n"
      "stp x27, x28, [sp, #64]\n stp x29, x30, [sp, #80]\n"
      "stp d8, d9, [sp, #96]\n stp d10, d11, [sp, #112]\n stp d12, d13, [sp, #128]\n stp d14, d15, [sp, #144]\n"
      "mov x9, sp\n str x9, [x0]\n mov sp, x1\n"
      "ldp x19, x20, [sp]\n ldp x21, x22, [sp, #16]\n ldp x23, x24, [sp, #32]\n ldp x25, x26, [sp, #48]\n"
      "ldp x27, x28, [sp, #64]\n ldp x29, x30, [sp, #80]\n"
      "ldp d8, d9, [sp, #96]\n ldp d10, d11, [sp, #112]\n ldp d12, d13, [sp, #128]\n ldp d14, d15, [sp, #144]\n"
      "add sp, sp, #160\n br x30\n");
}
MSL_UNCHECKED static void* first_frame(unsigned char* top, void (*entry)()) {
  void** sp = (void**)((ulong)top & ~63ul) - 20;
  for (int i = 0; i < 20; ++i) sp[i] = nullptr;
  sp[11] = (void*)entry;
  return sp;
}
#else
#error "the software GPU runs on x86-64 and aarch64"
#endif

MSL_UNCHECKED_INLINE void resume(Fiber* from, Fiber* to) {
  if (from == to) return;
  msl_worker->current = to;
  switch_stack(&from->stack_pointer, to->stack_pointer);
}

// Leaves the group for good; the other fibers are never resumed.
__attribute__((noinline, cold)) MSL_UNCHECKED static void abandon_group(Failure failure) {
  Worker* w = msl_worker;
  w->failure = failure;
  w->failure_thread = w->current->index;
  void* never;
  switch_stack(&never, w->scheduler_stack);
}

// Some fibers wait here and others elsewhere. Of the two places, the one where fewer wait is named first.
__attribute__((noinline, cold)) MSL_UNCHECKED static void report_divergence(Worker* w) {
  Fiber* here = w->current;
  Fiber* elsewhere = here;
  uint together = 0, apart = 0;
  for (Fiber* f = &w->fibers[here->next];; f = &w->fibers[f->next]) {
    if (f->site == here->site) together++;
    else apart++, elsewhere = f;
    if (f == here) break;
  }
  Fiber* first = apart < together ? elsewhere : here;
  Fiber* second = apart < together ? here : elsewhere;
  w->failure_line = first->site >> column_bits;
  w->failure_other_line = second->site >> column_bits;
  w->failure_other_thread = second->index;
  w->current = first;
  abandon_group(Failure::divergent_barrier);
}

// Every live fiber was resumed more than once and none got on.
MSL_UNCHECKED_INLINE void wait_turn(Worker* w, Fiber* self) {
  if (++w->idle_switches > 4 * w->threads + 64) report_divergence(w);
  resume(self, &w->fibers[self->next]);
}

// A wait ends when all that still live have arrived; whoever sees that first releases the others. A fiber that returns
// lowers `live`, so those that wait look again each time they are resumed.
MSL_UNCHECKED_INLINE void threadgroup_wait(uint site, bool orders_threadgroup, bool orders_device) {
  Worker* w = msl_worker;
  Fiber* self = w->current;
  self->site = site;
  w->arrived++;
  for (uint phase = w->phase; w->phase == phase;) {
    if (w->arrived == w->live) {
      w->arrived = 0;
      w->phase++;
      w->threadgroup_phase += orders_threadgroup;
      w->device_phase += orders_device;
    } else {
      wait_turn(w, self);
    }
  }
  w->idle_switches = 0;
}

// The lanes that wait at the earliest place in the source: those go on first, so that lanes which took different
// branches meet again behind them, as on a GPU.
MSL_UNCHECKED_INLINE uint lanes_at_earliest_site(const Simdgroup* s) {
  uint earliest = ~0u, lanes = 0;
  for (uint lane = 0; lane < simd_width; ++lane) {
    if (!(s->waiting_lanes >> lane & 1) || s->sites[lane] > earliest) continue;
    lanes = s->sites[lane] < earliest ? 1u << lane : lanes | 1u << lane;
    earliest = s->sites[lane];
  }
  return lanes;
}

// A wait for the lanes of a simdgroup that are at the same place; one of them does `work` for all of them.
template <class Work> MSL_UNCHECKED_INLINE void simdgroup_wait(uint site, Work work) {
  Worker* w = msl_worker;
  Fiber* self = w->current;
  Simdgroup* s = &w->simdgroups[self->simdgroup];
  uint own_lane = 1u << self->lane;
  self->site = s->sites[self->lane] = site;
  s->waiting_lanes |= own_lane;
  while (s->waiting_lanes & own_lane) {
    bool all_wait = (uint)__builtin_popcount(s->waiting_lanes) == s->live;
    uint lanes = all_wait ? lanes_at_earliest_site(s) : 0;
    if (lanes & own_lane) {
      work(lanes);
      s->waiting_lanes &= ~lanes;
      s->phase++;
    } else {
      wait_turn(w, self);
    }
  }
  w->idle_switches = 0;
}

MSL_UNCHECKED static void finish_fiber() {
  Worker* w = msl_worker;
  Fiber* self = w->current;
  w->fibers[self->previous].next = self->next;
  w->fibers[self->next].previous = self->previous;
  w->simdgroups[self->simdgroup].live--;
  w->live--;
  w->idle_switches = 0;
  void* never;
  if (!w->live) switch_stack(&never, w->scheduler_stack);
  w->current = &w->fibers[self->next];
  switch_stack(&never, w->current->stack_pointer);
}

MSL_UNCHECKED static void fiber_entry() {
  msl_worker->body(msl_worker->body_argument);
  finish_fiber();
  __builtin_unreachable();
}

MSL_UNCHECKED static void prepare_fiber(Worker* w, uint index, uint nx, uint ny, uint count) {
  Fiber* f = &w->fibers[index];
  uint after = index + 1 == count ? 0 : index + 1, before = index ? index - 1 : count - 1;
  *f = Fiber{};
  f->index = index;
  f->lane = index % simd_width;
  f->simdgroup = index / simd_width;
  f->position[0] = index % nx;
  f->position[1] = index / nx % ny;
  f->position[2] = index / nx / ny;
  f->next = w->reversed ? before : after;
  f->previous = w->reversed ? after : before;
  f->stack_pointer = first_frame(w->stacks + w->stack_stride * (index + 1), fiber_entry);
}

#ifdef MSL_CHECKED
extern "C" __attribute__((visibility("hidden"))) const unsigned char __ehdr_start[], _end[];

// What no one has written yet shows in the results: all bits set is NaN in every floating-point type.
MSL_UNCHECKED static void prepare_check(Worker* w) {
  w->image_begin = (ulong)__ehdr_start;
  w->image_end = (ulong)_end;
  w->arrays = 0;
  if (!w->checked) return;
  for (uint i = 0; i < w->checked->threadgroup_bytes; ++i) w->threadgroup_memory[i] = 0xff;
}
#else
MSL_INLINE void prepare_check(Worker*) {}
#endif

// Runs `body` once for each thread of a group; false when the group failed.
MSL_UNCHECKED static bool run_fibers(Worker* w, uint nx, uint ny, uint nz, void (*body)(void*), void* argument) {
  uint count = nx * ny * nz;
  w->live = w->threads = count;
  w->threadgroup_phase = w->device_phase = 0;
  prepare_check(w);
  w->arrived = w->phase = w->idle_switches = 0;
  w->body = body;
  w->body_argument = argument;
  for (uint i = 0; i < count; ++i) prepare_fiber(w, i, nx, ny, count);
  for (uint s = 0; s * simd_width < count; ++s) {
    w->simdgroups[s].live = smaller(simd_width, count - s * simd_width);
    w->simdgroups[s].waiting_lanes = w->simdgroups[s].phase = 0;
  }
  w->current = &w->fibers[w->reversed ? count - 1 : 0];
  switch_stack(&w->scheduler_stack, w->current->stack_pointer);
  w->current = nullptr;
  return w->failure == Failure::none;
}

}  // namespace msl

using msl::msl_worker;
