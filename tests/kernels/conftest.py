"""Where the kernels run, and how close to their references they must come.

Without a GPU the kernels run in Triton's interpreter; ``pytest -m gpu tests/kernels`` compiles them for a CUDA device.
"""

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

torch.set_num_threads(1)


@dataclass(frozen=True)
class Place:
    """Where a kernel runs and in what dtype.

    Attributes:
        device: "cpu" is Triton's interpreter, "cuda" a compiled kernel.
        dtype: Of the inputs.
        bound: Largest absolute difference from the reference in float32, for outputs of about unit size.
    """

    device: str
    dtype: torch.dtype
    bound: float

    def randn(self, *shape: int, seed: int = 0) -> torch.Tensor:
        """Standard normal values, the same on every device."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(*shape, generator=generator).to(self.device, self.dtype)

    def assert_close(self, expected: torch.Tensor, actual: torch.Tensor) -> None:
        """``actual`` has the shape of ``expected``, no NaN, and is nowhere further from it than the bound."""
        assert expected.shape == actual.shape
        worst = (expected.double().cpu() - actual.double().cpu()).abs().max().item() if expected.numel() else 0.0
        assert worst <= self.bound, f"differs by {worst:.3g}, allowed {self.bound:.3g}"


# The interpreter rounds float32 to bfloat16 towards zero and multiplies bfloat16 wrongly, so that dtype needs a GPU.
_PLACES = {
    "interpreter-float32": Place("cpu", torch.float32, 1e-4),
    "interpreter-float16": Place("cpu", torch.float16, 4e-3),
    "gpu-float32": Place("cuda", torch.float32, 1e-4),
    "gpu-float16": Place("cuda", torch.float16, 4e-3),
    "gpu-bfloat16": Place("cuda", torch.bfloat16, 1.5e-2),
}


@pytest.fixture(
    params=[
        pytest.param(place, id=name, marks=[pytest.mark.gpu] if place.device == "cuda" else [])
        for name, place in _PLACES.items()
    ]
)
def place(request: pytest.FixtureRequest) -> Place:
    """Each device and dtype that the kernels are for."""
    return request.param


@pytest.fixture(
    params=[
        pytest.param(_PLACES["interpreter-float32"], id="interpreter"),
        pytest.param(_PLACES["gpu-float32"], id="gpu", marks=pytest.mark.gpu),
    ]
)
def place_float32(request: pytest.FixtureRequest) -> Place:
    """Each device, in float32, for facts that do not hang on the dtype."""
    return request.param


@pytest.fixture
def planted(tmp_path: Path) -> Callable[[ModuleType, str, str], ModuleType]:
    """``planted(module, right, wrong)`` is a kernel's module with one defect: ``wrong`` instead of ``right``."""

    def plant(module: ModuleType, right: str, wrong: str) -> ModuleType:
        assert module.__file__ is not None
        source = Path(module.__file__).read_text()
        assert 1 == source.count(right)
        path = tmp_path / f"planted_{hash(wrong):x}.py"
        path.write_text(source.replace(right, wrong))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        defective = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(defective)
        return defective

    return plant


def pytest_configure(config: pytest.Config) -> None:
    """The interpreter is on before any kernel is defined, unless compiled kernels were asked for."""
    if _is_gpu_run(config):
        os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # Triton 3.9 warns where this is left to it
    else:
        _use_interpreter()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Compiled kernels are skipped in a run that interprets them, and on a machine without a CUDA device."""
    if _is_gpu_run(config) and torch.cuda.is_available():
        return
    reason = "needs a CUDA device" if _is_gpu_run(config) else "interpreted run; `pytest -m gpu` compiles the kernels"
    for item in items:
        if item.path.is_relative_to(os.path.dirname(__file__)) and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=reason))


def _is_gpu_run(config: pytest.Config) -> bool:
    return config.getoption("markexpr") == "gpu"


def _use_interpreter() -> None:
    """Kernels defined from now on are interpreted.

    Triton reads the variable when a function is decorated, its own library functions included, so one that another
    test of this process has loaded without it is dropped and loaded again. Its native part stays: it loads once.
    """
    os.environ["TRITON_INTERPRET"] = "1"
    loaded: Any = sys.modules.get("triton")
    if loaded is None or type(loaded.language.cdiv).__name__ == "InterpretedFunction":
        return
    for name in list(sys.modules):
        if name.partition(".")[0] in {"triton", "weft_kernels"} and not name.startswith("triton._C"):
            del sys.modules[name]


@pytest.fixture
def rows_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dot products of the interpreter add in one order for every row.

    It uses OpenBLAS, whose kernels for some processors (Haswell, Zen) treat the rows of a tile differently.
    """
    interpreter = importlib.import_module("triton.runtime.interpreter")

    def create_dot(builder: object, a: Any, b: Any, d: Any, *precision: object) -> Any:
        a_data, b_data = (handle.data.astype(d.data.dtype) for handle in (a, b))
        return interpreter.TensorHandle(np.einsum("...ij,...jk->...ik", a_data, b_data) + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
