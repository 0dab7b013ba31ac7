// The threads of a block, which take turns on one thread of the host. A thread runs until it waits at a barrier or a shuffle;
// which of the runnable threads comes next is drawn at random, so a kernel that lacks a barrier reads what is not there yet,
// or no longer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cuda.h"
#include "jump.h"
#include "stacks.h"

constexpr unsigned int WARP_SIZE = 32;

class Block {
  public:
    // Gets ready to call kernel(arguments) in blocks of that size, in an order drawn from the seed; null, or what is in the way.
    const char* prepare(ShimIndex size, uint64_t seed, void (*kernel)(void*), void* arguments);
    // Runs a block; null, or what went wrong.
    const char* run();

    // What the running thread calls.
    void wait_at_barrier(const char* file, int line) { wait(State::AtBarrier, file, line); }
    uint64_t exchange(uint64_t value, unsigned int source_lane, const char* file, int line);
    unsigned int lane() const { return current_ % WARP_SIZE; }

    // Runs threads that have not run yet, one after another, on the stack it is called on.
    [[noreturn]] void run_threads();

  private:
    enum class State { New, Ready, AtBarrier, AtShuffle, Done };

    struct Thread {
        State state;
        const char* file;
        int line;
        unsigned int num_shuffles;
        Jump resume;
    };

    struct Warp {
        unsigned int num_waiting;
        unsigned int num_ready;
        unsigned int ready[WARP_SIZE];
        // Two sets of values: a lane may reach the next shuffle before another has read from this one.
        uint64_t values[2][WARP_SIZE];
    };

    unsigned int random_below(unsigned int bound);
    void draw_turns();
    void make_ready(unsigned int thread, State state);
    bool take_ready(unsigned int& thread);
    void set_current(unsigned int thread);
    void wait(State state, const char* file, int line);
    bool arrive();
    [[noreturn]] void run_next();
    bool fail(const char* format, const Thread& thread);

    ShimIndex dim_;
    unsigned int size_;
    ShimIndex* index_;
    std::vector<Thread> threads_;
    std::vector<Warp> warps_;
    // The order in which warps are asked for a thread that can run.
    std::vector<unsigned int> turns_;
    // Whether a warp runs until it waits for others before the next one in the order gets a turn.
    bool ahead_;
    unsigned int num_at_barrier_;
    unsigned int current_;
    uint64_t random_state_;
    Stacks stacks_;
    Jump finished_;
    void (*kernel_)(void*);
    void* arguments_;
    char error_[256];
};

// The one that this thread of the host runs; made by the first launch.
extern __thread Block* shim_block;
Block& shim_block_of_thread();
