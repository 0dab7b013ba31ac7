// The driver, GPUs and their contexts.
#include <cstdio>
#include <cstring>

#include "chance.h"
#include "device.h"
#include "report.h"
#include "stream.h"

using namespace emulator;

namespace {

Device* device_at(CUdevice ordinal) {
    return ordinal >= 0 && (size_t)ordinal < devices().size() ? devices()[(size_t)ordinal].get() : nullptr;
}

bool initialised = false;

// Those of an H200, as far as anything here asks for them.
int attribute_of(CUdevice_attribute attribute) {
    switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X:
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y:
        return 1024;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z:
        return 64;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X:
        return 0x7fffffff;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y:
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z:
        return 65535;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK:
        return 48 << 10;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
        return 227 << 10;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE:
        return 32;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
        return 132;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR:
        return 2048;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
        return 9;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
        return 0;
    case CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
    case CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS:
        return 1;
    default:
        return 0;
    }
}

} // namespace

CUresult CUDAAPI cuInit(unsigned int flags) {
    if (flags != 0) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    initialised = true;
    return devices().empty() ? CUDA_ERROR_NO_DEVICE : CUDA_SUCCESS;
}

CUresult CUDAAPI cuDriverGetVersion(int* version) {
    *version = CUDA_VERSION;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGetCount(int* count) {
    *count = (int)devices().size();
    return initialised ? CUDA_SUCCESS : CUDA_ERROR_NOT_INITIALIZED;
}

CUresult CUDAAPI cuDeviceGet(CUdevice* device, int ordinal) {
    *device = ordinal;
    return !initialised ? CUDA_ERROR_NOT_INITIALIZED : device_at(ordinal) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

CUresult CUDAAPI cuDeviceGetName(char* name, int size, CUdevice device) {
    if (device_at(device) == nullptr || size <= 0) {
        return CUDA_ERROR_INVALID_DEVICE;
    }
    std::snprintf(name, (size_t)size, "Emulated GPU");
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGetUuid(CUuuid* uuid, CUdevice device) {
    std::memset(uuid, 0, sizeof *uuid);
    uuid->bytes[15] = (char)device;
    return device_at(device) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

CUresult CUDAAPI cuDeviceTotalMem(size_t* bytes, CUdevice device) {
    if (device_at(device) == nullptr) {
        return CUDA_ERROR_INVALID_DEVICE;
    }
    *bytes = device_at(device)->memory.capacity();
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
    *value = attribute_of(attribute);
    return device_at(device) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

CUresult CUDAAPI cuDeviceCanAccessPeer(int* can_access, CUdevice device, CUdevice peer) {
    *can_access = device != peer;
    return device_at(device) && device_at(peer) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

CUresult CUDAAPI cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice ordinal) {
    Device* device = device_at(ordinal);
    if (device == nullptr) {
        return CUDA_ERROR_INVALID_DEVICE;
    }
    ++device->num_retained;
    *context = device->context();
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDevicePrimaryCtxRelease(CUdevice ordinal) {
    Device* device = device_at(ordinal);
    if (device == nullptr || device->num_retained == 0) {
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    finish_all(device);
    --device->num_retained;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxSetCurrent(CUcontext context) {
    Device* device = device_from(context);
    if (context != nullptr && device == nullptr) {
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    set_current_device(device);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxGetCurrent(CUcontext* context) {
    *context = current_device() != nullptr ? current_device()->context() : nullptr;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxGetDevice(CUdevice* device) {
    if (CUresult error = check_current()) {
        return error;
    }
    *device = current_device()->ordinal;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxSetFlags(unsigned int) {
    return check_current();
}

CUresult CUDAAPI cuCtxGetStreamPriorityRange(int* least, int* greatest) {
    *least = 0;
    *greatest = -5;
    return check_current();
}

CUresult CUDAAPI cuCtxEnablePeerAccess(CUcontext context, unsigned int flags) {
    if (CUresult error = check_current()) {
        return error;
    }
    Device* peer = device_from(context);
    if (peer == nullptr || peer == current_device() || flags != 0) {
        return CUDA_ERROR_INVALID_DEVICE;
    }
    unsigned bit = 1u << peer->ordinal;
    return current_device()->peers.fetch_or(bit) & bit ? CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED : CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxSynchronize() {
    if (CUresult error = check_current()) {
        return error;
    }
    waits("for a GPU");
    finish_all(current_device());
    return current_device()->error;
}

CUresult CUDAAPI cuProfilerStart() {
    return check_current();
}

CUresult CUDAAPI cuProfilerStop() {
    return check_current();
}
