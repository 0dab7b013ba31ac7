// Names of the driver's error codes.
#include <cuda.h>

namespace {

struct Text {
    const char* name;
    const char* sentence;
};

Text text_of(CUresult error) {
    switch (error) {
    case CUDA_SUCCESS:
        return {"CUDA_SUCCESS", "no error"};
    case CUDA_ERROR_INVALID_VALUE:
        return {"CUDA_ERROR_INVALID_VALUE", "invalid argument"};
    case CUDA_ERROR_OUT_OF_MEMORY:
        return {"CUDA_ERROR_OUT_OF_MEMORY", "out of memory"};
    case CUDA_ERROR_NOT_INITIALIZED:
        return {"CUDA_ERROR_NOT_INITIALIZED", "initialization error"};
    case CUDA_ERROR_NO_DEVICE:
        return {"CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"};
    case CUDA_ERROR_INVALID_DEVICE:
        return {"CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"};
    case CUDA_ERROR_INVALID_CONTEXT:
        return {"CUDA_ERROR_INVALID_CONTEXT", "invalid device context"};
    case CUDA_ERROR_CONTEXT_IS_DESTROYED:
        return {"CUDA_ERROR_CONTEXT_IS_DESTROYED", "context is destroyed"};
    case CUDA_ERROR_INVALID_HANDLE:
        return {"CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"};
    case CUDA_ERROR_NOT_FOUND:
        return {"CUDA_ERROR_NOT_FOUND", "named symbol not found"};
    case CUDA_ERROR_NOT_READY:
        return {"CUDA_ERROR_NOT_READY", "device not ready"};
    case CUDA_ERROR_ILLEGAL_ADDRESS:
        return {"CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"};
    case CUDA_ERROR_LAUNCH_FAILED:
        return {"CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"};
    case CUDA_ERROR_NOT_SUPPORTED:
        return {"CUDA_ERROR_NOT_SUPPORTED", "operation not supported"};
    case CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED:
        return {"CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED", "peer access is already enabled"};
    default:
        return {nullptr, nullptr};
    }
}

} // namespace

CUresult CUDAAPI cuGetErrorName(CUresult error, const char** text) {
    *text = text_of(error).name;
    return *text != nullptr ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult CUDAAPI cuGetErrorString(CUresult error, const char** text) {
    *text = text_of(error).sentence;
    return *text != nullptr ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
