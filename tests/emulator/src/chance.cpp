#include "chance.h"

#include <atomic>
#include <cstdlib>

namespace emulator {

namespace {

uint64_t seed() {
    static const uint64_t value = [] {
        const char* text = std::getenv("EMULATED_GPU_SEED");
        return text != nullptr && *text != 0 ? std::strtoull(text, nullptr, 10) : 1ull;
    }();
    return value;
}

} // namespace

bool everything_at_once() {
    return seed() == 0;
}

// splitmix64 (Steele, Lea and Flood 2014): any thread may draw the next number.
uint64_t draw() {
    static std::atomic<uint64_t> state{seed() * 0x9e3779b97f4a7c15ull};
    uint64_t z = state.fetch_add(0x9e3779b97f4a7c15ull) + 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

} // namespace emulator
