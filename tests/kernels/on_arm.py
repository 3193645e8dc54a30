"""Runs pytest with every CPU kernel compiled for 64-bit ARM: ``python -m tests.kernels.on_arm CPU ARGUMENTS ...``.

numba compiles as there, for one of ``CPUS``. A call from Python goes to an emulator of such a CPU: the kernel's object
file, linked to a small program that takes arguments and memory by a pipe and gives the memory back.
"""

import ctypes
import os
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

#: Names of processors and their features for LLVM, and which the emulator has.
CPUS = {
    "cortex-a72": ("+neon,+fp-armv8", "cortex-a72"),
    "neoverse-n1": ("+neon,+fp-armv8,+fullfp16", "max"),
    "neoverse-v1": ("+neon,+fp-armv8,+fullfp16", "max"),
}
COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
_TRIPLE = "aarch64-unknown-linux-gnu"
_MOST_WORDS, _MOST_DOUBLES, _LINE_BYTES = 96, 4, 64
_NUM_FRAMES = 6
_PROCESSES: dict[str, Any] = {}

_PROGRAM = """
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

typedef struct { size_t references; void *destroy, *info, *data; size_t size; void *allocator; } Memory;

Memory *NRT_MemInfo_alloc_aligned(size_t size, unsigned alignment) {
    Memory *memory = calloc(1, sizeof(Memory));
    memory->references = 1, memory->size = size;
    memory->data = aligned_alloc(alignment, (size / alignment + 1) * alignment);
    return memory;
}

void NRT_MemInfo_call_dtor(Memory *memory) { free(memory->data); free(memory); }

int kernel() __asm__("%(symbol)s");

int main(void) {
    int64_t counts[3];
    while (fread(counts, 8, 3, stdin) == 3) {
        int64_t words[%(num_words)d][2] = {0}, a[%(num_words)d];
        double d[%(num_doubles)d] = {0};
        char *memory = aligned_alloc(%(line)d, counts[2] + %(line)d);
        if (fread(words, 16, counts[0], stdin) != counts[0] || fread(d, 8, counts[1], stdin) != counts[1]) return 2;
        if (fread(memory, 1, counts[2], stdin) != counts[2]) return 2;
        for (int i = 0; i < %(num_words)d; i++) a[i] = words[i][1] + (words[i][0] ? (int64_t)memory : 0);
        void *result = 0, *error = 0;
        int64_t status = kernel(&result, &error, %(words)s, %(doubles)s);
        fwrite(&status, 8, 1, stdout);
        fwrite(memory, 1, counts[2], stdout);
        fflush(stdout);
        free(memory);
    }
    return 0;
}
"""


def _run_instead(dispatcher: Any, *arguments: Any) -> None:
    """What ``dispatcher(*arguments)`` does here: run the kernel in the emulator on the memory of the arguments.

    Integers that lie in the memory of a tensor of the callers are addresses.
    """
    import numpy as np
    from numba import typeof

    kinds = tuple(map(typeof, arguments))
    dispatcher.compile(kinds)
    result = dispatcher.overloads[kinds]
    arrays = [each for each in arguments if isinstance(each, np.ndarray)]
    regions = _merged([*_tensors(sys._getframe(1)), *map(np.lib.array_utils.byte_bounds, arrays)])
    starts, memory = {}, bytearray()
    for start, end in regions:
        memory += bytes((start - len(memory)) % _LINE_BYTES)
        starts[start] = len(memory)
        memory += ctypes.string_at(start, end - start)

    def word(value: int, *, is_address: bool = True) -> tuple[int, int]:
        for start, end in regions if is_address else ():
            if start <= value < end:
                return 1, starts[start] + value - start
        return 0, value

    words: list[tuple[int, int]] = []
    for each in arguments:
        if isinstance(each, np.ndarray):
            words += [(0, 0), (0, 0), (0, each.size), (0, each.itemsize), word(each.ctypes.data)]
            words += [(0, value) for value in (*each.shape, *each.strides)]
        elif not isinstance(each, float):
            words.append(word(int(each)))
    doubles = [each for each in arguments if isinstance(each, float)]
    name = result.fndesc.llvm_func_name
    if name not in _PROCESSES:
        _PROCESSES[name] = _start(result.library, name)
    process = _PROCESSES[name]
    process.stdin.write(struct.pack("<3q", len(words), len(doubles), len(memory)))
    values = [one for two in words for one in two]
    process.stdin.write(struct.pack(f"<{len(values)}q{len(doubles)}d", *values, *doubles))
    process.stdin.write(memory)
    process.stdin.flush()
    answer = process.stdout.read(8 + len(memory))
    assert len(answer) == 8 + len(memory), "the emulator ended"
    assert struct.unpack("<q", answer[:8])[0] & 0xFFFFFFFF == 0, "the kernel raised an exception"
    for start, end in regions:
        at = 8 + starts[start]
        ctypes.memmove(start, answer[at : at + end - start], end - start)


def _tensors(frame: Any) -> Iterator[tuple[int, int]]:
    """First address and the one after the last of each tensor that the nearest callers hold."""
    import torch

    for _ in range(_NUM_FRAMES):
        for value in list(frame.f_locals.values()):
            for each in value if isinstance(value, tuple) else (value,):
                if isinstance(each, torch.Tensor) and each.numel():
                    start = each.untyped_storage().data_ptr()
                    yield start, start + each.untyped_storage().nbytes()
        frame = frame.f_back
        if frame is None:
            return


def _merged(regions: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, end in sorted(regions):
        if merged and start < merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        elif start < end:
            merged.append((start, end))
    return merged


def _start(library: Any, symbol: str) -> Any:
    """An emulator with a compiled kernel; it ends with this process, as its pipe does."""
    folder = Path(tempfile.mkdtemp(dir=os.environ["NUMBA_CACHE_DIR"]))
    words, doubles = (", ".join(f"{n}[{i}]" for i in range(m)) for n, m in (("a", _MOST_WORDS), ("d", _MOST_DOUBLES)))
    values = {"symbol": symbol, "words": words, "doubles": doubles, "line": _LINE_BYTES}
    text = _PROGRAM % (values | {"num_words": _MOST_WORDS, "num_doubles": _MOST_DOUBLES})
    (folder / "main.c").write_text(text)
    (folder / "kernel.o").write_bytes(library.codegen._tm.emit_object(library._final_module))
    names = [str(folder / name) for name in ("main.c", "kernel.o", "main")]
    #: What the kernel calls for exceptions alone is missing.
    link = [COMPILER, "-w", "-O1", "-static", "-Wl,--unresolved-symbols=ignore-all", *names[:2], "-o", names[2]]
    subprocess.run([*link, "-lm"], check=True, timeout=60)
    command = [EMULATOR, "-cpu", os.environ["ON_ARM_EMULATED"], names[2]]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def install(cpu: str) -> None:
    """Make numba, not yet imported, compile for the CPU, and calls of kernels run in the emulator."""
    features, emulated = CPUS[cpu]
    variables = {"NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": features, "ON_ARM_EMULATED": emulated}
    os.environ.update({"NUMBA_CACHE_DIR": tempfile.mkdtemp(), **variables})
    from llvmlite import binding

    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    binding.get_process_triple = lambda: _TRIPLE
    from numba.core.registry import CPUDispatcher

    CPUDispatcher.__call__ = _run_instead


if __name__ == "__main__":
    install(sys.argv[1])
    import pytest

    sys.exit(pytest.main(sys.argv[2:]))
