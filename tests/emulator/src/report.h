// Says on stderr what a program did wrong; the error code that it gets says much less.
#pragma once

namespace emulator {

__attribute__((format(printf, 1, 2))) void report(const char* format, ...);

// Says it when the host waits for a GPU, or may on a real one, if EMULATED_GPU_WAITS is set.
void waits(const char* why);

} // namespace emulator
