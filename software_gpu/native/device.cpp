// The device as a process: it maps the memory that it shares with the host, seals itself, and runs what the host posts.
// The host's side of the posting is here too. `software_gpu/native_runtime.py` mirrors Header.
//
// The host believes nothing that it reads here: kernels can write over all of it but the code.
extern "C" int getppid();

namespace msl {

struct Header {
  // Written by the host.
  alignas(64) uint request;  // the number of the newest job
  uint reversed, checked, host_waits;
  ulong count;       // of its commands
  ulong code_bytes;  // how much of the code region is in use
  // Written by the device.
  alignas(64) uint reply;  // the number of the newest job that is done
  uint started, device_waits;
  uint seal_error;  // why the system could not close the process, as an error number
  ulong current, progress;  // the command that runs; grows as long as there is progress
  ulong done;               // commands that ran, of a job that is done
  FailureReport report;
  ulong runtime, worker_offset, copy, move, set;  // what kernels link to
};

// Whoever sleeps is woken in 50 to 150 microseconds. While it wakes, and runs what it must, the other one spins.
constexpr uint microseconds_before_host_sleeps = 40, microseconds_before_device_sleeps = 200;

struct Time {
  long seconds, nanoseconds;
};
static void shared_futex_wait(uint* word, uint value, const Time* limit) {
  syscall(futex_number, word, 0, value, limit, nullptr, 0);
}
static void shared_futex_wake(uint* word) { syscall(futex_number, word, 1, 0x7fffffff, nullptr, nullptr, 0); }

// Instructions that another process wrote: their lines leave the caches of data and reach those of instructions.
static void read_code_anew(ulong begin, ulong end) {
#if defined(__aarch64__)
  ulong kind;
  __asm__("mrs %0, ctr_el0" : "=r"(kind));
  ulong data_line = 4ul << (kind >> 16 & 15), code_line = 4ul << (kind & 15);
  for (ulong at = begin & -data_line; at < end; at += data_line) __asm__ volatile("dc cvau, %0" ::"r"(at) : "memory");
  __asm__ volatile("dsb ish" ::: "memory");
  for (ulong at = begin & -code_line; at < end; at += code_line) __asm__ volatile("ic ivau, %0" ::"r"(at) : "memory");
  __asm__ volatile("dsb ish\n isb" ::: "memory");
#endif
}

static uint next_request(Header* h, uint seen) {
  if (spin_until(&h->request, seen, false, microseconds_before_device_sleeps))
    return __atomic_load_n(&h->request, __ATOMIC_SEQ_CST);
  __atomic_store_n(&h->device_waits, 1u, __ATOMIC_SEQ_CST);
  while (__atomic_load_n(&h->request, __ATOMIC_SEQ_CST) == seen) shared_futex_wait(&h->request, seen, nullptr);
  __atomic_store_n(&h->device_waits, 0u, __ATOMIC_SEQ_CST);
  return __atomic_load_n(&h->request, __ATOMIC_SEQ_CST);
}

[[noreturn]] static void serve(Header* h, const Command* commands, ulong code, Pool* pool) {
  ulong code_read = 0;
  for (uint seen = 0;;) {
    seen = next_request(h, seen);
    if (h->code_bytes > code_read) read_code_anew(code + code_read, code + h->code_bytes);
    code_read = h->code_bytes;
    h->done = run_commands(pool, commands, h->count, h->reversed, h->checked, &h->current, &h->report);
    __atomic_store_n(&h->reply, seen, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&h->host_waits, __ATOMIC_SEQ_CST)) shared_futex_wake(&h->reply);
  }
}

// The host's memory at the host's addresses: the header and commands, code that can't be written, data that can't be run.
static bool map_shared(int file, ulong base, ulong control_bytes, ulong code_bytes, ulong all_bytes) {
  constexpr int read_write = 3, read_run = 5, shared_noreserve_fixed = 0x1 | 0x4000 | 0x100000;
  ulong starts[] = {0, control_bytes, control_bytes + code_bytes, all_bytes};
  for (int i = 0; i < 3; ++i) {
    void* place = (void*)(base + starts[i]);
    int protection = i == 1 ? read_run : read_write;
    if (mmap(place, starts[i + 1] - starts[i], protection, shared_noreserve_fixed, file, (long)starts[i]) != place)
      return false;
  }
  return true;
}

}  // namespace msl

// The whole life of the device's process. Returns only where it could not begin, with the reason.
extern "C" MSL_EXPORT const char* msl_device_serve(ulong file, ulong base, ulong commands_offset, ulong control_bytes,
                                                   ulong code_bytes, ulong all_bytes, ulong workers, ulong host) {
  using namespace msl;
  give_up_rights();
  if ((ulong)getppid() != host) return "the host ended";
  if (!map_shared((int)file, base, control_bytes, code_bytes, all_bytes)) return "the shared memory could not be mapped";
  Header* h = (Header*)base;
  Pool* pool = create_pool((uint)workers, &h->progress);
  if (!pool) return "no memory for its workers";
  h->runtime = (ulong)&msl_device_serve;
  h->worker_offset = (ulong)&msl_worker - (ulong)__builtin_thread_pointer();
  h->copy = (ulong)&memcpy, h->move = (ulong)&memmove, h->set = (ulong)&memset;
  h->seal_error = (uint)seal();
  __atomic_store_n(&h->started, 1u, __ATOMIC_SEQ_CST);
  serve(h, (const Command*)(base + commands_offset), base + control_bytes, pool);
}

// For the host. Waits for the end of a job; false when some time, or a signal, or a stray wake came first.
extern "C" MSL_EXPORT bool msl_device_wait(msl::Header* h, uint request, uint milliseconds) {
  using namespace msl;
  if (spin_until(&h->reply, request, true, microseconds_before_host_sleeps)) return true;
  __atomic_store_n(&h->host_waits, 1u, __ATOMIC_SEQ_CST);
  uint reply = __atomic_load_n(&h->reply, __ATOMIC_SEQ_CST);
  Time limit = {milliseconds / 1000, milliseconds % 1000 * 1000000l};
  if (reply != request) shared_futex_wait(&h->reply, reply, &limit);
  __atomic_store_n(&h->host_waits, 0u, __ATOMIC_SEQ_CST);
  return __atomic_load_n(&h->reply, __ATOMIC_SEQ_CST) == request;
}

// For the host. Posts the job whose commands lie in the shared memory, and waits as msl_device_wait does.
extern "C" MSL_EXPORT bool msl_device_run(msl::Header* h, uint request, uint milliseconds) {
  using namespace msl;
  __atomic_store_n(&h->request, request, __ATOMIC_SEQ_CST);
  if (__atomic_load_n(&h->device_waits, __ATOMIC_SEQ_CST)) shared_futex_wake(&h->request);
  return msl_device_wait(h, request, milliseconds);
}

// For the host. Wakes whoever waits for the device, because it will not answer any more.
extern "C" MSL_EXPORT void msl_device_ended(msl::Header* h) { msl::shared_futex_wake(&h->reply); }
