"""Runs a command as on a CPU with AVX2 and nothing newer: ``python -m tests.as_avx2 COMMAND ...``.

torch, oneDNN, MKL, numba and CTranslate2 obey. ONNX Runtime does not: it asks the CPU itself. After ``--if-needed`` the
command is not run, for which a reason is printed, where this CPU is such a one already or has no AVX2.
"""

import os
import sys

_FEATURES = (
    "64bit avx avx2 bmi bmi2 cmov cx16 cx8 f16c fma fsgsbase fxsr lzcnt mmx movbe popcnt rdrnd sahf sse sse2 sse3 "
    "sse4.1 sse4.2 ssse3 xsave xsaveopt"
)
VARIABLES = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "DNNL_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "CT2_FORCE_CPU_ISA": "AVX2",
    "NUMBA_CPU_NAME": "haswell",
    "NUMBA_CPU_FEATURES": ",".join(f"+{name}" for name in _FEATURES.split()),
}


def why_not() -> str:
    """Why this CPU need not, or cannot, be held to AVX2; "" if it can."""
    import torch  # seconds, and a command does without

    if not torch.cpu._is_avx2_supported():
        return "this CPU has no AVX2"
    return "" if torch.cpu._is_avx512_supported() else "this CPU has no AVX-512, so that the other tests have shown it"


if __name__ == "__main__":
    command = sys.argv[1:]
    if command[0] == "--if-needed":
        command = command[1:]
        if reason := why_not():
            print(f"nothing to do: {reason}")
            sys.exit()
    os.execvpe(command[0], command, os.environ | VARIABLES)
