// Runs a kernel on the CPU: the blocks one after another, each thread of a block on a stack of its own from its first wait
// on. A thread runs until it waits at a barrier or a shuffle; which of the runnable threads comes next is drawn at random,
// so a kernel that lacks a barrier reads what is not there yet, or no longer. Shared memory starts as NaN in each block.
#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <utility>
#include <vector>

#include "cuda.h"

namespace {

constexpr size_t STACK_BYTES = 64 * 1024;
constexpr size_t SHARED_FLOATS = 227 * 256; // what a block may have on sm_90
constexpr unsigned int WARP_SIZE = 32;
constexpr size_t GUARD_BYTES = 4096; // behind the shared memory of a block
constexpr unsigned char POISON = 0xff; // four of them are a NaN, and so are two

enum class State { New, Ready, AtBarrier, AtShuffle, Done };

struct Thread {
    State state;
    const char* file;
    int line;
    unsigned int num_shuffles;
    jmp_buf resume;
};

struct Warp {
    unsigned int num_waiting;
    unsigned int num_ready;
    unsigned int ready[WARP_SIZE];
    // Two sets of values: a lane may reach the next shuffle before another has read from this one.
    uint64_t values[2][WARP_SIZE];
};

struct Block {
    unsigned int size;
    std::vector<Thread> threads;
    std::vector<Warp> warps;
    // The order in which warps are asked for a thread that can run.
    std::vector<unsigned int> turns;
    // Whether a warp runs until it waits for others before the next one in the order gets a turn.
    bool ahead;
    unsigned int num_at_barrier;
    unsigned int current;
    jmp_buf scheduler;
    void (*kernel)(void*);
    void* arguments;
    char error[256];
};

thread_local Block block;
thread_local uint64_t random_state;

// Stacks for the threads of a block, kept from launch to launch: their pages cost more than most kernels.
class Stacks {
  public:
    ~Stacks() { release(); }

    bool hold(unsigned int num_threads);
    // Starts a thread that has not run on a stack that nothing is on; returns when it waits or all that could run have ended.
    [[noreturn]] void start();
    // The running thread's stack has nothing on it any more.
    void give_back(jmp_buf* start) { idle_.push_back(start); }
    // Forgets what is on the stacks.
    void clear() {
        idle_.clear();
        num_started_ = 0;
    }

  private:
    void release() {
        if (bytes_ > 0) {
            munmap(memory_, bytes_);
        }
    }

    char* memory_ = nullptr;
    size_t bytes_ = 0;
    size_t num_started_ = 0;
    std::vector<jmp_buf*> idle_;
    ucontext_t fresh_;
};

thread_local Stacks stacks;

unsigned int random_below(unsigned int bound) {
    random_state ^= random_state >> 12;
    random_state ^= random_state << 25;
    random_state ^= random_state >> 27;
    return (unsigned int)(((random_state * 0x2545f4914f6cdd1dull) >> 32) * bound >> 32);
}

// Back to the scheduler; returns when it picks this thread again.
void wait(State state, const char* file, int line) {
    Thread& thread = block.threads[block.current];
    thread.state = state;
    thread.file = file;
    thread.line = line;
    if (_setjmp(thread.resume) == 0) {
        _longjmp(block.scheduler, 1);
    }
}

bool fail(const char* format, const Thread& thread) {
    std::snprintf(block.error, sizeof block.error, format, thread.file, thread.line);
    return false;
}

void make_ready(unsigned int thread, State state) {
    block.threads[thread].state = state;
    Warp& warp = block.warps[thread / WARP_SIZE];
    warp.ready[warp.num_ready++] = thread;
}

// Draws how threads take turns until the next barrier: at times all warps advance together, at times one finishes before
// another begins, because a missing barrier may show in one of the two only.
void draw_turns() {
    block.ahead = random_below(2) == 0;
    for (unsigned int i = 1; i < block.turns.size(); ++i) {
        std::swap(block.turns[i], block.turns[random_below(i + 1)]);
    }
}

// Takes a thread that can run; false if none can.
bool take_ready(unsigned int& thread) {
    unsigned int num_warps = (unsigned int)block.turns.size();
    unsigned int first = block.ahead ? 0 : random_below(num_warps);
    for (unsigned int i = 0, turn = first; i < num_warps; ++i, turn = turn + 1 < num_warps ? turn + 1 : 0) {
        Warp& warp = block.warps[block.turns[turn]];
        if (warp.num_ready > 0) {
            unsigned int& pick = warp.ready[random_below(warp.num_ready)];
            thread = pick;
            pick = warp.ready[--warp.num_ready];
            return true;
        }
    }
    return false;
}

// Lets the waiting threads go on if the last one has come.
bool arrive(unsigned int index) {
    Thread& thread = block.threads[index];
    unsigned int first = index / WARP_SIZE * WARP_SIZE;
    Warp& warp = block.warps[index / WARP_SIZE];
    if (thread.state == State::AtBarrier && ++block.num_at_barrier == block.size) {
        block.num_at_barrier = 0;
        draw_turns();
        for (unsigned int i = 0; i < block.size; ++i) {
            if (block.threads[i].file != thread.file || block.threads[i].line != thread.line) {
                return fail("threads of a block wait at different barriers, one at %s:%d", thread);
            }
            make_ready(i, State::Ready);
        }
    } else if (thread.state == State::AtShuffle && ++warp.num_waiting == std::min(block.size - first, WARP_SIZE)) {
        warp.num_waiting = 0;
        for (unsigned int i = first; i < std::min(block.size, first + WARP_SIZE); ++i) {
            if (block.threads[i].line != thread.line) {
                return fail("lanes of a warp wait at different shuffles, one at %s:%d", thread);
            }
            make_ready(i, State::Ready);
        }
    }
    return true;
}

void set_current(unsigned int index) {
    block.current = index;
    threadIdx = {index % blockDim.x, index / blockDim.x % blockDim.y, index / blockDim.x / blockDim.y};
}

// Runs threads that have not run yet, one after another, until one waits or the next to run has waited before: that one
// goes on on its own stack. A stack outlives the launch, waiting here for other threads.
void run_on_own_stack() {
    jmp_buf start;
    for (;;) {
        block.kernel(block.arguments);
        block.threads[block.current].state = State::Done;
        unsigned int next;
        bool more = take_ready(next);
        if (more) {
            set_current(next);
        }
        if (more && block.threads[next].state == State::New) {
            continue;
        }
        stacks.give_back(&start);
        if (_setjmp(start) == 0) {
            if (more) {
                _longjmp(block.threads[next].resume, 1);
            }
            _longjmp(block.scheduler, 1);
        }
    }
}

void Stacks::start() {
    if (!idle_.empty()) {
        jmp_buf* start = idle_.back();
        idle_.pop_back();
        _longjmp(*start, 1);
    }
    getcontext(&fresh_);
    fresh_.uc_stack.ss_sp = memory_ + num_started_++ * STACK_BYTES;
    fresh_.uc_stack.ss_size = STACK_BYTES;
    fresh_.uc_link = nullptr;
    makecontext(&fresh_, run_on_own_stack, 0);
    setcontext(&fresh_);
    std::abort();
}

bool Stacks::hold(unsigned int num_threads) {
    size_t needed = num_threads * STACK_BYTES;
    if (needed <= bytes_) {
        return true;
    }
    void* fresh = mmap(nullptr, needed, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (fresh == MAP_FAILED) {
        return false;
    }
    release();
    clear();
    memory_ = static_cast<char*>(fresh);
    bytes_ = needed;
    return true;
}

// Lets a thread run, and others after it; the last of them is the current one when this returns.
void resume(unsigned int index) {
    set_current(index);
    if (_setjmp(block.scheduler) != 0) {
        return;
    }
    if (block.threads[index].state == State::New) {
        stacks.start();
    }
    _longjmp(block.threads[index].resume, 1);
}

bool run_block() {
    block.num_at_barrier = 0;
    draw_turns();
    for (Warp& warp : block.warps) {
        warp.num_waiting = 0;
        warp.num_ready = 0;
    }
    for (unsigned int i = 0; i < block.size; ++i) {
        block.threads[i].num_shuffles = 0;
        make_ready(i, State::New);
    }
    unsigned int index;
    while (take_ready(index)) {
        resume(index);
        if (!arrive(block.current)) {
            return false;
        }
    }
    for (const Thread& thread : block.threads) {
        if (thread.state != State::Done) {
            return fail("a thread waits at %s:%d for others that never come", thread);
        }
    }
    return true;
}

bool is_poison(const unsigned char* from, const unsigned char* to) {
    for (; from != to; ++from) {
        if (*from != POISON) {
            return false;
        }
    }
    return true;
}

} // namespace

__thread ShimIndex threadIdx, blockIdx, blockDim, gridDim;
extern __thread __align__(16) float shared[];
__thread __align__(16) float shared[SHARED_FLOATS + GUARD_BYTES / sizeof(float)];

void shim_barrier(const char* file, int line) {
    wait(State::AtBarrier, file, line);
}

uint64_t shim_exchange(unsigned int mask, uint64_t value, unsigned int source_lane, const char* file, int line) {
    unsigned int index = block.current;
    Warp& warp = block.warps[index / WARP_SIZE];
    uint64_t* values = warp.values[block.threads[index].num_shuffles++ % 2];
    values[index % WARP_SIZE] = value;
    // A mask of some lanes would need a count of its own; no kernel has one.
    if (mask != 0xffffffffu) {
        line = -line;
    }
    wait(State::AtShuffle, file, line);
    return values[source_lane];
}

unsigned int shim_lane() {
    return block.current % WARP_SIZE;
}

// Calls kernel(arguments) in every thread of a grid; null, or what went wrong.
extern "C" const char* shim_launch_grid(const unsigned int grid[3], const unsigned int block_dim[3], size_t shared_bytes,
                                        uint64_t seed, void (*kernel)(void*), void* arguments) {
    uint64_t block_size = (uint64_t)block_dim[0] * block_dim[1] * block_dim[2];
    if (block_size == 0 || block_size > 1024) {
        return "the block does not have 1 to 1024 threads";
    }
    if (shared_bytes > SHARED_FLOATS * sizeof *shared) {
        return "more shared memory than there is";
    }
    if (!stacks.hold((unsigned int)block_size)) {
        return "no memory for the threads' stacks";
    }
    random_state = seed * 2 + 1;
    gridDim = {grid[0], grid[1], grid[2]};
    blockDim = {block_dim[0], block_dim[1], block_dim[2]};
    block.size = (unsigned int)block_size;
    block.threads.assign(block_size, Thread{});
    block.warps.assign((block_size + WARP_SIZE - 1) / WARP_SIZE, Warp{});
    block.turns.resize(block.warps.size());
    std::iota(block.turns.begin(), block.turns.end(), 0u);
    block.kernel = kernel;
    block.arguments = arguments;
    block.error[0] = 0;
    unsigned char* behind = reinterpret_cast<unsigned char*>(shared) + shared_bytes;
    std::memset(behind, POISON, GUARD_BYTES);
    bool good = true;
    for (uint64_t i = 0; good && i < (uint64_t)grid[0] * grid[1] * grid[2]; ++i) {
        blockIdx = {(unsigned int)(i % grid[0]), (unsigned int)(i / grid[0] % grid[1]),
                    (unsigned int)(i / grid[0] / grid[1])};
        std::memset(shared, POISON, shared_bytes);
        good = run_block();
    }
    if (!good) {
        stacks.clear();
    }
    if (good && !is_poison(behind, behind + GUARD_BYTES)) {
        return "a block wrote beyond its shared memory";
    }
    return good ? nullptr : block.error;
}

// The same with one-dimensional blocks of whole warps, which is what the project's kernels ask for.
extern "C" const char* shim_launch(const unsigned int grid[3], unsigned int block_size, size_t shared_bytes,
                                   uint64_t seed, void (*kernel)(void*), void* arguments) {
    if (block_size == 0 || block_size % WARP_SIZE != 0 || block_size > 1024) {
        return "the block is not 1 to 32 whole warps";
    }
    const unsigned int block_dim[3] = {block_size, 1, 1};
    return shim_launch_grid(grid, block_dim, shared_bytes, seed, kernel, arguments);
}
