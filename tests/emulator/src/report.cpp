#include "report.h"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>

namespace emulator {

void report(const char* format, ...) {
    char text[1024];
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    std::fprintf(stderr, "emulated GPU: %s\n", text);
}

void waits(const char* why) {
    static const bool is_asked_for = std::getenv("EMULATED_GPU_WAITS") != nullptr;
    if (is_asked_for) {
        report("the host waits: %s", why);
    }
}

} // namespace emulator
