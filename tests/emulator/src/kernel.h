// Kernels by name, with their arguments' types.
#pragma once

#include <cuda.h>

#include <cstring>
#include <memory>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace emulator {

// Whether it is an address of a GPU's memory.
bool is_address(CUdeviceptr word);

// A kernel with the arguments of one launch.
class Call {
  public:
    struct Pointer {
        int argument;
        CUdeviceptr* address;
    };

    virtual ~Call() = default;
    // The arguments that are pointers; whoever runs the call first replaces them by addresses of the host.
    virtual std::vector<Pointer> pointers() = 0;
    // One thread of the kernel.
    virtual void run() = 0;
};

template <typename... A>
class CallOf : public Call {
  public:
    CallOf(void (*kernel)(A...), void** parameters) : kernel_(kernel) { copy(parameters, std::index_sequence_for<A...>{}); }

    std::vector<Pointer> pointers() override {
        std::vector<Pointer> found;
        collect(found, std::index_sequence_for<A...>{});
        return found;
    }

    void run() override { std::apply(kernel_, arguments_); }

  private:
    template <size_t... I>
    void copy(void** parameters, std::index_sequence<I...>) {
        (std::memcpy(static_cast<void*>(&std::get<I>(arguments_)), parameters[I], sizeof std::get<I>(arguments_)), ...);
    }

    template <size_t... I>
    void collect(std::vector<Pointer>& found, std::index_sequence<I...>) {
        (collect_one<A>(found, (int)I, &std::get<I>(arguments_)), ...);
    }

    template <typename T>
    static void collect_one(std::vector<Pointer>& found, int argument, void* value) {
        if constexpr (std::is_pointer_v<T>) {
            found.push_back({argument, static_cast<CUdeviceptr*>(value)});
        } else if constexpr (std::is_class_v<T> && sizeof(T) % sizeof(CUdeviceptr) == 0) {
            // A struct's pointers are the words that are addresses of a GPU: no length is as large.
            CUdeviceptr* words = static_cast<CUdeviceptr*>(value);
            for (size_t i = 0; i < sizeof(T) / sizeof(CUdeviceptr); ++i) {
                if (is_address(words[i])) {
                    found.push_back({argument, words + i});
                }
            }
        }
    }

    void (*kernel_)(A...);
    std::tuple<std::remove_const_t<A>...> arguments_;
};

using BindKernel = std::unique_ptr<Call> (*)(void** parameters);

template <typename... A>
std::unique_ptr<Call> bind(void (*kernel)(A...), void** parameters) {
    return std::make_unique<CallOf<A...>>(kernel, parameters);
}

template <auto KERNEL>
std::unique_ptr<Call> bind_kernel(void** parameters) {
    return bind(KERNEL, parameters);
}

// Makes a kernel known; kernels.py writes one for each.
struct KernelEntry {
    // The set is "own" or "candle".
    KernelEntry(const char* set, const char* name, BindKernel bind);
};

// Null if the set has no such kernel.
BindKernel kernel_named(const std::string& set, const std::string& name);

} // namespace emulator
