// The native runtime: a pool of threads that executes a list of commands in one call, in the device's own process.
//
// The caller takes part in every dispatch and waits only for helpers that have begun a piece of it, so that a helper
// that the system has descheduled delays nothing. No C library header is needed: the few functions used are declared
// here and found in the process. Whatever asks the system for something does so before the process is sealed.
#include "msl_execution.h"

extern "C" {
int pthread_create(unsigned long* thread, const void* attributes, void* (*start)(void*), void* argument);
int pthread_detach(unsigned long thread);
int sched_yield();
void* mmap(void* address, size_t bytes, int protection, int flags, int file, long offset);
long syscall(long number, ...);
void* memcpy(void* target, const void* source, size_t bytes);
void* memmove(void* target, const void* source, size_t bytes);
void* memset(void* target, int value, size_t bytes);

__attribute__((visibility("default"), tls_model("initial-exec"))) thread_local msl::Worker* msl_worker = nullptr;
}

namespace msl {

enum class CommandKind : uint { dispatch = 0, copy = 1, fill = 2 };

struct Command {
  CommandKind kind;
  uint value;  // of a fill
  void* target;
  const void* source;
  ulong bytes;
  Dispatch dispatch;
};

struct FailureReport {
  Failure failure;
  uint line, other_line, thread, other_thread;
  ulong address;
};

struct Pool {
  uint count;
  Worker* workers;
  // The open job: helpers that read `generation` join it if `open` still equals what they read.
  const Dispatch* dispatch;
  ulong groups, piece;
  ulong next;
  uint generation, open, inside, sleepers;
  uint ready;       // helpers that have started
  ulong* progress;  // grows with each piece of work
};

// checker.cpp
bool prepare_checks();
void begin_check(Worker* w, const Dispatch* d);

struct HelperArgument {
  Pool* pool;
  uint index;
};

constexpr ulong stack_bytes = 65536 + 320;  // not a multiple of 4096: equal offsets would share cache sets
constexpr uint microseconds_before_sleep = 100;
constexpr ulong few_threads = 512;  // elementwise, they take less time than waking a helper

#if defined(__x86_64__)
constexpr long futex_number = 202;
static void relax() { __builtin_ia32_pause(); }
static ulong ticks() { return __builtin_ia32_rdtsc(); }
static ulong ticks_in(uint microseconds) { return microseconds * 2500ul; }  // at 2.5 GHz: its pace is told nowhere
static void read_written_code() {}
#else
constexpr long futex_number = 98;
static void relax() { __asm__ volatile("yield"); }
static ulong ticks() {
  ulong now;
  __asm__ volatile("mrs %0, cntvct_el0" : "=r"(now));
  return now;
}
static ulong ticks_in(uint microseconds) {
  ulong second;
  __asm__ volatile("mrs %0, cntfrq_el0" : "=r"(second));
  return second * microseconds / 1000000;
}
static void read_written_code() { __asm__ volatile("isb"); }  // each thread drops what it has fetched ahead
#endif
// Spins until a word equals a value, or differs from it; false after so long. A clock tells that, no number of pauses
// does: one takes from 1 to 50 ns.
static bool spin_until(uint* word, uint value, bool equal, uint microseconds) {
  for (ulong begin = ticks(), limit = ticks_in(microseconds);;) {
    if ((__atomic_load_n(word, __ATOMIC_SEQ_CST) == value) == equal) return true;
    if (ticks() - begin > limit) return false;
    relax();
  }
}
static void futex_wait(uint* word, uint value) { syscall(futex_number, word, 128, value, nullptr, nullptr, 0); }
static void futex_wake(uint* word) { syscall(futex_number, word, 129, 0x7fffffff, nullptr, nullptr, 0); }

static void* pages(size_t bytes) {
  constexpr int read_write = 3, private_anonymous_noreserve = 0x2 | 0x20 | 0x4000;
  void* memory = mmap(nullptr, bytes, read_write, private_anonymous_noreserve, -1, 0);
  return memory == (void*)-1 ? nullptr : memory;
}

static bool prepare_worker(Worker* w) {
  w->threadgroup_memory = (unsigned char*)pages(2 * threadgroup_capacity);
  w->fibers = (Fiber*)pages(max_threads * sizeof(Fiber));
  w->simdgroups = (Simdgroup*)pages(max_threads / simd_width * sizeof(Simdgroup));
  w->stack_stride = stack_bytes;
  w->stacks = (unsigned char*)pages(max_threads * stack_bytes);
  return w->threadgroup_memory && w->fibers && w->simdgroups && w->stacks;
}

static void work(Pool* pool, Worker* w) {
  const Dispatch* d = pool->dispatch;
  while (w->failure == Failure::none) {
    ulong first = __atomic_fetch_add(&pool->next, pool->piece, __ATOMIC_RELAXED);
    if (first >= pool->groups) return;
    __atomic_fetch_add(pool->progress, 1ul, __ATOMIC_RELAXED);
    ulong last = first + pool->piece;
    d->entry(w, d, first, last < pool->groups ? last : pool->groups);
  }
  __atomic_store_n(&pool->next, pool->groups, __ATOMIC_RELAXED);
}

static uint next_generation(Pool* pool, uint seen) {
  if (spin_until(&pool->generation, seen, false, microseconds_before_sleep))
    return __atomic_load_n(&pool->generation, __ATOMIC_SEQ_CST);
  __atomic_fetch_add(&pool->sleepers, 1, __ATOMIC_SEQ_CST);
  while (__atomic_load_n(&pool->generation, __ATOMIC_SEQ_CST) == seen) futex_wait(&pool->generation, seen);
  __atomic_fetch_sub(&pool->sleepers, 1, __ATOMIC_SEQ_CST);
  return __atomic_load_n(&pool->generation, __ATOMIC_SEQ_CST);
}

static void* helper(void* argument) {
  HelperArgument* given = (HelperArgument*)argument;
  Pool* pool = given->pool;
  Worker* w = &pool->workers[given->index];
  msl_worker = w;
  __atomic_fetch_add(&pool->ready, 1, __ATOMIC_SEQ_CST);
  for (uint seen = 0;;) {
    seen = next_generation(pool, seen);
    read_written_code();
    __atomic_fetch_add(&pool->inside, 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&pool->open, __ATOMIC_SEQ_CST) == seen) work(pool, w);
    __atomic_fetch_sub(&pool->inside, 1, __ATOMIC_SEQ_CST);
  }
  return nullptr;
}

static void run_dispatch(Pool* pool, const Dispatch* d, bool checked) {
  pool->dispatch = d;
  pool->groups = (ulong)d->groups[0] * d->groups[1] * d->groups[2];
  pool->piece = pool->groups / (pool->count * 32ul) + 1;
  pool->next = 0;
  ulong threads = (ulong)d->grid[0] * d->grid[1] * d->grid[2];
  bool shared = !checked && pool->count > 1 && pool->groups > 1 && threads >= few_threads;
  if (!shared) {
    if (threads < few_threads) pool->piece = pool->groups;
    if (checked) begin_check(&pool->workers[0], d);
    work(pool, &pool->workers[0]);
    pool->workers[0].checked = nullptr;
    return;
  }
  uint generation = pool->generation + 1 ? pool->generation + 1 : 1;
  __atomic_store_n(&pool->open, generation, __ATOMIC_SEQ_CST);
  __atomic_store_n(&pool->generation, generation, __ATOMIC_SEQ_CST);
  if (__atomic_load_n(&pool->sleepers, __ATOMIC_SEQ_CST)) futex_wake(&pool->generation);
  work(pool, &pool->workers[0]);
  __atomic_store_n(&pool->open, 0u, __ATOMIC_SEQ_CST);
  while (__atomic_load_n(&pool->inside, __ATOMIC_SEQ_CST)) relax();
}

static void run_command(Pool* pool, const Command* c, bool checked) {
  __atomic_fetch_add(pool->progress, 1ul, __ATOMIC_RELAXED);
  if (c->kind == CommandKind::copy) memmove(c->target, c->source, c->bytes);
  else if (c->kind == CommandKind::fill) memset(c->target, (int)c->value, c->bytes);
  else run_dispatch(pool, &c->dispatch, checked);
}

static bool report_failure(Pool* pool, FailureReport* report) {
  for (uint i = 0; i < pool->count; ++i) {
    Worker* w = &pool->workers[i];
    if (w->failure == Failure::none) continue;
    *report = {w->failure,        w->failure_line,         w->failure_other_line,
               w->failure_thread, w->failure_other_thread, w->failure_address};
    return true;
  }
  return false;
}

// A pool of `count` workers, the caller of run_commands among them; null when memory is short. All its threads have
// started when it returns.
static Pool* create_pool(uint count, ulong* progress) {
  Pool* pool = (Pool*)pages(sizeof(Pool));
  if (!pool || !prepare_checks()) return nullptr;
  pool->count = count;
  pool->progress = progress;
  pool->workers = (Worker*)pages(count * sizeof(Worker));
  HelperArgument* arguments = (HelperArgument*)pages(count * sizeof(HelperArgument));
  if (!pool->workers || !arguments) return nullptr;
  for (uint i = 0; i < count; ++i)
    if (!prepare_worker(&pool->workers[i])) return nullptr;
  uint started = 0;
  for (uint i = 1; i < count; ++i) {
    arguments[i] = {pool, i};
    unsigned long thread;
    if (pthread_create(&thread, nullptr, helper, &arguments[i])) break;  // fewer helpers only means slower
    pthread_detach(thread);
    started++;
  }
  while (__atomic_load_n(&pool->ready, __ATOMIC_SEQ_CST) < started) sched_yield();
  return pool;
}

// Runs the commands in order and keeps `current` at the one that runs; returns the index of the one that failed, or
// `count`. Not reentrant.
static ulong run_commands(Pool* pool, const Command* commands, ulong count, uint reversed, uint checked, ulong* current,
                          FailureReport* report) {
  msl_worker = &pool->workers[0];
  for (uint i = 0; i < pool->count; ++i) {
    pool->workers[i].failure = Failure::none;
    pool->workers[i].reversed = reversed;
  }
  for (ulong i = 0; i < count; ++i) {
    __atomic_store_n(current, i, __ATOMIC_RELAXED);
    run_command(pool, &commands[i], checked);
    if (report_failure(pool, report)) return i;
  }
  return count;
}

}  // namespace msl
