// Runs a kernel on the CPU, its blocks one after another. Shared memory starts as NaN in each block.
#include "block.h"

#include <algorithm>

namespace {

constexpr size_t SHARED_FLOATS = 227 * 256; // what a block may have on sm_90
constexpr size_t GUARD_BYTES = 4096;        // behind the shared memory of a block
constexpr unsigned char POISON = 0xff;      // four of them are a NaN, and so are two

} // namespace

extern __thread __align__(16) float shared[];
__thread __align__(16) float shared[SHARED_FLOATS + GUARD_BYTES / sizeof(float)];

void shim_barrier(const char* file, int line) {
    shim_block->wait_at_barrier(file, line);
}

uint64_t shim_exchange(unsigned int mask, uint64_t value, unsigned int source_lane, const char* file, int line) {
    // A mask of some lanes would need a count of its own; no kernel has one.
    return shim_block->exchange(value, source_lane, file, mask == 0xffffffffu ? line : -line);
}

unsigned int shim_lane() {
    return shim_block->lane();
}

// Calls kernel(arguments) in every thread of a grid; null, or what went wrong.
extern "C" const char* shim_launch_grid(const unsigned int grid[3], const unsigned int block[3], size_t shared_bytes,
                                        uint64_t seed, void (*kernel)(void*), void* arguments) {
    uint64_t block_size = (uint64_t)block[0] * block[1] * block[2];
    if (block_size == 0 || block_size > 1024) {
        return "the block does not have 1 to 1024 threads";
    }
    if (shared_bytes > SHARED_FLOATS * sizeof *shared) {
        return "more shared memory than there is";
    }
    Block& running = shim_block_of_thread();
    if (const char* problem = running.prepare({block[0], block[1], block[2]}, seed, kernel, arguments)) {
        return problem;
    }
    gridDim = {grid[0], grid[1], grid[2]};
    unsigned char* behind = reinterpret_cast<unsigned char*>(shared) + shared_bytes;
    std::memset(behind, POISON, GUARD_BYTES);
    for (uint64_t i = 0; i < (uint64_t)grid[0] * grid[1] * grid[2]; ++i) {
        blockIdx = {(unsigned int)(i % grid[0]), (unsigned int)(i / grid[0] % grid[1]),
                    (unsigned int)(i / grid[0] / grid[1])};
        std::memset(shared, POISON, shared_bytes);
        if (const char* problem = running.run()) {
            return problem;
        }
    }
    bool intact = std::all_of(behind, behind + GUARD_BYTES, [](unsigned char byte) { return byte == POISON; });
    return intact ? nullptr : "a block wrote beyond its shared memory";
}
