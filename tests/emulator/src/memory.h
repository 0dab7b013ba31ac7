// The memory of one GPU.
//
// Addresses that the program gets are in a range that the host can neither read nor write; what a kernel uses is a second
// range of the same size, `offset` further. Each allocation lies between two guard zones. Memory that was not written yet,
// guard zones and freed memory hold bytes 0xff, which are NaN as f32, f64 and bf16.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <map>
#include <mutex>
#include <optional>

namespace emulator {

struct Allocation {
    CUdeviceptr start;
    size_t bytes;
    // Whether the stream it was asked for on has got there.
    bool begun;
    // Whether the program has freed it; the memory is there until the stream of that call gets there.
    bool freed;
};

class Memory {
  public:
    explicit Memory(size_t capacity);

    // Reserves an address. 0 if there is not enough memory left.
    CUdeviceptr reserve(size_t bytes);
    // The stream is where the memory was asked for: from now on it may be used.
    void begin(CUdeviceptr start);
    // Nobody may free it again. False if `start` is no allocation, or was freed before.
    bool retire(CUdeviceptr start);
    // The stream is where the memory was freed. False if something was written around it.
    bool end(CUdeviceptr start);

    // The allocation that holds the address, in whatever state; one past the end belongs to it too.
    std::optional<Allocation> find(CUdeviceptr address) const;
    bool guards_are_intact(const Allocation& allocation) const;
    bool is_in_range(CUdeviceptr address) const { return address - start_ < range_; }
    char* host(CUdeviceptr address) const { return reinterpret_cast<char*>(address + offset_); }

    size_t capacity() const { return capacity_; }
    size_t used() const;
    size_t peak() const;
    void reset_peak();

  private:
    CUdeviceptr gap_from(CUdeviceptr from, CUdeviceptr to, size_t span) const;

    const size_t capacity_;
    const size_t range_;
    CUdeviceptr start_ = 0;
    size_t offset_ = 0;
    mutable std::mutex mutex_;
    std::map<CUdeviceptr, Allocation> allocations_;
    // Where the search for a gap goes on: an address is not used again soon.
    CUdeviceptr cursor_ = 0;
    size_t used_ = 0;
    size_t peak_ = 0;
};

} // namespace emulator
