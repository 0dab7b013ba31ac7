#include "kernel.h"

#include "device.h"

#include <map>
#include <string>
#include <utility>

namespace emulator {

namespace {

using Table = std::map<std::pair<std::string, std::string>, BindKernel>;

Table& table() {
    static auto* kernels = new Table;
    return *kernels;
}

} // namespace

KernelEntry::KernelEntry(const char* set, const char* name, BindKernel bind) {
    table()[{set, name}] = bind;
}

bool is_address(CUdeviceptr word) {
    return device_of(word) != nullptr;
}

BindKernel kernel_named(const std::string& set, const std::string& name) {
    auto found = table().find({set, name});
    return found == table().end() ? nullptr : found->second;
}

} // namespace emulator
