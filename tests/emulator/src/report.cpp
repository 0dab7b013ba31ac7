#include "report.h"

#include <cstdarg>
#include <cstdio>

namespace emulator {

void report(const char* format, ...) {
    char text[1024];
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    std::fprintf(stderr, "emulated GPU: %s\n", text);
}

} // namespace emulator
