// Work in order. What a program puts on a stream waits in a queue; it runs at the latest when somebody waits for it, on that
// thread, and at random earlier, so a program that forgets to wait reads what is not there yet. Work that needs what other
// streams or ranks do may be not ready; then nothing behind it runs, and only a thread that waits for it waits.
#pragma once

#include <cuda.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

namespace emulator {

struct Device;

// A step of work: whether it is done. Where it may not block and is not ready it says false, and is called again later.
using Step = std::function<bool(bool may_block)>;

class Stream {
  public:
    Stream(Device* device, bool waits_for_legacy) : device(device), waits_for_legacy(waits_for_legacy) {}

    // Puts work on the stream; returns its number.
    uint64_t enqueue(std::function<void()> work);
    uint64_t enqueue_step(Step step);
    // Runs the work up to and including that number, or waits until other threads have.
    void finish_through(uint64_t number);
    void finish();
    // The same; where it may not block, as far as the work is ready. Whether it is done.
    bool run_through(uint64_t number, bool may_block);
    // Whether the work with that number is done; if not, some of the work before it is from now on.
    bool poll(uint64_t number);
    // Number of the last work put on the stream.
    uint64_t last() const;

    Device* const device;
    // Whether it is ordered with the stream 0, as all are that were not made CU_STREAM_NON_BLOCKING.
    const bool waits_for_legacy;

  private:
    uint64_t push(Step step);

    mutable std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<Step> queue_;
    uint64_t num_pushed_ = 0;
    uint64_t num_done_ = 0;
    bool running_ = false;
    // Whether work runs as soon as it comes; drawn again and again.
    bool eager_ = false;
};

// The stream a handle stands for, of the current context where it is 0 or CU_STREAM_PER_THREAD; null if there is none.
std::shared_ptr<Stream> stream_from(CUstream handle);
// All streams of a GPU that exist now.
std::vector<std::shared_ptr<Stream>> streams_of(const Device* device);
// Runs everything that was put on any stream of a GPU.
void finish_all(const Device* device);

} // namespace emulator
