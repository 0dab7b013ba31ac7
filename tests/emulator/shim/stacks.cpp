#include "stacks.h"

#include <sys/mman.h>

#include <cstdlib>

static constexpr size_t STACK_BYTES = 64 * 1024;

Stacks::~Stacks() {
    if (bytes_ > 0) {
        munmap(memory_, bytes_);
    }
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
    if (bytes_ > 0) {
        munmap(memory_, bytes_);
    }
    clear();
    memory_ = static_cast<char*>(fresh);
    bytes_ = needed;
    return true;
}

void Stacks::start(void (*run)()) {
    if (!idle_.empty()) {
        Jump* start = idle_.back();
        idle_.pop_back();
        go_back(*start);
    }
    getcontext(&fresh_);
    fresh_.uc_stack.ss_sp = memory_ + num_started_++ * STACK_BYTES;
    fresh_.uc_stack.ss_size = STACK_BYTES;
    fresh_.uc_link = nullptr;
    makecontext(&fresh_, run, 0);
    setcontext(&fresh_);
    std::abort();
}

void Stacks::clear() {
    idle_.clear();
    num_started_ = 0;
}
