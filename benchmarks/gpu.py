"""``python -m benchmarks.gpu``: what bound and pinned memory, CUDA graphs and a second instance gain on a GPU.

The backends run batches of 32 pictures without a server. The model multiplies and clips, so that nearly all of its time
is the way of 19 MB to the device and back; the graphs are measured on a chain of 60 small operators, where launching
takes the time. Cases take turns, and the figures are medians of rounds. Without a GPU it says so and measures nothing;
``--cpu`` runs it there all the same, to see that it works.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from benchmarks import machine
from benchmarks.report import machine_lines, table, write_json
from weft.backends.onnxruntime import OnnxRuntimeBackend
from weft.backends.pytorch import PyTorchBackend
from weft.base.core import CallContext, InferCall
from weft.base.signature import ModelSignature, TensorSpec
from weft.base.tensors import encode
from weft.serving.backends.base import Backend, Batch, InstanceContext, ModelContext
from weft.serving.config.placement import count_gpus
from weft.serving.request.request import InferenceRequest, InferenceResponse

ROOT = Path(__file__).resolve().parents[1]
_PICTURE, _NUM_ROWS, _NUM_REQUESTS, _CHAIN = (3, 224, 224), 32, 8, 60
_NO_PINNING = {"input_pinned_memory": {}, "output_pinned_memory": {}}


class _UnboundBackend(OnnxRuntimeBackend):
    """Without any binding: ``InferenceSession.run`` on numpy arrays."""

    def _bind(self, *_arguments: Any) -> None:
        pass


@dataclass(frozen=True, slots=True)
class _Case:
    name: str
    backend: type[Backend]
    file: str
    optimization: Mapping[str, Any]
    num_instances: int = 1
    dims: tuple[int, ...] = _PICTURE


_SMALL = (64,)
CASES = (
    _Case("onnxruntime, session.run", _UnboundBackend, "pictures.onnx", {}),
    _Case("onnxruntime, bound, not pinned", OnnxRuntimeBackend, "pictures.onnx", _NO_PINNING),
    _Case("onnxruntime, bound and pinned", OnnxRuntimeBackend, "pictures.onnx", {}),
    _Case("onnxruntime, bound and pinned, 2 instances", OnnxRuntimeBackend, "pictures.onnx", {}, 2),
    _Case("pytorch, not pinned", PyTorchBackend, "pictures.pt2", _NO_PINNING),
    _Case("pytorch, pinned", PyTorchBackend, "pictures.pt2", {}),
    _Case("pytorch, pinned, 2 instances", PyTorchBackend, "pictures.pt2", {}, 2),
    _Case("onnxruntime, 60 operators", OnnxRuntimeBackend, "chain.onnx", {}, dims=_SMALL),
    _Case(
        "onnxruntime, 60 operators, graph", OnnxRuntimeBackend, "chain.onnx", {"cuda": {"graphs": True}}, dims=_SMALL
    ),
)


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one case.

    Attributes:
        case: What was run.
        rows_per_s: Median over the rounds; all instances together.
        spread_percent: Half the distance of the quartiles, as a share of the median.
    """

    case: str
    rows_per_s: float
    spread_percent: float


def write_models(folder: Path) -> None:
    """The pictures for both libraries, and the chain."""
    import torch  # noqa: PLC0415  # takes seconds

    def save(name: str, nodes: Sequence[Any], dims: Sequence[int]) -> None:
        ends = [helper.make_tensor_value_info(end, TensorProto.FLOAT, ["rows", *dims]) for end in ("X", "Y")]
        two = helper.make_tensor("TWO", TensorProto.FLOAT, [1], [2.0])
        graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], [two])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
        onnx.save(model, folder / name)

    save(
        "pictures.onnx",
        [helper.make_node("Mul", ["X", "TWO"], ["H"]), helper.make_node("Relu", ["H"], ["Y"])],
        _PICTURE,
    )
    names = ["X", *(f"H{number}" for number in range(1, _CHAIN)), "Y"]
    kinds = ("Sin", "Cos")
    save("chain.onnx", [helper.make_node(kinds[i % 2], [names[i]], [names[i + 1]]) for i in range(_CHAIN)], _SMALL)

    class Pictures(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.relu(x * 2)

    shapes = ({0: torch.export.Dim("rows")},)
    program = torch.export.export(Pictures(), (torch.ones(2, *_PICTURE),), dynamic_shapes=shapes)
    torch.export.save(program, folder / "pictures.pt2")


def measure(folder: Path, kind: str, *, num_rounds: int, num_batches: int) -> list[Figures]:
    """Every case, in turns.

    Args:
        folder: With the models.
        kind: ``"GPU"`` or ``"CPU"``.
        num_rounds: How often each case is measured, after one that does not count.
        num_batches: Of each instance in a round.
    """
    runs = {case.name: _loaded(case, folder, kind) for case in CASES}
    rates: dict[str, list[float]] = {name: [] for name in runs}
    for round_ in range(num_rounds + 1):
        for case in CASES:
            start_s = time.perf_counter()
            for done in [start(num_batches) for start in runs[case.name]]:
                done.result()
            if round_:
                rows = num_batches * case.num_instances * _NUM_ROWS
                rates[case.name].append(rows / (time.perf_counter() - start_s))
    return [_figures(name, values) for name, values in rates.items()]


def _figures(name: str, rates: Sequence[float]) -> Figures:
    median = statistics.median(rates)
    quartiles = statistics.quantiles(rates, n=4) if len(rates) > 1 else [median] * 3
    return Figures(name, round(median, 1), round(50 * (quartiles[2] - quartiles[0]) / median, 1))


def _loaded(case: _Case, folder: Path, kind: str) -> list[Callable[[int], "Future[None]"]]:
    """One function for each instance, which runs so many batches on the thread that the instance was loaded on."""
    specs = [(TensorSpec(name, "FP32", case.dims),) for name in ("X", "Y")]
    signature = ModelSignature("model", "1", "", _NUM_ROWS, *specs)
    model = ModelContext(
        signature, folder, {"default_model_filename": case.file, "optimization": case.optimization}, {}
    )
    part = np.random.default_rng(0).normal(size=(_NUM_ROWS // _NUM_REQUESTS, *case.dims)).astype(np.float32)
    call = InferCall("model", inputs={"X": encode(part)})

    def run(backend: Backend, num_batches: int) -> None:
        for _ in range(num_batches):
            requests = [InferenceRequest(call, CallContext(), num_rows=len(part)) for _ in range(_NUM_REQUESTS)]
            for outcome in backend.execute(Batch(requests)):
                if not isinstance(outcome, InferenceResponse):
                    raise RuntimeError(f"{case.name}: {outcome}")

    backends = [case.backend(model, InstanceContext(f"model_0_{i}", kind)) for i in range(case.num_instances)]
    threads = [ThreadPoolExecutor(max_workers=1) for _ in backends]
    for thread, backend in zip(threads, backends, strict=True):
        thread.submit(backend.load).result()
    return [partial(thread.submit, run, backend) for thread, backend in zip(threads, backends, strict=True)]


def main(argv: Sequence[str] | None = None) -> int:
    """0 when everything was measured, or there is no GPU."""
    parser = argparse.ArgumentParser(prog="benchmarks.gpu", description="Copies to and from a GPU.")
    parser.add_argument("--cpu", action="store_true", help="run the cases on the CPU, to see that they work")
    parser.add_argument("--rounds", type=int, default=15, metavar="N", help="default: 15")
    parser.add_argument("--batches", type=int, default=20, metavar="N", help="of each instance in a round; default: 20")
    options = parser.parse_args(argv)
    if not options.cpu and not count_gpus():
        print("no GPU here: nothing was measured")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        write_models(Path(folder))
        kind = "CPU" if options.cpu else "GPU"
        rows = measure(Path(folder), kind, num_rounds=options.rounds, num_batches=options.batches)
    described = machine.describe()
    print("\n".join(machine_lines(described)), "", sep="\n")
    lines = [["case", "rows/s", "spread %"], *([r.case, f"{r.rows_per_s:.0f}", f"{r.spread_percent}"] for r in rows)]
    print(table(lines, left_columns=(0,)))
    if not options.cpu:
        print(f"\nwrote {write_json(ROOT / 'benchmarks' / 'results', rows, described, prefix='gpu-')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
