// What the driver's functions put on streams.
#pragma once

#include <cuda.h>

#include <functional>

#include "device.h"
#include "stream.h"

namespace emulator {

// Something done on a stream later; what it returns fails the GPU unless it is CUDA_SUCCESS.
using Work = std::function<CUresult(Device&)>;

// Puts work on a stream that runs unless its GPU has failed by then.
uint64_t put(Stream& stream, Work work);

// When an address is looked at: as the program hands it over, or as work on a stream uses it.
enum class When { Asked, Running };

// Where the `bytes` bytes at an address are for the host; null, and says why, unless they lie within one allocation that is
// there. `who` names what is about to use them. A kernel may use its own GPU's memory and its peers'.
char* place(const Device& user, CUdeviceptr address, size_t bytes, When when, const char* who, bool is_kernel);

} // namespace emulator
