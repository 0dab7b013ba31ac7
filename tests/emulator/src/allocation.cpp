// Allocations and memory pools: a GPU has one pool, which is its memory.
#include "report.h"
#include "work.h"

using namespace emulator;

namespace {

CUresult allocate(CUdeviceptr* address, size_t bytes, Device& device) {
    if (bytes == 0) {
        report("an allocation of 0 bytes");
        return CUDA_ERROR_INVALID_VALUE;
    }
    *address = device.memory.reserve(bytes);
    if (*address == 0) {
        // Memory may only wait for streams to get to where it is freed.
        finish_all(&device);
        *address = device.memory.reserve(bytes);
    }
    return *address != 0 ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult release(Device& device, CUdeviceptr address) {
    if (!device.memory.end(address)) {
        report("something was written beside the allocation at %#llx, seen when it was freed", address);
        return CUDA_ERROR_ILLEGAL_ADDRESS;
    }
    return CUDA_SUCCESS;
}

// The GPU that the allocation is on, with nobody else able to free it; null if it is none.
Device* owner_to_free(CUdeviceptr address) {
    Device* owner = device_of(address);
    if (owner == nullptr || !owner->memory.retire(address)) {
        report("%#llx was freed and is no allocation, or was freed before", address);
        return nullptr;
    }
    return owner;
}

CUmemoryPool pool_of(Device& device) {
    return reinterpret_cast<CUmemoryPool>(&device);
}

Device* device_of_pool(CUmemoryPool pool) {
    return device_from(reinterpret_cast<CUcontext>(pool));
}

CUresult get_pool(CUmemoryPool* pool, CUdevice ordinal) {
    if (ordinal < 0 || (size_t)ordinal >= devices().size()) {
        return CUDA_ERROR_INVALID_DEVICE;
    }
    *pool = pool_of(*devices()[(size_t)ordinal]);
    return CUDA_SUCCESS;
}

} // namespace

CUresult CUDAAPI cuMemAlloc(CUdeviceptr* address, size_t bytes) {
    if (CUresult error = check_current()) {
        return error;
    }
    if (CUresult error = allocate(address, bytes, *current_device())) {
        return error;
    }
    current_device()->memory.begin(*address);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemAllocAsync(CUdeviceptr* address, size_t bytes, CUstream handle) {
    if (CUresult error = check_current()) {
        return error;
    }
    std::shared_ptr<Stream> stream = stream_from(handle);
    if (!stream) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    if (CUresult error = allocate(address, bytes, *stream->device)) {
        return error;
    }
    put(*stream, [start = *address](Device& device) {
        device.memory.begin(start);
        return CUDA_SUCCESS;
    });
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemFree(CUdeviceptr address) {
    if (CUresult error = check_current()) {
        return error;
    }
    if (address == 0) {
        return CUDA_SUCCESS;
    }
    Device* owner = owner_to_free(address);
    if (owner == nullptr) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    waits("to free memory at once");
    finish_all(owner);
    CUresult error = release(*owner, address);
    if (error) {
        owner->fail(error);
    }
    return error;
}

CUresult CUDAAPI cuMemFreeAsync(CUdeviceptr address, CUstream handle) {
    if (CUresult error = check_current()) {
        return error;
    }
    std::shared_ptr<Stream> stream = stream_from(handle);
    if (!stream) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    if (address == 0) {
        return CUDA_SUCCESS;
    }
    Device* owner = owner_to_free(address);
    if (owner == nullptr) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    put(*stream, [=](Device&) { return release(*owner, address); });
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemGetInfo(size_t* free, size_t* total) {
    if (CUresult error = check_current()) {
        return error;
    }
    const Memory& memory = current_device()->memory;
    *total = memory.capacity();
    *free = memory.capacity() - memory.used();
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGetDefaultMemPool(CUmemoryPool* pool, CUdevice device) {
    return get_pool(pool, device);
}

CUresult CUDAAPI cuDeviceGetMemPool(CUmemoryPool* pool, CUdevice device) {
    return get_pool(pool, device);
}

CUresult CUDAAPI cuMemPoolTrimTo(CUmemoryPool pool, size_t) {
    return device_of_pool(pool) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult CUDAAPI cuMemPoolGetAttribute(CUmemoryPool pool, CUmemPool_attribute attribute, void* value) {
    Device* device = device_of_pool(pool);
    if (device == nullptr) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    switch (attribute) {
    case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD:
        *static_cast<cuuint64_t*>(value) = device->release_threshold;
        return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT:
    case CU_MEMPOOL_ATTR_USED_MEM_CURRENT:
        *static_cast<cuuint64_t*>(value) = device->memory.used();
        return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:
    case CU_MEMPOOL_ATTR_USED_MEM_HIGH:
        *static_cast<cuuint64_t*>(value) = device->memory.peak();
        return CUDA_SUCCESS;
    default:
        return CUDA_ERROR_NOT_SUPPORTED;
    }
}

CUresult CUDAAPI cuMemPoolSetAttribute(CUmemoryPool pool, CUmemPool_attribute attribute, void* value) {
    Device* device = device_of_pool(pool);
    if (device == nullptr) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    switch (attribute) {
    case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD:
        device->release_threshold = *static_cast<cuuint64_t*>(value);
        return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:
    case CU_MEMPOOL_ATTR_USED_MEM_HIGH:
        if (*static_cast<cuuint64_t*>(value) != 0) {
            return CUDA_ERROR_INVALID_VALUE;
        }
        device->memory.reset_peak();
        return CUDA_SUCCESS;
    default:
        return CUDA_SUCCESS;
    }
}
