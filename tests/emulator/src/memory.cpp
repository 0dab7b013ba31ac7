#include "memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace emulator {

namespace {

constexpr size_t GUARD_BYTES = 4096;
constexpr size_t ALIGN_BYTES = 256;
constexpr unsigned char POISON = 0xff;
constexpr size_t PAGE_BYTES = 4096;
constexpr size_t QUARANTINE_BYTES = 256 << 20;

size_t aligned(size_t bytes) {
    return (bytes + ALIGN_BYTES - 1) / ALIGN_BYTES * ALIGN_BYTES;
}

CUdeviceptr map_range(size_t bytes, int protection) {
    void* start = mmap(nullptr, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED) {
        std::perror("emulated GPU: no address space for its memory");
        std::abort();
    }
    return reinterpret_cast<CUdeviceptr>(start);
}

bool is_poison(const char* from, size_t bytes) {
    return (unsigned char)*from == POISON && std::memcmp(from, from + 1, bytes - 1) == 0;
}

// Large freed memory goes back to the system, so that a small machine can hold several GPUs.
void give_back(char* from, size_t bytes) {
    char* first = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(from) + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES);
    if (bytes > 64 * PAGE_BYTES) {
        madvise(first, (from + bytes - first) / PAGE_BYTES * PAGE_BYTES, MADV_DONTNEED);
    }
}

} // namespace

Memory::Memory(size_t capacity) : capacity_(capacity), range_(8 * capacity + (1 << 20)) {
    start_ = map_range(range_, PROT_NONE);
    offset_ = map_range(range_, PROT_READ | PROT_WRITE) - start_;
    cursor_ = start_;
}

CUdeviceptr Memory::gap_from(CUdeviceptr from, CUdeviceptr to, size_t span) const {
    auto next = allocations_.lower_bound(from);
    if (next != allocations_.begin()) {
        const Allocation& last = std::prev(next)->second;
        from = std::max(from, last.start + aligned(last.bytes) + GUARD_BYTES);
    }
    for (; next != allocations_.end() && next->first < to; ++next) {
        if (next->first - GUARD_BYTES >= from + span) {
            return from;
        }
        from = next->first + aligned(next->second.bytes) + GUARD_BYTES;
    }
    return from + span <= to ? from : 0;
}

CUdeviceptr Memory::reserve(size_t bytes) {
    std::lock_guard lock(mutex_);
    size_t size = aligned(bytes), span = size + 2 * GUARD_BYTES;
    if (size < bytes || size > capacity_ - used_) {
        return 0;
    }
    CUdeviceptr gap = gap_from(cursor_, start_ + range_, span);
    gap = gap != 0 ? gap : gap_from(start_, start_ + range_, span);
    if (gap == 0) {
        return 0;
    }
    // Freed memory stays unused for a while, so that a late use of it is noticed; not for ever, as small pieces are not given back.
    cursor_ = gap + span;
    if (cursor_ - start_ > 2 * used_ + QUARANTINE_BYTES) {
        cursor_ = start_;
    }
    CUdeviceptr start = gap + GUARD_BYTES;
    allocations_[start] = {start, bytes, false, false};
    used_ += size;
    peak_ = std::max(peak_, used_);
    return start;
}

void Memory::begin(CUdeviceptr start) {
    std::lock_guard lock(mutex_);
    Allocation& allocation = allocations_.at(start);
    std::memset(host(start) - GUARD_BYTES, POISON, aligned(allocation.bytes) + 2 * GUARD_BYTES);
    allocation.begun = true;
}

bool Memory::retire(CUdeviceptr start) {
    std::lock_guard lock(mutex_);
    auto found = allocations_.find(start);
    if (found == allocations_.end() || found->second.freed) {
        return false;
    }
    found->second.freed = true;
    return true;
}

bool Memory::end(CUdeviceptr start) {
    std::lock_guard lock(mutex_);
    Allocation allocation = allocations_.at(start);
    bool intact = guards_are_intact(allocation);
    std::memset(host(start), POISON, std::min(allocation.bytes, 64 * PAGE_BYTES));
    give_back(host(start), allocation.bytes);
    used_ -= aligned(allocation.bytes);
    allocations_.erase(start);
    return intact;
}

bool Memory::guards_are_intact(const Allocation& allocation) const {
    size_t slack = aligned(allocation.bytes) - allocation.bytes;
    const char* start = host(allocation.start);
    return is_poison(start - GUARD_BYTES, GUARD_BYTES) && is_poison(start + allocation.bytes, slack + GUARD_BYTES);
}

std::optional<Allocation> Memory::find(CUdeviceptr address) const {
    std::lock_guard lock(mutex_);
    auto next = allocations_.upper_bound(address);
    if (next == allocations_.begin()) {
        return {};
    }
    const Allocation& allocation = std::prev(next)->second;
    if (address > allocation.start + allocation.bytes) {
        return {};
    }
    return allocation;
}

size_t Memory::used() const {
    std::lock_guard lock(mutex_);
    return used_;
}

size_t Memory::peak() const {
    std::lock_guard lock(mutex_);
    return peak_;
}

void Memory::reset_peak() {
    std::lock_guard lock(mutex_);
    peak_ = used_;
}

} // namespace emulator
