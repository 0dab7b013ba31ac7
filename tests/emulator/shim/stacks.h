// Stacks for the threads of a block, kept from launch to launch: their pages cost more than most kernels.
#pragma once

#include <ucontext.h>

#include <cstddef>
#include <vector>

#include "jump.h"

class Stacks {
  public:
    ~Stacks();

    // Makes room for so many threads; false if there is no memory.
    bool hold(unsigned int num_threads);
    // Goes back to the start of a stack that nothing is on, or calls `run` on a new one; `run` never returns.
    [[noreturn]] void start(void (*run)());
    // The running stack has nothing on it any more but the place to start again.
    void give_back(Jump* start) { idle_.push_back(start); }
    // Forgets what is on the stacks.
    void clear();

  private:
    char* memory_ = nullptr;
    size_t bytes_ = 0;
    size_t num_started_ = 0;
    std::vector<Jump*> idle_;
    ucontext_t fresh_;
};
