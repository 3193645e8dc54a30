"""``torch-bf16`` and ``torch-compile``: the same torch program, run in another way by the backend ``pytorch``."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from weft.optimize.methods.method import Built, Inputs, SourceModel
from weft.optimize.methods.onnx_model import has_gpu_instances
from weft.optimize.methods.torch_int8 import why_not_torch

_CPU_INFO = Path("/proc/cpuinfo")
_COMPILERS = ("c++", "g++", "clang++")


class TorchBf16:
    """``AUTOCAST``: operators that benefit compute in bfloat16; inputs and outputs keep their types."""

    name = "torch-bf16"

    def unsuitable(self, source: SourceModel) -> str:
        """Empty for a program of ``torch.export`` on a GPU, or on a CPU with instructions for bfloat16."""
        if why := why_not_torch(source):
            return why
        if has_gpu_instances(source) or _has_bf16():
            return ""
        return "this CPU has no instructions for bfloat16"

    def build(self, source: SourceModel, calibration: Sequence[Inputs], folder: Path) -> Built:
        """Copy the program."""
        shutil.copyfile(source.file, folder / source.file.name)
        return Built({"AUTOCAST": "bf16"}, "the same program; linear layers and convolutions compute in bfloat16")


class TorchCompile:
    """``TORCH_COMPILE``: one program for each number of rows that is a power of two, compiled when it first comes."""

    name = "torch-compile"

    def unsuitable(self, source: SourceModel) -> str:
        """Empty for a program of ``torch.export`` where there is a compiler for C++."""
        if why := why_not_torch(source):
            return why
        if not any(map(shutil.which, _COMPILERS)):
            return f"torch.compile needs a compiler for C++ where the model is served: one of {', '.join(_COMPILERS)}"
        return ""

    def build(self, source: SourceModel, calibration: Sequence[Inputs], folder: Path) -> Built:
        """Copy the program."""
        shutil.copyfile(source.file, folder / source.file.name)
        return Built(
            {"TORCH_COMPILE": "inductor"}, "the same program, compiled as its shapes come; let warm-up send them"
        )


def _has_bf16() -> bool:
    try:
        flags = _CPU_INFO.read_text()
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags
