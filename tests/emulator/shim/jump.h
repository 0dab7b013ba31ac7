// A place in a function to go back to, from deeper calls and from other stacks. Cheaper than setjmp.h: only the compiler knows
// which registers are in use, and only it has to save them.
#pragma once

struct Jump {
    void* registers[5];
};

// 0 when called, 1 when something goes back to it.
#define SHIM_MARK(jump) __builtin_setjmp((jump).registers)

[[noreturn]] __attribute__((noinline)) inline void go_back(Jump& jump) {
    __builtin_longjmp(jump.registers, 1);
}
