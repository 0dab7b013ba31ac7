// Random choices, from EMULATED_GPU_SEED (default 1). With 0 all work runs at once, in the order of the calls.
#pragma once

#include <cstdint>

namespace emulator {

bool everything_at_once();
uint64_t draw();
// True once in `n` times.
inline bool once_in(unsigned n) { return draw() % n == 0; }

} // namespace emulator
