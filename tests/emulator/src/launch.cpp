// Modules, functions and launches.
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <set>
#include <string>

#include <unistd.h>

#include "chance.h"
#include "handles.h"
#include "kernel.h"
#include "report.h"
#include "work.h"

extern "C" const char* shim_launch_grid(const unsigned int grid[3], const unsigned int block[3], size_t shared_bytes,
                                        uint64_t seed, void (*kernel)(void*), void* arguments);

namespace emulator {

namespace {

constexpr int DEFAULT_SHARED_BYTES = 48 << 10;
constexpr int MAX_SHARED_BYTES = 227 << 10;

// Code that a program loaded. It is not run; its kernels are here already, compiled from the same source.
struct Module {
    Device* device;
    // candle's modules are PTX, ours are not.
    bool is_ptx;
    // The names of its kernels, if it is PTX.
    std::set<std::string> entries;

    const char* set() const { return is_ptx ? "candle" : "own"; }
    bool holds(const std::string& kernel) const { return !is_ptx || entries.count(kernel) > 0; }
};

std::set<std::string> entries_of(const std::string& ptx) {
    const std::string word = ".entry ";
    std::set<std::string> entries;
    for (size_t at = ptx.find(word); at != std::string::npos; at = ptx.find(word, at)) {
        at += word.size();
        entries.insert(ptx.substr(at, ptx.find('(', at) - at));
    }
    return entries;
}

struct Function {
    std::string name;
    Device* device;
    BindKernel bind;
    std::atomic<int> max_shared_bytes{DEFAULT_SHARED_BYTES};
};

struct Shape {
    unsigned int grid[3];
    unsigned int block[3];
    unsigned int shared_bytes;
};

thread_local const char* running_kernel = nullptr;
struct sigaction bad_address_before, trap_before;

// A kernel that leaves the emulated memory, or does what the compiler has put a trap before, ends the program; says which it was.
void on_fault(int signal) {
    if (running_kernel != nullptr) {
        char text[256];
        const char* fault = signal == SIGSEGV ? "used an address that is no memory" : "used a misaligned address, or a number overflowed";
        int length = std::snprintf(text, sizeof text, "emulated GPU: %s %s\n", running_kernel, fault);
        if (write(2, text, (size_t)length) < 0) {
            _exit(1);
        }
    }
    sigaction(signal, signal == SIGSEGV ? &bad_address_before : &trap_before, nullptr);
}

void watch_faults() {
    static const bool watching = [] {
        struct sigaction action {};
        action.sa_handler = on_fault;
        action.sa_flags = SA_ONSTACK;
        return sigaction(SIGSEGV, &action, &bad_address_before) == 0 && sigaction(SIGILL, &action, &trap_before) == 0;
    }();
    (void)watching;
}

bool is_possible(const std::string& name, const Shape& shape, int max_shared_bytes) {
    const auto [gx, gy, gz] = shape.grid;
    const auto [bx, by, bz] = shape.block;
    const char* problem = nullptr;
    if (gx == 0 || gy == 0 || gz == 0 || bx == 0 || by == 0 || bz == 0) {
        problem = "a dimension is 0";
    } else if (gx > 0x7fffffff || gy > 65535 || gz > 65535) {
        problem = "the grid is larger than 2147483647 x 65535 x 65535 blocks";
    } else if (bx > 1024 || by > 1024 || bz > 64 || (uint64_t)bx * by * bz > 1024) {
        problem = "the block is larger than 1024 threads";
    } else if ((int64_t)shape.shared_bytes > max_shared_bytes) {
        problem = "more shared memory than the function's attribute allows";
    }
    if (problem != nullptr) {
        report("%s<<<(%u, %u, %u), (%u, %u, %u), %u>>>: %s", name.c_str(), gx, gy, gz, bx, by, bz, shape.shared_bytes, problem);
    }
    return problem == nullptr;
}

// Looks at all pointers; replaces them by addresses of the host if the kernel is about to run.
bool place_pointers(const std::string& name, const Device& device, const std::vector<Call::Pointer>& pointers, When when) {
    for (const Call::Pointer& pointer : pointers) {
        if (*pointer.address == 0) {
            continue;
        }
        std::string who = name + ", argument " + std::to_string(pointer.argument);
        char* host = place(device, *pointer.address, 0, when, who.c_str(), true);
        if (host == nullptr) {
            return false;
        }
        if (when == When::Running) {
            *pointer.address = reinterpret_cast<CUdeviceptr>(host);
        }
    }
    return true;
}

// Whether nothing was written beside the allocations of the arguments.
bool guards_are_intact(const std::string& name, const std::vector<CUdeviceptr>& addresses) {
    for (CUdeviceptr address : addresses) {
        const Device* owner = device_of(address);
        auto allocation = owner != nullptr ? owner->memory.find(address) : std::nullopt;
        if (allocation && !owner->memory.guards_are_intact(*allocation)) {
            report("%s wrote beside the allocation of %zu bytes at %#llx", name.c_str(), allocation->bytes, allocation->start);
            return false;
        }
    }
    return true;
}

CUresult run(const std::string& name, Device& device, Call& call, const Shape& shape) {
    std::vector<Call::Pointer> pointers = call.pointers();
    std::vector<CUdeviceptr> addresses;
    for (const Call::Pointer& pointer : pointers) {
        addresses.push_back(*pointer.address);
    }
    if (!place_pointers(name, device, pointers, When::Running)) {
        return CUDA_ERROR_ILLEGAL_ADDRESS;
    }
    watch_faults();
    running_kernel = name.c_str();
    auto run_thread = [](void* call) { static_cast<Call*>(call)->run(); };
    const char* problem = shim_launch_grid(shape.grid, shape.block, shape.shared_bytes, draw(), run_thread, &call);
    running_kernel = nullptr;
    if (problem != nullptr) {
        report("%s: %s", name.c_str(), problem);
        return CUDA_ERROR_LAUNCH_FAILED;
    }
    return guards_are_intact(name, addresses) ? CUDA_SUCCESS : CUDA_ERROR_ILLEGAL_ADDRESS;
}

} // namespace

} // namespace emulator

using namespace emulator;

CUresult CUDAAPI cuModuleLoadData(CUmodule* module, const void* image) {
    if (CUresult error = check_current()) {
        return error;
    }
    if (image == nullptr) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    const char* text = static_cast<const char*>(image);
    bool is_ptx = text[0] == '/' || text[0] == '.' || text[0] == '\n';
    // An object file, or several in a fatbin.
    bool is_code = std::memcmp(image, "\x7f""ELF", 4) == 0 || std::memcmp(image, "\x50\xed\x55\xba", 4) == 0;
    if (!is_ptx && !is_code) {
        report("a module is neither PTX nor compiled code");
        return CUDA_ERROR_INVALID_IMAGE;
    }
    auto loaded = std::make_shared<Module>();
    loaded->device = current_device();
    loaded->is_ptx = is_ptx;
    if (is_ptx) {
        loaded->entries = entries_of(text);
    }
    *module = static_cast<CUmodule>(handles<Module>().add(loaded));
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuModuleUnload(CUmodule module) {
    return handles<Module>().remove(module) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult CUDAAPI cuModuleGetFunction(CUfunction* function, CUmodule handle, const char* name) {
    if (CUresult error = check_current()) {
        return error;
    }
    std::shared_ptr<Module> module = handles<Module>().get(handle);
    if (!module) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    BindKernel bind = kernel_named(module->set(), name);
    if (bind == nullptr || !module->holds(name)) {
        report("there is no kernel %s in that module, or none that is emulated", name);
        return CUDA_ERROR_NOT_FOUND;
    }
    auto found = std::make_shared<Function>();
    found->name = name;
    found->device = module->device;
    found->bind = bind;
    *function = static_cast<CUfunction>(handles<Function>().add(found));
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuFuncSetAttribute(CUfunction handle, CUfunction_attribute attribute, int value) {
    std::shared_ptr<Function> function = handles<Function>().get(handle);
    if (!function) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    if (attribute == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) {
        if (value < 0 || value > MAX_SHARED_BYTES) {
            report("%s: a block cannot have %d bytes of shared memory, only %d", function->name.c_str(), value, MAX_SHARED_BYTES);
            return CUDA_ERROR_INVALID_VALUE;
        }
        function->max_shared_bytes = value;
    }
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction handle) {
    std::shared_ptr<Function> function = handles<Function>().get(handle);
    if (!function) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    switch (attribute) {
    case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
        *value = function->max_shared_bytes;
        return CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
        *value = 1024;
        return CUDA_SUCCESS;
    default:
        *value = 0;
        return CUDA_SUCCESS;
    }
}

CUresult CUDAAPI cuLaunchKernel(CUfunction handle, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z,
                                unsigned int block_x, unsigned int block_y, unsigned int block_z, unsigned int shared_bytes,
                                CUstream stream_handle, void** parameters, void** extra) {
    if (CUresult error = check_current()) {
        return error;
    }
    std::shared_ptr<Function> function = handles<Function>().get(handle);
    std::shared_ptr<Stream> stream = stream_from(stream_handle);
    if (!function || !stream || extra != nullptr) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    if (function->device != stream->device) {
        report("%s was loaded on GPU %d and launched on a stream of GPU %d", function->name.c_str(), function->device->ordinal,
               stream->device->ordinal);
        return CUDA_ERROR_INVALID_HANDLE;
    }
    Shape shape{{grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, shared_bytes};
    if (!is_possible(function->name, shape, function->max_shared_bytes)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    std::shared_ptr<Call> call = function->bind(parameters);
    if (!place_pointers(function->name, *stream->device, call->pointers(), When::Asked)) {
        stream->device->fail(CUDA_ERROR_ILLEGAL_ADDRESS);
        return CUDA_ERROR_ILLEGAL_ADDRESS;
    }
    put(*stream, [function, call, shape](Device& device) { return run(function->name, device, *call, shape); });
    return CUDA_SUCCESS;
}
