#include "work.h"

#include "report.h"

namespace emulator {

uint64_t put(Stream& stream, Work work) {
    Device* device = stream.device;
    return stream.enqueue([device, work = std::move(work)] {
        if (device->error == CUDA_SUCCESS) {
            if (CUresult error = work(*device)) {
                device->fail(error);
            }
        }
    });
}

char* place(const Device& user, CUdeviceptr address, size_t bytes, When when, const char* who, bool is_kernel) {
    const Device* owner = device_of(address);
    auto says = [&](const char* what) -> char* {
        report("%s: the %zu bytes at %#llx %s", who, bytes, address, what);
        return nullptr;
    };
    if (owner == nullptr) {
        return says("are not in a GPU's memory");
    }
    if (is_kernel && !(user.peers >> owner->ordinal & 1)) {
        return says("are on another GPU that this one has no access to");
    }
    auto allocation = owner->memory.find(address);
    if (!allocation) {
        return says("were freed, or never allocated");
    }
    if (bytes > allocation->start + allocation->bytes - address) {
        return says("go beyond the end of their allocation");
    }
    if (when == When::Asked && allocation->freed) {
        return says("were freed");
    }
    if (when == When::Running && !allocation->begun) {
        return says("are not there yet: another stream allocates them, and nothing waited for it");
    }
    return owner->memory.host(address);
}

} // namespace emulator
