// Copies and fills.
#include <cstdlib>
#include <cstring>
#include <map>
#include <vector>

#include "report.h"
#include "work.h"

using namespace emulator;

namespace {

// Memory of the host that a GPU copies from and to on its own, by start.
std::mutex pinned_mutex;
std::map<const char*, size_t> pinned;

bool is_pinned(const void* address) {
    std::lock_guard lock(pinned_mutex);
    auto next = pinned.upper_bound(static_cast<const char*>(address));
    return next != pinned.begin() && static_cast<const char*>(address) < std::prev(next)->first + std::prev(next)->second;
}

bool is_host(const void* address, const char* who) {
    if (address != nullptr && device_of(reinterpret_cast<CUdeviceptr>(address)) == nullptr) {
        return true;
    }
    report("%s: %p is not memory of the host", who, address);
    return false;
}

// What all copies check before they do anything. `device_side` and `other` are addresses on GPUs; `other` may be 0.
CUresult check(Stream* stream, CUdeviceptr device_side, CUdeviceptr other, size_t bytes, const char* who) {
    if (CUresult error = check_current()) {
        return error;
    }
    if (stream == nullptr) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    bool good = place(*stream->device, device_side, bytes, When::Asked, who, false) != nullptr &&
                (other == 0 || place(*stream->device, other, bytes, When::Asked, who, false) != nullptr);
    return good ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult host_to_device(CUdeviceptr dst, const void* src, size_t bytes, CUstream handle) {
    const char* who = "a copy from the host";
    std::shared_ptr<Stream> stream = stream_from(handle);
    if (bytes == 0) {
        return check_current();
    }
    if (!is_host(src, who)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (CUresult error = check(stream.get(), dst, 0, bytes, who)) {
        return error;
    }
    // Ordinary memory is copied before the function returns; the program may change it then.
    // A real GPU's driver may wait for the stream first.
    if (!is_pinned(src)) {
        waits("to copy from pageable memory");
    }
    const char* from = static_cast<const char*>(src);
    auto staged = std::make_shared<std::vector<char>>(from, is_pinned(src) ? from : from + bytes);
    put(*stream, [=](Device& device) {
        char* to = place(device, dst, bytes, When::Running, who, false);
        if (to == nullptr) {
            return CUDA_ERROR_ILLEGAL_ADDRESS;
        }
        std::memcpy(to, staged->empty() ? from : staged->data(), bytes);
        return CUDA_SUCCESS;
    });
    return CUDA_SUCCESS;
}

CUresult device_to_host(void* dst, CUdeviceptr src, size_t bytes, CUstream handle, bool wait) {
    const char* who = "a copy to the host";
    std::shared_ptr<Stream> stream = stream_from(handle);
    if (bytes == 0) {
        return check_current();
    }
    if (!is_host(dst, who)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (CUresult error = check(stream.get(), src, 0, bytes, who)) {
        return error;
    }
    uint64_t number = put(*stream, [=](Device& device) {
        const char* from = place(device, src, bytes, When::Running, who, false);
        if (from == nullptr) {
            return CUDA_ERROR_ILLEGAL_ADDRESS;
        }
        std::memcpy(dst, from, bytes);
        return CUDA_SUCCESS;
    });
    if (wait || !is_pinned(dst)) {
        waits("to copy to the host");
        stream->finish_through(number);
    }
    return stream->device->error;
}

CUresult device_to_device(CUdeviceptr dst, CUdeviceptr src, size_t bytes, CUstream handle) {
    const char* who = "a copy between buffers";
    std::shared_ptr<Stream> stream = stream_from(handle);
    if (bytes == 0) {
        return check_current();
    }
    if (CUresult error = check(stream.get(), dst, src, bytes, who)) {
        return error;
    }
    put(*stream, [=](Device& device) {
        char* to = place(device, dst, bytes, When::Running, who, false);
        const char* from = place(device, src, bytes, When::Running, who, false);
        if (to == nullptr || from == nullptr) {
            return CUDA_ERROR_ILLEGAL_ADDRESS;
        }
        std::memmove(to, from, bytes);
        return CUDA_SUCCESS;
    });
    return CUDA_SUCCESS;
}

CUresult fill(CUdeviceptr dst, unsigned char value, size_t bytes, CUstream handle) {
    const char* who = "a fill";
    std::shared_ptr<Stream> stream = stream_from(handle);
    if (bytes == 0) {
        return check_current();
    }
    if (CUresult error = check(stream.get(), dst, 0, bytes, who)) {
        return error;
    }
    put(*stream, [=](Device& device) {
        char* to = place(device, dst, bytes, When::Running, who, false);
        if (to == nullptr) {
            return CUDA_ERROR_ILLEGAL_ADDRESS;
        }
        std::memset(to, value, bytes);
        return CUDA_SUCCESS;
    });
    return CUDA_SUCCESS;
}

} // namespace

CUresult CUDAAPI cuMemHostAlloc(void** address, size_t bytes, unsigned int) {
    if (CUresult error = check_current()) {
        return error;
    }
    *address = std::malloc(bytes);
    if (*address == nullptr) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    std::memset(*address, 0xff, bytes);
    std::lock_guard lock(pinned_mutex);
    pinned[static_cast<const char*>(*address)] = bytes;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemFreeHost(void* address) {
    {
        std::lock_guard lock(pinned_mutex);
        if (pinned.erase(static_cast<const char*>(address)) == 0) {
            return CUDA_ERROR_INVALID_VALUE;
        }
    }
    waits("to free memory of the host");
    // As the driver does, since any stream may still copy from or to it.
    for (const auto& device : devices()) {
        finish_all(device.get());
    }
    std::free(address);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemcpyHtoDAsync(CUdeviceptr dst, const void* src, size_t bytes, CUstream stream) {
    return host_to_device(dst, src, bytes, stream);
}

CUresult CUDAAPI cuMemcpyHtoD(CUdeviceptr dst, const void* src, size_t bytes) {
    CUresult error = host_to_device(dst, src, bytes, nullptr);
    return error ? error : cuStreamSynchronize(nullptr);
}

CUresult CUDAAPI cuMemcpyDtoHAsync(void* dst, CUdeviceptr src, size_t bytes, CUstream stream) {
    return device_to_host(dst, src, bytes, stream, false);
}

CUresult CUDAAPI cuMemcpyDtoH(void* dst, CUdeviceptr src, size_t bytes) {
    return device_to_host(dst, src, bytes, nullptr, true);
}

CUresult CUDAAPI cuMemcpyDtoDAsync(CUdeviceptr dst, CUdeviceptr src, size_t bytes, CUstream stream) {
    return device_to_device(dst, src, bytes, stream);
}

CUresult CUDAAPI cuMemcpyDtoD(CUdeviceptr dst, CUdeviceptr src, size_t bytes) {
    return device_to_device(dst, src, bytes, nullptr);
}

CUresult CUDAAPI cuMemcpyPeerAsync(CUdeviceptr dst, CUcontext dst_context, CUdeviceptr src, CUcontext src_context,
                                   size_t bytes, CUstream stream) {
    if (device_of(dst) != device_from(dst_context) || device_of(src) != device_from(src_context)) {
        report("a copy between GPUs: an address is not in the memory of the context given for it");
        return CUDA_ERROR_INVALID_VALUE;
    }
    return device_to_device(dst, src, bytes, stream);
}

CUresult CUDAAPI cuMemsetD8Async(CUdeviceptr dst, unsigned char value, size_t bytes, CUstream stream) {
    return fill(dst, value, bytes, stream);
}

CUresult CUDAAPI cuMemsetD8(CUdeviceptr dst, unsigned char value, size_t bytes) {
    return fill(dst, value, bytes, nullptr);
}
