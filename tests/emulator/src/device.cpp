#include "device.h"

#include <cstdlib>

#include "report.h"

namespace emulator {

namespace {

thread_local Device* current = nullptr;

size_t number_from(const char* variable, size_t otherwise) {
    const char* text = std::getenv(variable);
    return text != nullptr && *text != 0 ? std::strtoull(text, nullptr, 10) : otherwise;
}

std::vector<std::unique_ptr<Device>> make_devices() {
    std::vector<std::unique_ptr<Device>> all;
    for (size_t i = 0; i < number_from("EMULATED_GPUS", 1); ++i) {
        all.push_back(std::make_unique<Device>((int)i));
    }
    return all;
}

} // namespace

Device::Device(int ordinal)
    : ordinal(ordinal), memory(number_from("EMULATED_GPU_BYTES", (size_t)2 << 30)), peers(1u << ordinal) {}

void Device::fail(CUresult reason) {
    CUresult none = CUDA_SUCCESS;
    error.compare_exchange_strong(none, reason);
}

const std::vector<std::unique_ptr<Device>>& devices() {
    // Never destroyed: threads may still use it while the program ends.
    static const auto* all = new std::vector<std::unique_ptr<Device>>(make_devices());
    return *all;
}

Device* device_of(CUdeviceptr address) {
    for (const auto& device : devices()) {
        if (device->memory.is_in_range(address)) {
            return device.get();
        }
    }
    return nullptr;
}

Device* current_device() {
    return current;
}

void set_current_device(Device* device) {
    current = device;
}

Device* device_from(CUcontext context) {
    for (const auto& device : devices()) {
        if (device->context() == context) {
            return device.get();
        }
    }
    return nullptr;
}

CUresult check_current() {
    if (current == nullptr) {
        report("a function was called on a thread without a current context");
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    if (current->num_retained == 0) {
        report("a function was called on a thread whose current context has been released");
        return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    }
    return current->error;
}

} // namespace emulator
