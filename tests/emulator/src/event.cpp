// Streams and events.
#include "stream.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>

#include "chance.h"
#include "device.h"
#include "handles.h"
#include "report.h"
#include "work.h"

using namespace emulator;

namespace {

// A place in a stream's order of work.
struct Mark {
    std::shared_ptr<Stream> stream;
    uint64_t number;
    std::atomic<double> milliseconds{0};
};

struct Event {
    Device* device;
    bool is_timed;
    std::mutex mutex;
    std::shared_ptr<Mark> mark;

    std::shared_ptr<Mark> last_mark() {
        std::lock_guard lock(mutex);
        return mark;
    }
};

double now() {
    using namespace std::chrono;
    return duration<double, std::milli>(steady_clock::now().time_since_epoch()).count();
}

// Other streams may be anywhere when a program waits for one.
void move_others(const Stream& waited_for) {
    if (everything_at_once() || !once_in(4)) {
        return;
    }
    auto others = streams_of(waited_for.device);
    const auto& other = others[draw() % others.size()];
    uint64_t last = other->last();
    other->run_through(last - std::min<uint64_t>(last, draw() % 8), false);
}

CUresult wait_for(Stream& stream, uint64_t number) {
    move_others(stream);
    stream.finish_through(number);
    return stream.device->error;
}

CUresult create_stream(CUstream* handle, unsigned int flags) {
    if (CUresult error = check_current()) {
        return error;
    }
    auto stream = std::make_shared<Stream>(current_device(), !(flags & CU_STREAM_NON_BLOCKING));
    *handle = static_cast<CUstream>(handles<Stream>().add(stream));
    return CUDA_SUCCESS;
}

} // namespace

CUresult CUDAAPI cuStreamCreate(CUstream* stream, unsigned int flags) {
    return create_stream(stream, flags);
}

CUresult CUDAAPI cuStreamCreateWithPriority(CUstream* stream, unsigned int flags, int) {
    return create_stream(stream, flags);
}

CUresult CUDAAPI cuStreamDestroy(CUstream handle) {
    std::shared_ptr<Stream> stream = handles<Stream>().get(handle);
    if (!stream) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    stream->finish();
    handles<Stream>().remove(handle);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuStreamSynchronize(CUstream handle) {
    if (CUresult error = check_current()) {
        return error;
    }
    waits("for a stream");
    std::shared_ptr<Stream> stream = stream_from(handle);
    return stream ? wait_for(*stream, stream->last()) : CUDA_ERROR_INVALID_HANDLE;
}

CUresult CUDAAPI cuStreamQuery(CUstream handle) {
    if (CUresult error = check_current()) {
        return error;
    }
    std::shared_ptr<Stream> stream = stream_from(handle);
    if (!stream) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    return stream->poll(stream->last()) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult CUDAAPI cuStreamIsCapturing(CUstream handle, CUstreamCaptureStatus* status) {
    *status = CU_STREAM_CAPTURE_STATUS_NONE;
    return stream_from(handle) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult CUDAAPI cuStreamGetCtx(CUstream handle, CUcontext* context) {
    std::shared_ptr<Stream> stream = stream_from(handle);
    if (!stream) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    *context = stream->device->context();
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuStreamWaitEvent(CUstream stream_handle, CUevent event_handle, unsigned int) {
    if (CUresult error = check_current()) {
        return error;
    }
    std::shared_ptr<Stream> stream = stream_from(stream_handle);
    std::shared_ptr<Event> event = handles<Event>().get(event_handle);
    if (!stream || !event) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    if (std::shared_ptr<Mark> mark = event->last_mark(); mark && mark->stream != stream) {
        stream->enqueue_step([mark](bool may_block) { return mark->stream->run_through(mark->number, may_block); });
    }
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuLaunchHostFunc(CUstream handle, CUhostFn function, void* argument) {
    if (CUresult error = check_current()) {
        return error;
    }
    std::shared_ptr<Stream> stream = stream_from(handle);
    if (!stream) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    uint64_t number = stream->enqueue([function, argument] { function(argument); });
    // The program may wait for what the function does rather than for the stream.
    std::thread([stream, number] { stream->finish_through(number); }).detach();
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuEventCreate(CUevent* handle, unsigned int flags) {
    if (CUresult error = check_current()) {
        return error;
    }
    auto event = std::make_shared<Event>();
    event->device = current_device();
    event->is_timed = !(flags & CU_EVENT_DISABLE_TIMING);
    *handle = static_cast<CUevent>(handles<Event>().add(event));
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuEventDestroy(CUevent handle) {
    return handles<Event>().remove(handle) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult CUDAAPI cuEventRecord(CUevent event_handle, CUstream stream_handle) {
    if (CUresult error = check_current()) {
        return error;
    }
    std::shared_ptr<Stream> stream = stream_from(stream_handle);
    std::shared_ptr<Event> event = handles<Event>().get(event_handle);
    if (!stream || !event) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    if (event->device != stream->device) {
        report("an event of GPU %d was recorded on a stream of GPU %d", event->device->ordinal, stream->device->ordinal);
        return CUDA_ERROR_INVALID_HANDLE;
    }
    auto mark = std::make_shared<Mark>();
    mark->stream = stream;
    mark->number = stream->enqueue([mark] { mark->milliseconds = now(); });
    std::lock_guard lock(event->mutex);
    event->mark = mark;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuEventSynchronize(CUevent handle) {
    if (CUresult error = check_current()) {
        return error;
    }
    std::shared_ptr<Event> event = handles<Event>().get(handle);
    if (!event) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    std::shared_ptr<Mark> mark = event->last_mark();
    if (mark) {
        waits("for an event");
    }
    return mark ? wait_for(*mark->stream, mark->number) : CUDA_SUCCESS;
}

CUresult CUDAAPI cuEventQuery(CUevent handle) {
    if (CUresult error = check_current()) {
        return error;
    }
    std::shared_ptr<Event> event = handles<Event>().get(handle);
    if (!event) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    std::shared_ptr<Mark> mark = event->last_mark();
    return !mark || mark->stream->poll(mark->number) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult CUDAAPI cuEventElapsedTime(float* milliseconds, CUevent start_handle, CUevent end_handle) {
    if (CUresult error = check_current()) {
        return error;
    }
    std::shared_ptr<Event> start = handles<Event>().get(start_handle), end = handles<Event>().get(end_handle);
    if (!start || !end || !start->is_timed || !end->is_timed || !start->last_mark() || !end->last_mark()) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    std::shared_ptr<Mark> first = start->last_mark(), last = end->last_mark();
    if (!first->stream->poll(first->number) || !last->stream->poll(last->number)) {
        return CUDA_ERROR_NOT_READY;
    }
    *milliseconds = (float)(last->milliseconds - first->milliseconds);
    return CUDA_SUCCESS;
}
