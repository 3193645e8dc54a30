"""Runs samples in a real router, whose models are in this process."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
from tests.compat.graphs.fake_models import SampleTarget
from tests.compat.graphs.shape import Request, Shape

from weft.base.core import CallContext, InferCall, InferResult, RequestedOutput
from weft.base.errors import WeftError
from weft.base.tensors import decode, encode
from weft.base.text.pbtxt import Diagnostic
from weft.language import GraphSource
from weft.router.compile import check_graph
from weft.router.core import RouterCore
from weft.tools.convert.graphs import convert
from weft.tools.convert.signatures import Signatures
from weft.tools.convert.yaml_tree import Source


class SampleGraphs:
    """The files of a sample by graph name, converted where another system wrote them; a lookup for the compiler.

    Attributes:
        texts: Graph files by name.
        faults: What the converter found.
    """

    def __init__(self, shape: Shape, target: SampleTarget) -> None:
        self.texts: dict[str, str] = {}
        self.faults: list[Diagnostic] = []
        for path in shape.paths:
            if path.suffix == ".pbtxt":
                self.texts[path.stem] = path.read_text()
                continue
            source = Source(path.read_text(), path.name)
            self.texts |= convert(source, source.documents(), Signatures(target), path.stem)
            self.faults += source.diagnostics

    def find(self, name: str, version: str) -> GraphSource | None:
        """As a lookup of the compiler."""
        return GraphSource(self.texts[name], f"{name}.pbtxt", name) if name in self.texts else None

    def names(self) -> list[str]:
        """As a lookup of the compiler."""
        return list(self.texts)

    def faults_of(self, name: str, target: SampleTarget) -> list[Diagnostic]:
        """What the converter and the compiler say of a graph."""
        found = self.find(name, "")
        return self.faults + (check_graph(found, target, self) if found else [])

    def write(self, root: Path) -> None:
        """As folders of a repository."""
        for name, text in self.texts.items():
            folder = root / name / "1"
            folder.mkdir(parents=True)
            is_ensemble = "ensemble_scheduling" in text
            (root / name / "config.pbtxt" if is_ensemble else folder / "graph.pbtxt").write_text(text)


@asynccontextmanager
async def started(shape: Shape, root: Path) -> AsyncIterator[tuple[RouterCore, SampleTarget]]:
    """A router that serves a sample, and its models; it is closed when the block ends."""
    target = SampleTarget(shape)
    SampleGraphs(shape, target).write(root)
    core = RouterCore(root, [target], poll_s=3_600.0)
    await core.start()
    try:
        yield core, target
    finally:
        await core.close(grace_s=0)


async def answer(core: RouterCore, name: str, request: Request) -> Any:
    """Outputs by name; a list of them of a decoupled graph; the message of an error."""
    inputs = {tensor: encode(np.ascontiguousarray(array)) for tensor, array in request.inputs.items()}
    outputs = tuple(RequestedOutput(output, {}) for output in request.outputs)
    call = InferCall(name, "", "r", request.parameters, inputs, outputs)
    context = CallContext(headers=dict(request.headers))
    try:
        if isinstance(request.expected, list):
            results = [result async for result in core.stream_infer(call, context)]
            return [_arrays(result) for result in results if not result.is_null]
        return _arrays(await core.infer(call, context))
    except WeftError as error:
        return f"{error.code}: {error.message}"


def _arrays(result: InferResult) -> Any:
    if result.error is not None:
        return f"{result.error.code}: {result.error.message}"
    return {name: decode(tensor) for name, tensor in result.outputs.items()}


def difference(got: Any, expected: Any, *, is_any_order: bool = False) -> str:
    """What is wrong with an answer; "" where it is the expected one."""
    if isinstance(expected, tuple):
        wrong = [difference(got, one) for one in expected]
        return "" if "" in wrong else f"none of {len(expected)} answers: {'; '.join(wrong)}"
    if isinstance(expected, list):
        if not isinstance(got, list) or len(got) != len(expected):
            return f"expected {len(expected)} responses, got {got}"
        if is_any_order:
            got, expected = sorted(got, key=str), sorted(expected, key=str)
        return "; ".join(filter(None, (difference(*pair) for pair in zip(got, expected, strict=True))))
    if not isinstance(got, Mapping) or list(got) != list(expected):
        return f"expected {list(expected)}, got {got if isinstance(got, str | list) else list(got)}"
    return "; ".join(filter(None, (_of_tensor(name, got[name], np.asarray(expected[name])) for name in got)))


def _of_tensor(name: str, got: np.ndarray, expected: np.ndarray) -> str:
    kind = "O" if expected.dtype.kind in "OS" else expected.dtype
    if got.dtype != kind or got.shape != expected.shape:
        return f"{name}: expected {kind} {expected.shape}, got {got.dtype} {got.shape}"
    is_equal = np.array_equal(got, expected) if got.dtype == object else np.allclose(got, expected, rtol=1e-5)
    return "" if is_equal else f"{name}: expected {expected.tolist()}, got {got.tolist()}"
