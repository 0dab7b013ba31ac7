#include "block.h"

#include <algorithm>
#include <cstdio>
#include <numeric>
#include <utility>

// A plain pointer: an object would be looked after at each use.
__thread Block* shim_block;
__thread ShimIndex threadIdx, blockIdx, blockDim, gridDim;

static void run_on_own_stack() {
    shim_block->run_threads();
}

Block& shim_block_of_thread() {
    thread_local Block block;
    shim_block = &block;
    return block;
}

const char* Block::prepare(ShimIndex dim, uint64_t seed, void (*kernel)(void*), void* arguments) {
    dim_ = dim;
    size_ = dim.x * dim.y * dim.z;
    if (!stacks_.hold(size_)) {
        return "no memory for the threads' stacks";
    }
    blockDim = dim;
    index_ = &threadIdx;
    random_state_ = seed * 2 + 1;
    threads_.assign(size_, Thread{});
    warps_.assign((size_ + WARP_SIZE - 1) / WARP_SIZE, Warp{});
    turns_.resize(warps_.size());
    std::iota(turns_.begin(), turns_.end(), 0u);
    kernel_ = kernel;
    arguments_ = arguments;
    error_[0] = 0;
    return nullptr;
}

// Not inlined: what it keeps in registers is lost on the way back.
__attribute__((noinline)) const char* Block::run() {
    num_at_barrier_ = 0;
    draw_turns();
    for (Warp& warp : warps_) {
        warp.num_waiting = 0;
        warp.num_ready = 0;
    }
    for (unsigned int i = 0; i < size_; ++i) {
        threads_[i].num_shuffles = 0;
        make_ready(i, State::New);
    }
    if (SHIM_MARK(finished_) == 0) {
        run_next();
    }
    for (const Thread& thread : threads_) {
        if (thread.state != State::Done && error_[0] == 0) {
            fail("a thread waits at %s:%d for others that never come", thread);
        }
    }
    if (error_[0] == 0) {
        return nullptr;
    }
    stacks_.clear();
    return error_;
}

uint64_t Block::exchange(uint64_t value, unsigned int source_lane, const char* file, int line) {
    unsigned int index = current_;
    Warp& warp = warps_[index / WARP_SIZE];
    uint64_t* values = warp.values[threads_[index].num_shuffles++ % 2];
    values[index % WARP_SIZE] = value;
    wait(State::AtShuffle, file, line);
    return values[source_lane];
}

// Until another thread of the block waits or ends, and this one is picked again.
__attribute__((noinline)) void Block::wait(State state, const char* file, int line) {
    Thread& thread = threads_[current_];
    thread.state = state;
    thread.file = file;
    thread.line = line;
    if (SHIM_MARK(thread.resume) == 0) {
        if (!arrive()) {
            go_back(finished_);
        }
        run_next();
    }
}

// Goes to a thread that can run; if none can, to the end of `run`.
void Block::run_next() {
    unsigned int next;
    if (!take_ready(next)) {
        go_back(finished_);
    }
    set_current(next);
    if (threads_[next].state == State::New) {
        stacks_.start(run_on_own_stack);
    }
    go_back(threads_[next].resume);
}

// A stack outlives the launch: it waits here until a thread needs one.
__attribute__((noinline)) void Block::run_threads() {
    Jump start;
    for (;;) {
        kernel_(arguments_);
        threads_[current_].state = State::Done;
        unsigned int next;
        bool more = take_ready(next);
        if (more) {
            set_current(next);
        }
        if (more && threads_[next].state == State::New) {
            continue;
        }
        stacks_.give_back(&start);
        if (SHIM_MARK(start) == 0) {
            go_back(more ? threads_[next].resume : finished_);
        }
    }
}

// Lets the waiting threads go on if the current one is the last that they wait for.
bool Block::arrive() {
    const Thread& thread = threads_[current_];
    unsigned int first = current_ / WARP_SIZE * WARP_SIZE, end = std::min(size_, first + WARP_SIZE);
    Warp& warp = warps_[current_ / WARP_SIZE];
    if (thread.state == State::AtBarrier && ++num_at_barrier_ == size_) {
        num_at_barrier_ = 0;
        draw_turns();
        for (unsigned int i = 0; i < size_; ++i) {
            if (threads_[i].file != thread.file || threads_[i].line != thread.line) {
                return fail("threads of a block wait at different barriers, one at %s:%d", thread);
            }
            make_ready(i, State::Ready);
        }
    } else if (thread.state == State::AtShuffle && ++warp.num_waiting == end - first) {
        warp.num_waiting = 0;
        for (unsigned int i = first; i < end; ++i) {
            if (threads_[i].line != thread.line) {
                return fail("lanes of a warp wait at different shuffles, one at %s:%d", thread);
            }
            make_ready(i, State::Ready);
        }
    }
    return true;
}

// Takes a thread that can run; false if none can.
bool Block::take_ready(unsigned int& thread) {
    unsigned int num_warps = (unsigned int)turns_.size();
    unsigned int turn = ahead_ ? 0 : random_below(num_warps);
    for (unsigned int i = 0; i < num_warps; ++i, turn = turn + 1 < num_warps ? turn + 1 : 0) {
        Warp& warp = warps_[turns_[turn]];
        if (warp.num_ready > 0) {
            unsigned int& pick = warp.ready[random_below(warp.num_ready)];
            thread = pick;
            pick = warp.ready[--warp.num_ready];
            return true;
        }
    }
    return false;
}

void Block::make_ready(unsigned int thread, State state) {
    threads_[thread].state = state;
    Warp& warp = warps_[thread / WARP_SIZE];
    warp.ready[warp.num_ready++] = thread;
}

void Block::set_current(unsigned int thread) {
    current_ = thread;
    bool is_row = size_ == dim_.x;
    *index_ = is_row ? ShimIndex{thread, 0, 0}
                     : ShimIndex{thread % dim_.x, thread / dim_.x % dim_.y, thread / dim_.x / dim_.y};
}

// Draws how threads take turns until the next barrier: at times all warps advance together, at times one finishes before
// another begins, because a missing barrier may show in one of the two only.
void Block::draw_turns() {
    ahead_ = random_below(2) == 0;
    for (unsigned int i = 1; i < turns_.size(); ++i) {
        std::swap(turns_[i], turns_[random_below(i + 1)]);
    }
}

unsigned int Block::random_below(unsigned int bound) {
    random_state_ ^= random_state_ >> 12;
    random_state_ ^= random_state_ << 25;
    random_state_ ^= random_state_ >> 27;
    return (unsigned int)(((random_state_ * 0x2545f4914f6cdd1dull) >> 32) * bound >> 32);
}

bool Block::fail(const char* format, const Thread& thread) {
    std::snprintf(error_, sizeof error_, format, thread.file, thread.line);
    return false;
}
