// Closes the process that runs kernels: from here on it computes, and waits on futexes; whatever else it asks of the
// system ends it. The filter is classic BPF (seccomp(2)); it holds for all threads, and nothing can take it back.
extern "C" {
int prctl(int option, ...);
int setrlimit(int resource, const ulong* limits);
int* __errno_location();
}

namespace msl {

struct FilterInstruction {
  unsigned short code;
  unsigned char if_true, if_false;  // instructions to skip
  uint value;
};
struct FilterProgram {
  unsigned short length;
  const FilterInstruction* instructions;
};

#if defined(__x86_64__)
constexpr uint own_architecture = 0xc000003e;
constexpr long close_range_number = 436, seccomp_number = 317, restart_number = 219;
#else
constexpr uint own_architecture = 0xc00000b7;
constexpr long close_range_number = 436, seccomp_number = 277, restart_number = 128;
#endif

constexpr unsigned short load_word = 0x20, jump_if_equal = 0x15, answer = 0x06;
constexpr uint allow = 0x7fff0000, kill_process = 0x80000000;
constexpr uint at_number = 0, at_architecture = 4, at_second_argument = 24;

// Waiting is all that is allowed: FUTEX_WAIT and FUTEX_WAKE, private or shared, and the restart of a wait that a stop
// signal broke off. Numbers of the x32 interface differ from all of these, and so are refused too.
constexpr FilterInstruction filter[] = {
    {load_word, 0, 0, at_architecture},
    {jump_if_equal, 0, 8, own_architecture},
    {load_word, 0, 0, at_number},
    {jump_if_equal, 7, 0, (uint)restart_number},
    {jump_if_equal, 0, 5, (uint)futex_number},
    {load_word, 0, 0, at_second_argument},
    {jump_if_equal, 4, 0, 0},
    {jump_if_equal, 3, 0, 1},
    {jump_if_equal, 2, 0, 128},
    {jump_if_equal, 1, 0, 129},
    {answer, 0, 0, kill_process},
    {answer, 0, 0, allow},
};

// The process dies with the host's thread that started it, leaves no dump of its memory, and gains no rights.
static void give_up_rights() {
  constexpr int parent_death_signal = 1, dumpable = 4, no_new_privileges = 38, core_size = 4;
  const ulong nothing[2] = {0, 0};
  prctl(parent_death_signal, 9ul, 0ul, 0ul, 0ul);
  prctl(dumpable, 0ul, 0ul, 0ul, 0ul);
  prctl(no_new_privileges, 1ul, 0ul, 0ul, 0ul);
  setrlimit(core_size, nothing);
}

// Zero, or the error number of a system that has no such filters.
static int seal() {
  constexpr ulong set_filter = 1, all_threads = 1;
  syscall(close_range_number, 0ul, ~0u, 0ul);  // where the system lacks it, the filter still refuses their use
  const FilterProgram program = {sizeof(filter) / sizeof(filter[0]), filter};
  long failed = syscall(seccomp_number, set_filter, all_threads, &program);
  return failed < 0 ? *__errno_location() : failed ? 11 : 0;
}

}  // namespace msl
