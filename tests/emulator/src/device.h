// One emulated GPU, which is its primary context too: a program here has no other contexts.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "memory.h"

namespace emulator {

class Stream;

struct Device {
    explicit Device(int ordinal);

    CUcontext context() { return reinterpret_cast<CUcontext>(this); }
    // The first failure of work on a GPU ends all further work on it, as on a real one.
    void fail(CUresult error);

    const int ordinal;
    Memory memory;
    std::atomic<int> num_retained{0};
    std::atomic<CUresult> error{CUDA_SUCCESS};
    // Which GPUs' memory kernels on this one may use, by ordinal.
    std::atomic<unsigned> peers;
    std::atomic<uint64_t> release_threshold{0};
};

// All of them; EMULATED_GPUS says how many, EMULATED_GPU_BYTES how much memory each has.
const std::vector<std::unique_ptr<Device>>& devices();
// The GPU whose memory the address may be in, or null.
Device* device_of(CUdeviceptr address);
// The GPU whose context is current on this thread, or null.
Device* current_device();
void set_current_device(Device* device);
// A GPU whose context this is, or null.
Device* device_from(CUcontext context);

// What a driver function returns before it does anything: no context, or a GPU that failed.
CUresult check_current();

} // namespace emulator
