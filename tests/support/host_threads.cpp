// What host_kernels.h declares: the threads of a cluster as fibers, one after the other, and what they do together. It is
// compiled once for all kernels.
#include "host_kernels.h"
#include <condition_variable>
#include <mutex>
#include <thread>

Fiber* current;
Dim grid_size;
std::vector<Block*> cluster_blocks;
static jmp_buf scheduler;
static Barrier cluster_barrier;
static int cluster_threads, block_threads;

// swapcontext asks the system for the mask of signals each time: only the first entry is by a context.
void yield()
{
    if (!_setjmp(current->place)) {
        _longjmp(scheduler, 1);
    }
}
static void resume(Fiber& fiber)
{
    current = &fiber;
    if (_setjmp(scheduler)) {
        return;
    }
    if (fiber.started) {
        _longjmp(fiber.place, 1);
    }
    fiber.started = true;
    setcontext(&fiber.start);
}
void count_in(Barrier& barrier, int count)
{
    if (++barrier.arrived == count) {
        barrier.arrived = 0;
        ++barrier.passed;
    }
}
void meet(Barrier& barrier, int count)
{
    int turn = barrier.passed;
    count_in(barrier, count);
    while (barrier.passed == turn) {
        yield();
    }
}
void __syncthreads() { meet(current->own->all, block_threads); }
int voted(int vote, bool of_all)
{
    int& votes = current->own->votes;
    __syncthreads();
    votes = 0;
    __syncthreads();
    votes += vote != 0;
    __syncthreads();
    return of_all ? votes == block_threads : votes != 0;
}
void __syncwarp(unsigned lanes) { meet(current->warp->some[lanes], __builtin_popcount(lanes)); }

// movmatrix: a lane has two neighbours of a row of eight, then of a column.
unsigned host_transposed(unsigned pair)
{
    unsigned result = 0;
    int lane = current->thread.x % 32;
    for (int half = 0; half < 2; ++half) {
        int row = lane % 4 * 2 + half, column = lane / 4;
        for (int turn = 0; turn < 32; ++turn) {
            unsigned found = __shfl_sync(0xffffffffu, pair, turn);
            result |= turn == row * 4 + column / 2 ? (found >> column % 2 * 16 & 0xffff) << half * 16 : 0;
        }
    }
    return result;
}

// Shows the operands of a product of 16 x 8 results to all lanes of a warp. Gives this one's number.
static int show_operands(const unsigned (&a)[4], unsigned b0, unsigned b1)
{
    int lane = current->thread.x % 32;
    unsigned(&mine)[6] = current->warp->word[lane];
    for (int index = 0; index < 4; ++index) {
        mine[index] = a[index];
    }
    mine[4] = b0;
    mine[5] = b1;
    __syncwarp();
    return lane;
}

// mma.m16n8k16: rows and columns of the operands' registers as the PTX manual has them.
void host_multiply(float (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, bool is_half)
{
    int lane = show_operands(a, b0, b1);
    for (int index = 0; index < 4; ++index) {
        int row = lane / 4 + index / 2 * 8, column = lane % 4 * 2 + index % 2;
        float total = sum[index];
        for (int k = 0; k < 16; ++k) {
            int register_a = (row >= 8) + 2 * (k >= 8), register_b = 4 + (k >= 8), shift = k % 2 * 16;
            unsigned left = current->warp->word[row % 8 * 4 + k % 8 / 2][register_a] >> shift;
            unsigned right = current->warp->word[column * 4 + k % 8 / 2][register_b] >> shift;
            total += number_of_bits((unsigned short)left, is_half) * number_of_bits((unsigned short)right, is_half);
        }
        sum[index] = total;
    }
    __syncwarp();
}

// mma.m16n8k32 of bytes; the first operand's are of a kind as PTX calls it.
void host_multiply_codes(int (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, const char* left)
{
    int lane = show_operands(a, b0, b1);
    for (int index = 0; index < 4; ++index) {
        int row = lane / 4 + index / 2 * 8, column = lane % 4 * 2 + index % 2;
        for (int k = 0; k < 32; ++k) {
            unsigned byte = current->warp->word[row % 8 * 4 + k % 16 / 4][(row >= 8) + 2 * (k >= 16)] >> k % 4 * 8 & 255;
            unsigned right = current->warp->word[column * 4 + k % 16 / 4][4 + (k >= 16)] >> k % 4 * 8 & 255;
            sum[index] += (left[0] == 'u' ? int(byte) : int((signed char)byte)) * (signed char)right;
        }
    }
    __syncwarp();
}

// ldmatrix of four matrices.
void host_load_matrices(unsigned (&matrix)[4], unsigned row)
{
    int lane = current->thread.x % 32;
    current->warp->word[lane][0] = row;
    __syncwarp();
    for (int index = 0; index < 4; ++index) {
        unsigned at = current->warp->word[index * 8 + lane / 4][0];
        if (at % 16) {
            fprintf(stderr, "a row of a matrix at an odd place\n");
            abort();
        }
        memcpy(&matrix[index], host_at(at) + lane % 4 * 4, 4);
    }
    __syncwarp();
}

// stmatrix of four transposed matrices.
void host_store_matrices(unsigned address, const unsigned (&word)[4])
{
    int lane = current->thread.x % 32;
    for (int index = 0; index < 4; ++index) {
        current->warp->word[lane][index] = word[index];
    }
    __syncwarp();
    for (int i = 0; i < 8; ++i) {
        unsigned pair = current->warp->word[i * 4 + lane % 8 / 2][lane / 8];
        unsigned short value = (unsigned short)(pair >> lane % 2 * 16);
        memcpy(host_shared() + address + i * 2, &value, 2);
    }
    __syncwarp();
}

void arrive_in_cluster()
{
    if (++cluster_barrier.arrived == cluster_threads) {
        cluster_barrier.arrived = 0;
        ++cluster_barrier.passed;
    }
}
void wait_in_cluster()
{
    int wanted = ++current->cluster_turns;
    while (cluster_barrier.passed < wanted) {
        yield();
    }
}

// Barriers that count arrivals and bytes.
static void end_phase(PhaseBarrier& barrier)
{
    if (barrier.waiting == 0 && barrier.bytes == 0) {
        barrier.waiting = barrier.count;
        ++barrier.phase;
    }
}
void host_make_barrier(unsigned at, int count) { current->own->phases[at] = {count, count, 0, 0}; }
void host_wait(unsigned at, int parity)
{
    while (current->own->phases.at(at).phase % 2 == parity) {
        yield();
    }
}
void host_arrive(unsigned at, int bytes)
{
    PhaseBarrier& barrier = current->own->phases.at(at);
    --barrier.waiting;
    barrier.bytes += bytes;
    end_phase(barrier);
}

void host_count_bytes(unsigned at, int rank, int bytes)
{
    PhaseBarrier& barrier = cluster_blocks[rank]->phases.at(at);
    barrier.bytes -= bytes;
    end_phase(barrier);
}

// What the copy engine is told of a tensor here: elements of 16 bits, lines of a box permuted by exclusive or. Strides in bytes.
struct HostMap {
    const unsigned char* address;
    long sizes[5], strides[5];
    int box[5];
};
void host_copy_box(unsigned target, const void* map, unsigned at, const int (&first)[5])
{
    const HostMap& tensor = *(const HostMap*)map;
    int width = tensor.box[0] * 2, count = 1;
    for (int size : tensor.box) {
        count *= size;
    }
    for (int index = 0; index < count; ++index) {
        const unsigned char* source = tensor.address;
        bool inside = true;
        for (int axis = 0, left = index; axis < 5; left /= tensor.box[axis++]) {
            int place = first[axis] + left % tensor.box[axis];
            inside &= place < tensor.sizes[axis];
            source += place * tensor.strides[axis];
        }
        unsigned short element = 0;
        if (inside) {
            memcpy(&element, source, 2);
        }
        unsigned place = target + index * 2;
        memcpy(host_shared() + (place ^ (place >> 7) % (width / 16) * 16), &element, 2);
    }
    PhaseBarrier& barrier = current->own->phases.at(at);
    barrier.bytes -= count * 2;
    end_phase(barrier);
}

// Stores a box of two axes, its lines of 128 bytes, those beyond the tensor left out.
void host_store_box(unsigned source, const void* map, int first, int line)
{
    const HostMap& tensor = *(const HostMap*)map;
    for (int index = 0; index < tensor.box[0] * tensor.box[1]; ++index) {
        int along = first + index % tensor.box[0], across = line + index / tensor.box[0];
        unsigned place = source + index * 2;
        if (along < tensor.sizes[0] && across < tensor.sizes[1]) {
            memcpy((unsigned char*)tensor.address + along * 2 + across * tensor.strides[1],
                   host_shared() + (place ^ (place >> 7) % 8 * 16), 2);
        }
    }
}

constexpr size_t STACK_BYTES = 1 << 14; // kernels take less than 3 KB
static void** bound;
static void enter()
{
    call_kernel(bound);
    current->finished = true;
    _longjmp(scheduler, 1);
}
static int run_cluster(Dim first, Dim cluster, int block, int shared, bool backwards)
{
    int count = cluster.x * cluster.y;
    cluster_barrier = Barrier();
    std::vector<Block> blocks(count);
    std::vector<Warp> warps(count * block / 32);
    std::vector<Fiber> fibers(count * block);
    static std::vector<char> stacks; // kept: new pages take the system longer than the kernel runs
    stacks.assign(fibers.size() * STACK_BYTES, char(0xff));
    cluster_blocks.clear();
    for (Block& each : blocks) {
        each.shared.assign(shared + 1024, 0xff);
        cluster_blocks.push_back(&each);
    }
    for (int number = 0; number < count * block; ++number) {
        Fiber& fiber = fibers[number];
        int rank = number / block;
        fiber.thread = {number % block, 0, 0};
        fiber.block = {first.x + rank % cluster.x, first.y + rank / cluster.x, first.z};
        fiber.own = &blocks[rank];
        fiber.warp = &warps[number / 32];
        getcontext(&fiber.start);
        fiber.start.uc_stack.ss_sp = &stacks[number * STACK_BYTES];
        fiber.start.uc_stack.ss_size = STACK_BYTES;
        makecontext(&fiber.start, enter, 0);
    }
    // A block's threads go on until all of them wait, then those of the next one, in a thread of the system each.
    alignas(16) static thread_local unsigned char variables;
    std::mutex working;
    std::condition_variable passed;
    int whose = 0, left = int(fibers.size());
    bool endless = false;
    auto work = [&](int rank) {
        std::unique_lock<std::mutex> lock(working);
        blocks[rank].variables = &variables;
        for (long turn = 0;; ++turn) {
            passed.wait(lock, [&] { return whose == rank || left == 0 || endless; });
            endless |= turn > 10000000;
            if (left == 0 || endless) {
                break;
            }
            for (int place = 0; place < block; ++place) {
                Fiber& fiber = fibers[rank * block + (backwards ? block - 1 - place : place)];
                if (!fiber.finished) {
                    resume(fiber);
                    left -= fiber.finished;
                }
            }
            whose = (whose + (backwards ? count - 1 : 1)) % count;
            passed.notify_all();
        }
        passed.notify_all();
    };
    std::vector<std::thread> others;
    for (int rank = 1; rank < count; ++rank) {
        others.emplace_back(work, rank);
    }
    work(0);
    for (std::thread& other : others) {
        other.join();
    }
    if (endless) {
        return 1;
    }
    for (size_t number = 0; number < fibers.size(); ++number) {
        if (stacks[number * STACK_BYTES] != char(0xff)) {
            fprintf(stderr, "a thread needs more than %zu bytes of stack\n", STACK_BYTES);
            abort();
        }
    }
    return 0;
}
extern "C" __attribute__((visibility("default"))) int run(void** pointers, int x, int y, int z, int block, int cluster_x, int cluster_y, int shared, int backwards)
{
    bound = pointers;
    grid_size = {x, y, z};
    block_threads = block;
    cluster_threads = block * cluster_x * cluster_y;
    int failed = 0;
    for (Dim first = {0, 0, 0}; first.z < z; ++first.z) {
        for (first.y = 0; first.y < y; first.y += cluster_y) {
            for (first.x = 0; first.x < x && !failed; first.x += cluster_x) {
                failed = run_cluster(first, {cluster_x, cluster_y, 1}, block, shared, backwards);
            }
        }
    }
    return failed;
}
