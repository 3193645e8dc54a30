"""Runs samples in a real router over models that compute something simple and check what they get."""

import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
from tests.compat.graphs.formulas import Given
from tests.compat.graphs.samples import Model, Request, Sample, split

from weft.base.core import CallContext, IndexEntry, InferCall, InferenceCore, InferResult, RequestedOutput
from weft.base.errors import InternalError, UnsupportedError, WeftError
from weft.base.signature import ModelSignature
from weft.base.statistics import ModelStatistics
from weft.base.tensors import decode, encode
from weft.base.text.pbtxt import Diagnostic
from weft.base.validation import validate
from weft.language import GraphPlan, GraphSource
from weft.router.compile import check_graph
from weft.router.core import RouterCore
from weft.router.repository.config import config_of_signature
from weft.router.target import Target
from weft.tools.convert.graphs import convert
from weft.tools.convert.signatures import Signatures
from weft.tools.convert.yaml_tree import Source
from weft.tools.explain.question import read_question
from weft.tools.explain.render import ExplainedStep, StepOutcome, render_json, render_text
from weft.tools.explain.tree import explain
from weft_protos.model_config_pb2 import ModelConfig


class SampleCore(InferenceCore):
    """Answers as the models of a sample do, and is a catalog for the compiler.

    Attributes:
        called: Names of the models in the order of their calls.
    """

    def __init__(self, sample: Sample) -> None:
        self._models = {(model.name, version): model for model in sample.models for version in model.versions}
        self.called: list[str] = []

    def is_ready(self) -> bool:
        return True

    def is_model_ready(self, name: str, version: str) -> bool:
        return True

    def index(self, *, ready_only: bool) -> list[IndexEntry]:
        return [IndexEntry(*key, "READY", "") for key in self._models]

    def signature(self, name: str, version: str) -> ModelSignature:
        found = self.find(name, version)
        assert found, f"no model '{name}' of version '{version}'"
        return found[1]

    def config(self, name: str, version: str) -> ModelConfig:
        return config_of_signature(self.signature(name, version))

    def statistics(self, name: str, version: str) -> list[ModelStatistics]:
        return []

    async def infer(self, call: InferCall, context: CallContext) -> InferResult:
        model, signature, inputs = self._begun(call)
        return _result(signature, call, model.answer(inputs))

    async def stream_infer(self, call: InferCall, context: CallContext) -> AsyncGenerator[InferResult, None]:
        model, signature, inputs = self._begun(call)
        assert model.is_decoupled, f"'{model.name}' does not stream"
        for outputs in model.answer(inputs):
            result = _result(signature, call, outputs)
            result.is_final = False
            yield result
        yield InferResult(model.name, signature.version, call.request_id, is_null=True)

    def find(self, model_name: str, version: str) -> tuple[str, ModelSignature] | None:
        """As a catalog of the compiler."""
        versions = [known for name, known in self._models if name == model_name]
        version = version or max(versions, key=int, default="")
        return ("model", self._models[model_name, version].signature(version)) if version in versions else None

    def names(self) -> list[str]:
        """As a catalog of the compiler."""
        return [name for name, _ in self._models]

    def _begun(self, call: InferCall) -> tuple[Model, ModelSignature, Given]:
        self.called.append(call.model_name)
        signature = self.signature(call.model_name, call.model_version)
        model = self._models[call.model_name, signature.version]
        validate(call, signature)
        if model.fails:
            raise InternalError(model.fails)
        inputs = {name: decode(tensor) for name, tensor in call.inputs.items()}
        return model, signature, Given(inputs, call.parameters)


def _result(signature: ModelSignature, call: InferCall, outputs: Mapping[str, Any]) -> InferResult:
    """A response of the requested outputs that has what the model declares."""
    if inspect.isgenerator(outputs):
        raise UnsupportedError(f"'{signature.name}' is decoupled")
    wanted = [output.name for output in call.outputs] or [spec.name for spec in signature.outputs]
    result = InferResult(signature.name, signature.version, call.request_id)
    for spec in signature.outputs:
        if spec.name in wanted and spec.name in outputs:
            tensor = encode(np.ascontiguousarray(outputs[spec.name]))
            dims = tensor.shape[1:] if signature.max_batch_size else tensor.shape
            assert tensor.datatype == spec.datatype, f"'{spec.name}' of '{signature.name}': {tensor.datatype}"
            fits = len(dims) == len(spec.dims) and all(a in (b, -1) for b, a in zip(dims, spec.dims, strict=True))
            assert fits, f"'{spec.name}' of '{signature.name}': {dims} for {spec.dims}"
            result.outputs[spec.name] = tensor
    return result


class SampleGraphs:
    """The files of a sample by graph name, converted where another system wrote them; a lookup for the compiler.

    Attributes:
        texts: Graph files by name.
        faults: What the converter found.
    """

    def __init__(self, sample: Sample, catalog: SampleCore) -> None:
        self.texts: dict[str, str] = {}
        self.faults: list[Diagnostic] = []
        for path in sample.paths:
            _, text = split(path)
            if path.suffix == ".pbtxt":
                self.texts[path.stem] = text
                continue
            source = Source(text, path.name)
            self.texts |= convert(source, source.documents(), Signatures(catalog), path.stem)
            self.faults += source.diagnostics

    def find(self, name: str, version: str) -> GraphSource | None:
        """As a lookup of the compiler."""
        return GraphSource(self.texts[name], f"{name}.pbtxt", name) if name in self.texts else None

    def names(self) -> list[str]:
        """As a lookup of the compiler."""
        return list(self.texts)

    def faults_of(self, name: str, catalog: SampleCore) -> list[Diagnostic]:
        """What the converter and the compiler say of a graph."""
        found = self.find(name, "")
        return self.faults + (check_graph(found, catalog, self) if found else [])

    def write(self, root: Path) -> None:
        """As folders of a repository."""
        for name, text in self.texts.items():
            folder = root / name / "1"
            folder.mkdir(parents=True)
            is_ensemble = "ensemble_scheduling" in text
            (root / name / "config.pbtxt" if is_ensemble else folder / "graph.pbtxt").write_text(text)


@asynccontextmanager
async def started(graphs: SampleGraphs, target: Target, root: Path) -> AsyncIterator[RouterCore]:
    """A router that serves a sample over its models; it is closed when the block ends."""
    graphs.write(root)
    core = RouterCore(root, [target], poll_s=3_600.0)
    await core.start()
    try:
        yield core
    finally:
        await core.close(grace_s=0)


async def answer(core: RouterCore, name: str, request: Request) -> Any:
    """Outputs by name, in a list; the message of an error."""
    inputs = {tensor: encode(np.ascontiguousarray(array)) for tensor, array in request.inputs.items()}
    outputs = tuple(RequestedOutput(output, {}) for output in request.outputs)
    call = InferCall(name, "", "r", request.parameters, inputs, outputs)
    try:
        if request.is_stream:
            results = [result async for result in core.stream_infer(call, CallContext())]
            return [_arrays(result) for result in results if not result.is_null]
        return [_arrays(await core.infer(call, CallContext()))]
    except WeftError as error:
        return f"{error.code}: {error.message}"


def _arrays(result: InferResult) -> Any:
    if result.error is not None:
        return f"{result.error.code}: {result.error.message}"
    return {name: decode(tensor) for name, tensor in result.outputs.items()}


def fault_of(got: Any, request: Request) -> str:
    """What is wrong with an answer; "" where it is the expected one."""
    if request.error or isinstance(got, str):
        return (
            "" if request.error and request.error in got else f"{request.error or 'an answer'} is expected, got {got}"
        )
    if request.is_stream:
        if len(got) != len(request.expected):
            return f"{len(request.expected)} responses are expected, got {got}"
        return "; ".join(filter(None, map(_difference, got, request.expected)))
    wrong = [_difference(got[0], one) for one in request.expected]
    return "" if "" in wrong else "; ".join(wrong)


def _difference(got: Any, expected: Mapping[str, np.ndarray]) -> str:
    if not isinstance(got, Mapping) or list(got) != list(expected):
        return f"expected {list(expected)}, got {got if isinstance(got, str) else list(got)}"
    return "; ".join(filter(None, (_of_tensor(name, got[name], expected[name]) for name in got)))


def _of_tensor(name: str, got: np.ndarray, expected: np.ndarray) -> str:
    if got.dtype != expected.dtype or got.shape != expected.shape:
        return f"{name}: expected {expected.dtype} {expected.shape}, got {got.dtype} {got.shape}"
    is_equal = np.array_equal(got, expected) if got.dtype == object else np.allclose(got, expected, rtol=1e-5)
    return "" if is_equal else f"{name}: expected {expected.tolist()}, got {got.tolist()}"


def explained_calls(plan: GraphPlan, request: Request) -> tuple[set[str], set[str]]:
    """Models that ``weft explain`` says may be called and those that are unless the request fails, by its shapes."""
    question = read_question(
        plan,
        shapes=[(name, ",".join(map(str, array.shape))) for name, array in request.inputs.items()],
        parameters=[(name, str(value)) for name, value in request.parameters.items()],
        outputs=tuple(request.outputs),
    )
    root = explain(plan, question)
    assert render_text(root, question.num_rows)
    assert render_json(root, question.num_rows)
    calls = list(_calls(root, is_certain=True))
    return {model for model, _ in calls}, {model for model, is_certain in calls if is_certain}


def _calls(entry: ExplainedStep, *, is_certain: bool) -> Iterator[tuple[str, bool]]:
    """Models that steps below may call, and whether they do for certain; shadows may."""
    for child in entry.children:
        if child.outcome.can_run or child.outcome is StepOutcome.SHADOW:
            is_sure = is_certain and child.outcome is StepOutcome.RUNS
            if child.kind == "model":
                yield child.target.partition("@")[0], is_sure
            yield from _calls(child, is_certain=is_sure)
