#!/usr/bin/env python3
"""Makes static stand-ins for the CUDA libraries that a program built with `--features cuda` would otherwise need to start.

For every function that cudarc declares, the stand-in has one of the same name. Its first call opens the real library and
looks the function up; from then on it is one indirect jump. Without the library the function returns that library's own
error code, so the program starts anywhere and can say what is missing. Linkers take these files because no shared library
of the same name is in the folder; a build against a full toolkit does not need them.

usage: scripts/cuda-stand-ins.py CUDARC_FOLDER DEST        x86-64 Linux; needs gcc and ar
"""
import pathlib
import re
import subprocess
import sys
import tempfile

# cudarc's module, name for the linker, file at run time, error code of a library that is not there
LIBRARIES = [
    ("driver", "cuda", "libcuda.so.1", 303),  # CUDA_ERROR_SHARED_OBJECT_INIT_FAILED
    ("nvrtc", "nvrtc", "libnvrtc.so.13", 11),  # NVRTC_ERROR_INTERNAL_ERROR
    ("curand", "curand", "libcurand.so.10", 203),  # CURAND_STATUS_INITIALIZATION_FAILED
    ("cublas", "cublas", "libcublas.so.13", 1),  # CUBLAS_STATUS_NOT_INITIALIZED
    ("cublaslt", "cublasLt", "libcublasLt.so.13", 1),
    ("nccl", "nccl", "libnccl.so.2", 2),  # ncclSystemError
]

DECLARATION = re.compile(r'extern "C" \{\s*fn (\w+)\([^;]*?\)(?: -> ([^;]+))?;')


def assembly(names):
    """A jump through a table for each function; at first each entry of the table leads to the look-up.

    Arguments may be in any register that the calling convention passes them in, so the look-up preserves all of them.
    """
    registers = ["rax", "rdi", "rsi", "rdx", "rcx", "r8", "r9"]
    lines = [".pushsection .text", "look_up_and_jump:"]
    lines += [f"push %{register}" for register in registers]
    # Calls need a stack aligned to 16 bytes: return address, index and 7 registers are 72, and 136 more are 13 * 16.
    lines += ["sub $136, %rsp"]
    lines += [f"movups %xmm{lane}, {16 * lane}(%rsp)" for lane in range(8)]
    lines += [f"mov {136 + 8 * len(registers)}(%rsp), %rdi", "call look_up", "mov %rax, %r11"]
    lines += [f"movups {16 * lane}(%rsp), %xmm{lane}" for lane in range(8)]
    lines += ["add $136, %rsp"]
    lines += [f"pop %{register}" for register in reversed(registers)]
    lines += ["add $8, %rsp", "jmp *%r11"]
    for index, name in enumerate(names):
        lines += [f".globl {name}", f".type {name}, @function", f"{name}: endbr64", f"jmp *table+{8 * index}(%rip)"]
        lines += [f".size {name}, . - {name}", f"first_{index}: push ${index}", "jmp look_up_and_jump"]
    lines += [".popsection", ".pushsection .data", ".balign 8", "table:"]
    lines += [f".quad first_{index}" for index in range(len(names))] + [".popsection"]
    return "\n".join(lines)


def c_source(names, returns, file, error_code):
    """The look-up, with the assembly in the same file so that nothing but the functions is visible outside."""
    kinds = ",".join("1" if "c_char" in returns[name] else "0" for name in names)
    asm = "\n".join(f'"{line}\\n"' for line in assembly(names).splitlines())
    return f"""#include <dlfcn.h>
static const char *const names[] = {{{",".join(f'"{name}"' for name in names)}}};
static const char returns_text[] = {{{kinds}}};
extern void *table[] __attribute__((visibility("hidden")));
__attribute__((unused)) static long absent(void) {{ return {error_code}; }}
__attribute__((unused)) static const char *absent_text(void) {{ return "{file} could not be loaded"; }}
/* Threads that come here at once open the library and write the entry twice, with the same result. */
__attribute__((used)) static void *look_up(long index) {{
    void *library = dlopen("{file}", RTLD_NOW | RTLD_GLOBAL);
    void *function = library ? dlsym(library, names[index]) : 0;
    if (!function) function = returns_text[index] ? (void *)absent_text : (void *)absent;
    __atomic_store_n(&table[index], function, __ATOMIC_RELEASE);
    return function;
}}
__asm__({asm});
"""


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    cudarc, dest = map(pathlib.Path, sys.argv[1:])
    dest.mkdir(parents=True, exist_ok=True)
    for module, name, file, error_code in LIBRARIES:
        bindings = (cudarc / "src" / module / "sys" / "mod.rs").read_text()
        returns = dict(DECLARATION.findall(bindings))
        if not returns:
            sys.exit(f"{cudarc} declares no functions of {module}: expected a folder of cudarc 0.19")
        with tempfile.TemporaryDirectory() as folder:
            source, stand_in = (pathlib.Path(folder) / f"{name}{suffix}" for suffix in (".c", ".o"))
            source.write_text(c_source(sorted(returns), returns, file, error_code))
            subprocess.run(["gcc", "-O2", "-Wall", "-Werror", "-fPIC", "-c", source, "-o", stand_in], check=True)
            archive = dest / f"lib{name}.a"
            archive.unlink(missing_ok=True)
            subprocess.run(["ar", "rcs", archive, stand_in], check=True)
        print(f"{archive}: {len(returns)} functions")


if __name__ == "__main__":
    main()
