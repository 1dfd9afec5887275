// Checked runs: kernels compiled with -fsanitize=thread call these functions at each access of memory. An access outside
// of what the dispatch bound stops the group before it happens; so does one that races with another thread's.
//
// Two accesses race when they touch the same place, one of them writes, and no barrier orders them: threads of one group
// are ordered by threadgroup_barrier with the flag of that memory (or, within a simdgroup, by simdgroup functions),
// groups by nothing.
namespace msl {

// Reads of several threads count as one, by many threads; and by many simdgroups, unless one has them all.
struct Access {
  ulong dispatch, group;
  uint thread, simdgroup, phase, simdgroup_phase;
};
constexpr uint many_simdgroups = ~0u;
// What was last done to one place. Places share entries by hash; the later one evicts, so a race may go unseen but none
// is reported that isn't there.
struct Shadow {
  ulong place;
  Access write, read;
};
constexpr ulong shadow_entries = 1ul << 21;
static Shadow* shadows;
static ulong dispatch_number;

bool prepare_checks() {
  shadows = (Shadow*)pages(shadow_entries * sizeof(Shadow));
  return shadows;
}

void begin_check(Worker* w, const Dispatch* d) {
  dispatch_number++;
  w->checked = d;
}

enum class Memory { own, constant, threadgroup, device, none };

// Whether an access of threadgroup memory, where variables are declared, is not inside of one of them.
static bool between_arrays(const Worker* w, ulong address, ulong bytes) {
  ulong begin = address - (ulong)w->threadgroup_memory, last = 0;
  for (uint i = 0; i < w->arrays; ++i) {
    if (begin >= w->array_begins[i] && begin + bytes <= w->array_ends[i]) return false;
    if (w->array_ends[i] > last) last = w->array_ends[i];
  }
  return begin < last;
}

static Memory memory_of(const Worker* w, ulong address, ulong bytes) {
  auto inside = [=](ulong begin, ulong length) { return address >= begin && address + bytes <= begin + length; };
  if (inside((ulong)w->stacks, max_threads * w->stack_stride)) return Memory::own;
  const Dispatch* d = w->checked;
  if (inside((ulong)w->threadgroup_memory, 2 * threadgroup_capacity))
    return inside((ulong)w->threadgroup_memory, d->threadgroup_bytes) && !between_arrays(w, address, bytes)
               ? Memory::threadgroup
               : Memory::none;
  for (uint i = 0; i < buffer_slots; ++i)
    if (d->buffers[i] && inside((ulong)d->buffers[i], d->buffer_bytes[i])) return Memory::device;
  return inside(w->image_begin, w->image_end - w->image_begin) ? Memory::constant : Memory::none;
}

__attribute__((noinline, cold)) static void fail(Worker* w, Failure failure, ulong address, uint other) {
  w->failure_address = address;
  w->failure_other_thread = other;
  abandon_group(failure);
}

static bool unordered(const Access& before, const Access& now) {
  if (before.dispatch != now.dispatch) return false;
  if (before.group != now.group) return true;
  if (before.thread == now.thread || before.phase != now.phase) return false;
  return !(before.simdgroup == now.simdgroup && before.simdgroup_phase != now.simdgroup_phase);
}

static void note_place(Worker* w, ulong place, const Access& now, bool writes) {
  Shadow* shadow = &shadows[(place * 0x9e3779b97f4a7c15ul >> 32) % shadow_entries];
  if (shadow->place != place) *shadow = Shadow{place, {}, {}};
  if (unordered(shadow->write, now)) fail(w, Failure::race, place, shadow->write.thread);
  if (writes) {
    if (unordered(shadow->read, now)) fail(w, Failure::race, place, shadow->read.thread);
    shadow->write = now;
    return;
  }
  Access before = shadow->read;
  shadow->read = now;
  if (!unordered(before, now)) return;
  shadow->read.thread = many_threads;
  if (before.simdgroup != now.simdgroup) shadow->read.simdgroup = many_simdgroups;
}

static void note(const void* pointer, ulong bytes, bool writes) {
  Worker* w = msl_worker;
  if (!w || !w->checked || !w->current) return;
  ulong address = (ulong)pointer;
  Memory memory = memory_of(w, address, bytes);
  if (memory == Memory::own || (memory == Memory::constant && !writes)) return;
  if (memory == Memory::none || memory == Memory::constant) fail(w, Failure::out_of_bounds, address, writes);
  Fiber* self = w->current;
  uint phase = memory == Memory::device ? w->device_phase : w->threadgroup_phase;
  // Threadgroup memory is another memory for each group.
  ulong group = memory == Memory::device ? w->checked_group : 0;
  ulong dispatch = memory == Memory::device ? dispatch_number : dispatch_number + (w->checked_group << 32);
  Access now = {dispatch, group, self->index, self->simdgroup, phase, w->simdgroups[self->simdgroup].phase};
  ulong step = bytes == 1 ? 1 : 2;
  for (ulong place = address; place < address + bytes; place += step) note_place(w, place, now, writes);
}

// What clang says of a subscript beyond an array of a known length; its layout is part of the sanitizer's interface.
struct ArraySubscript {
  const char* file;
  uint line, column;
};

static void fail_subscript(uint line, ulong index) {
  Worker* w = msl_worker;
  if (!w || !w->checked || !w->current) return;
  w->failure_line = line;
  fail(w, Failure::out_of_array, index, 0);
}

}  // namespace msl

extern "C" MSL_EXPORT void __ubsan_handle_out_of_bounds(msl::ArraySubscript* place, void* index) {
  msl::fail_subscript(place->line, (ulong)index);
}
extern "C" MSL_EXPORT void __ubsan_handle_local_out_of_bounds_abort() { msl::fail_subscript(0, 0); }

#define MSL_ACCESS(BYTES)                                                                                             \
  extern "C" MSL_EXPORT void __tsan_read##BYTES(void* p) { msl::note(p, BYTES, false); }                               \
  extern "C" MSL_EXPORT void __tsan_write##BYTES(void* p) { msl::note(p, BYTES, true); }                               \
  extern "C" MSL_EXPORT void __tsan_unaligned_read##BYTES(void* p) { msl::note(p, BYTES, false); }                     \
  extern "C" MSL_EXPORT void __tsan_unaligned_write##BYTES(void* p) { msl::note(p, BYTES, true); }
MSL_ACCESS(1)
MSL_ACCESS(2)
MSL_ACCESS(4)
MSL_ACCESS(8)
MSL_ACCESS(16)

extern "C" MSL_EXPORT void msl_note_access(const void* p, size_t bytes, bool writes) { msl::note(p, bytes, writes); }
extern "C" MSL_EXPORT void __tsan_init() {}
extern "C" MSL_EXPORT void __tsan_func_entry(void*) {}
extern "C" MSL_EXPORT void __tsan_func_exit() {}
extern "C" MSL_EXPORT void* __tsan_memcpy(void* target, const void* source, size_t bytes) {
  msl::note(source, bytes, false);
  msl::note(target, bytes, true);
  return memcpy(target, source, bytes);
}
extern "C" MSL_EXPORT void* __tsan_memmove(void* target, const void* source, size_t bytes) {
  msl::note(source, bytes, false);
  msl::note(target, bytes, true);
  return memmove(target, source, bytes);
}
extern "C" MSL_EXPORT void* __tsan_memset(void* target, int value, size_t bytes) {
  msl::note(target, bytes, true);
  return memset(target, value, bytes);
}
