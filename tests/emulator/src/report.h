// Says on stderr what a program did wrong; the error code that it gets says much less.
#pragma once

namespace emulator {

__attribute__((format(printf, 1, 2))) void report(const char* format, ...);

} // namespace emulator
