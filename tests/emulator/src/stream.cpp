#include "stream.h"

#include <map>

#include "chance.h"
#include "device.h"
#include "handles.h"

namespace emulator {

namespace {

constexpr size_t MAX_QUEUED = 512;

std::mutex builtin_mutex;

// Stream 0 of a GPU.
std::shared_ptr<Stream> legacy_stream(Device* device) {
    static std::map<Device*, std::shared_ptr<Stream>> streams;
    std::lock_guard lock(builtin_mutex);
    auto& stream = streams[device];
    if (!stream) {
        stream = std::make_shared<Stream>(device, false);
        handles<Stream>().add(stream);
    }
    return stream;
}

std::shared_ptr<Stream> per_thread_stream(Device* device) {
    thread_local std::map<Device*, std::shared_ptr<Stream>> streams;
    auto& stream = streams[device];
    if (!stream) {
        stream = std::make_shared<Stream>(device, true);
        handles<Stream>().add(stream);
    }
    return stream;
}

} // namespace

uint64_t Stream::push(Step step) {
    std::lock_guard lock(mutex_);
    queue_.push_back(std::move(step));
    return ++num_pushed_;
}

uint64_t Stream::enqueue(std::function<void()> work) {
    return enqueue_step([work = std::move(work)](bool) {
        work();
        return true;
    });
}

uint64_t Stream::enqueue_step(Step step) {
    auto after = [](const std::shared_ptr<Stream>& stream) -> Step {
        return [stream, number = stream->last()](bool may_block) { return stream->run_through(number, may_block); };
    };
    std::shared_ptr<Stream> legacy = legacy_stream(device);
    if (legacy.get() == this) {
        for (const auto& other : streams_of(device)) {
            if (other->waits_for_legacy) {
                push(after(other));
            }
        }
    } else if (waits_for_legacy) {
        push(after(legacy));
    }
    uint64_t number = push(std::move(step));
    bool run, full;
    {
        std::lock_guard lock(mutex_);
        eager_ = once_in(16) ? once_in(2) : eager_;
        run = eager_ || everything_at_once();
        full = queue_.size() > MAX_QUEUED;
    }
    if (run) {
        run_through(number, false);
    }
    if (full) {
        finish_through(number - MAX_QUEUED / 2);
    }
    return number;
}

bool Stream::run_through(uint64_t number, bool may_block) {
    std::unique_lock lock(mutex_);
    while (num_done_ < number) {
        if (running_) {
            if (!may_block) {
                return false;
            }
            changed_.wait(lock, [&] { return !running_ || num_done_ >= number; });
            continue;
        }
        running_ = true;
        // Others only add behind it.
        Step& step = queue_.front();
        lock.unlock();
        bool done = step(may_block);
        if (done) {
            // What it holds is let go before anybody sees that it is done.
            step = nullptr;
        }
        lock.lock();
        running_ = false;
        if (done) {
            queue_.pop_front();
            ++num_done_;
        }
        changed_.notify_all();
        if (!done) {
            return false;
        }
    }
    return true;
}

void Stream::finish_through(uint64_t number) {
    while (!run_through(number, true)) {
    }
}

void Stream::finish() {
    finish_through(last());
}

bool Stream::poll(uint64_t number) {
    uint64_t done;
    {
        std::lock_guard lock(mutex_);
        done = num_done_;
    }
    if (done < number) {
        run_through(done + 1, false);
        return false;
    }
    return true;
}

uint64_t Stream::last() const {
    std::lock_guard lock(mutex_);
    return num_pushed_;
}

std::shared_ptr<Stream> stream_from(CUstream handle) {
    if (handle == nullptr || handle == CU_STREAM_LEGACY) {
        return current_device() == nullptr ? nullptr : legacy_stream(current_device());
    }
    if (handle == CU_STREAM_PER_THREAD) {
        return current_device() == nullptr ? nullptr : per_thread_stream(current_device());
    }
    return handles<Stream>().get(handle);
}

std::vector<std::shared_ptr<Stream>> streams_of(const Device* device) {
    std::vector<std::shared_ptr<Stream>> streams;
    for (auto& stream : handles<Stream>().all()) {
        if (stream->device == device) {
            streams.push_back(std::move(stream));
        }
    }
    return streams;
}

void finish_all(const Device* device) {
    for (const auto& stream : streams_of(device)) {
        stream->finish();
    }
}

} // namespace emulator
