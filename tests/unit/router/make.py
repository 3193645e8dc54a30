"""Builders of plans, tensors, requests and running routers, used as ``make.node(...)``."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from tests.unit.router.fake_target import FakeTarget
from tests.unit.router.virtual_clock import virtual_clock_of_loop

from weft.base.core import CallContext, InferCall, InferResult, RequestedOutput
from weft.base.signature import ModelSignature, TensorSpec
from weft.base.tensors import WireTensor, bytes_tensor, encode
from weft.base.validation import scheduling_parameters
from weft.language.plan import Binding, CallPlan, Condition, DefaultPlan, GraphPlan, NodePlan, StepPlan
from weft.router.combine import CombineMethod
from weft.router.core import RouterCore
from weft.router.executor import GraphExecutor
from weft.router.operators.ensemble import CombinePlan
from weft.router.operators.sequence import LoopPlan
from weft.router.policies import POLICIES
from weft.router.repository.config import config_of_signature
from weft.router.runtime import Runtime
from weft.router.serving import ModelInference
from weft.router.target import TargetModel


@dataclass
class StepSpec:
    """A step by tensor names; `node` turns them into slots."""

    name: str
    action: "str | CallPlan | NodePlan"
    inputs: dict[str, str]
    outputs: dict[str, str]
    options: dict[str, Any] = field(default_factory=dict)


def spec(name: str, datatype: str = "FP32", dims: Sequence[int] = (-1,), *, is_optional: bool = False) -> TensorSpec:
    return TensorSpec(name, datatype, tuple(dims), is_optional)


def signature(
    name: str,
    inputs: Sequence[TensorSpec | str] = ("IN",),
    outputs: Sequence[TensorSpec | str] = ("OUT",),
    *,
    max_batch_size: int = 0,
    version: str = "1",
    platform: str = "",
) -> ModelSignature:
    def specs(given: Sequence[TensorSpec | str]) -> tuple[TensorSpec, ...]:
        return tuple(spec(one) if isinstance(one, str) else one for one in given)

    return ModelSignature(name, version, platform, max_batch_size, specs(inputs), specs(outputs))


def call_plan(
    model: str,
    inputs: Sequence[TensorSpec | str],
    outputs: Sequence[TensorSpec | str],
    *,
    max_batch_size: int = 0,
    target: str = "model",
) -> CallPlan:
    return CallPlan(target, model, "", signature(model, inputs, outputs, max_batch_size=max_batch_size))


def step(name: str, action: Any, inputs: dict[str, str], outputs: dict[str, str], **options: Any) -> StepSpec:
    """A step; `inputs` is target input <- tensor, `outputs` target output -> tensor, as the plan's bindings.

    Options are those of the plan; `defaults` maps tensors to values (those of `batched_defaults` are of one row), and
    `fallback` is a step as this one; `cache`, `retry` and `hedge` are plans of policies.
    """
    return StepSpec(name, action, inputs, outputs, options)


def node(
    name: str,
    kind: type[NodePlan],
    steps: Sequence[StepSpec],
    *,
    inputs: Sequence[str],
    outputs: Sequence[str] | Mapping[str, str],
    combines: Sequence[tuple[str, CombineMethod, Mapping[str, str], dict[str, Any]]] = (),
    max_batch_size: int = 0,
    **options: Any,
) -> NodePlan:
    """A node by tensor names; `combines` are (tensor, method, step -> its tensor, options)."""
    named_outputs = dict(outputs) if isinstance(outputs, Mapping) else {output: output for output in outputs}
    slots: dict[str, int] = {}
    for tensor in (
        *inputs,
        *(tensor for one in steps for tensor in one.outputs.values()),
        *(combine[0] for combine in combines),
        *(tensor for one in steps for tensor in _read(one) if tensor.startswith("steps.")),
    ):
        slots.setdefault(tensor, len(slots))
    names = [one.name for one in steps]
    producer = {tensor: index for index, one in enumerate(steps) for tensor in one.outputs.values()}
    producer |= {f"steps.{one.name}.ok": index for index, one in enumerate(steps)}
    is_sequence = kind.is_pipeline
    needs = [{producer[t] for t in _read(one) if is_sequence and t in producer} - {i} for i, one in enumerate(steps)]
    plans = [
        _step_plan(
            one,
            name,
            slots,
            max_batch_size,
            consumers=tuple(other for other in range(len(steps)) if index in needs[other]),
            num_dependencies=len(needs[index]),
        )
        for index, one in enumerate(steps)
    ]
    for condition in (options.get("on"), options.get("sticky_by"), getattr(options.get("loop"), "again", None)):
        _bind(condition, slots)
    if "loop" in options:
        carry = tuple((slots[output], slots[tensor]) for output, tensor in options["loop"].carry)
        options["loop"] = replace(options["loop"], carry=carry)
    combine_plans = []
    for tensor, method, sources, given in combines:
        more = dict(given)
        if "custom" in more:
            more |= {added: slots.setdefault(more[added], len(slots)) for added in ("stack", "mask")}
            more["custom"] = _step_plan(more["custom"], name, slots, max_batch_size)
        offered = tuple((names.index(one), slots[offer]) for one, offer in sources.items())
        combine_plans.append(CombinePlan(slots[tensor], method, offered, **more))
    if combine_plans:
        options["combines"] = tuple(combine_plans)
    return kind(
        name,
        name,
        len(slots),
        tuple(Binding(tensor, slots[tensor]) for tensor in inputs),
        tuple(Binding(output, slots[tensor]) for output, tensor in named_outputs.items()),
        tuple(plans),
        **options,
    )


def _read(one: StepSpec) -> list[str]:
    """Tensors that a step reads, its conditions and fallback included."""
    read = list(one.inputs.values())
    for field_name in ("when", "accept"):
        read += getattr(one.options.get(field_name), "names", ())
    return read + (_read(one.options["fallback"]) if isinstance(one.options.get("fallback"), StepSpec) else [])


def _bind(condition: Any, slots: Mapping[str, int]) -> None:
    if getattr(condition, "names", ()):
        condition.tensors = tuple(Binding(tensor, slots[tensor]) for tensor in condition.names)


def _step_plan(one: StepSpec, node: str, slots: Mapping[str, int], max_batch_size: int, **edges: Any) -> StepPlan:
    options = dict(one.options)
    action = one.action
    if isinstance(action, str):
        action = call_plan(action, list(one.inputs), list(one.outputs), max_batch_size=max_batch_size)
    for field_name in ("when", "accept"):
        _bind(options.get(field_name), slots)
    given = {field_name: options.pop(field_name, None) for field_name in POLICIES}
    if given["hedge"] is not None and given["retry"] is not None:
        given["hedge"] = replace(given["hedge"], budget_percent=given["retry"].budget_percent)
    options["policies"] = tuple(policy for policy in given.values() if policy is not None)
    if isinstance(options.get("fallback"), StepSpec):
        options["fallback"] = _step_plan(options["fallback"], node, slots, max_batch_size)
    if isinstance(options.get("defaults"), Mapping) or "batched_defaults" in options:
        whole, of_a_row = options.pop("defaults", {}), options.pop("batched_defaults", {})
        options["defaults"] = (
            *(DefaultPlan(slots[tensor], value, False) for tensor, value in whole.items()),
            *(DefaultPlan(slots[tensor], value, True) for tensor, value in of_a_row.items()),
        )
    if f"steps.{one.name}.ok" in slots:
        options.setdefault("ok_slot", slots[f"steps.{one.name}.ok"])
    return StepPlan(
        one.name,
        f"{node}/{one.name}",
        action,
        tuple(Binding(n, slots[tensor]) for n, tensor in one.inputs.items()),
        tuple(Binding(n, slots[tensor]) for n, tensor in one.outputs.items()),
        **edges,
        **options,
    )


def loop(again: Condition, max_iterations: int, *carry: tuple[str, str]) -> LoopPlan:
    """A loop by tensor names; `node` turns those of `carry`, output -> input, into slots."""
    plan: Any = LoopPlan
    return plan(again, max_iterations, carry)


def graph(root: NodePlan, *, name: str = "g", max_batch_size: int = 0, **options: Any) -> GraphPlan:
    inputs, outputs = ([binding.name for binding in bindings] for bindings in (root.inputs, root.outputs))
    return GraphPlan(signature(name, inputs, outputs, max_batch_size=max_batch_size), root, **options)


def tensor(*values: float, shape: tuple[int, ...] | None = None) -> WireTensor:
    """An FP32 tensor."""
    return encode(np.asarray(values, np.float32).reshape(shape or (len(values),)))


def text(*values: str, shape: tuple[int, ...] | None = None) -> WireTensor:
    """A BYTES tensor."""
    return bytes_tensor(values, shape or (len(values),))


async def run(
    plan: GraphPlan | GraphExecutor,
    target: FakeTarget | None = None,
    inputs: Mapping[str, WireTensor] | None = None,
    *,
    outputs: Sequence[str] = (),
    parameters: Mapping[str, Any] | None = None,
    context: CallContext | None = None,
    request_id: str = "",
    **options: Any,
) -> InferResult:
    """Execute a graph; every input not given is a tensor of one element."""
    if not isinstance(plan, GraphExecutor):
        if clock_ns := virtual_clock_of_loop():
            options.setdefault("clock_ns", clock_ns)
        plan = GraphExecutor(plan, Runtime({"model": target}, **options))
    executor = plan
    given = inputs if inputs is not None else {b.name: tensor(1.0) for b in executor.plan.root.inputs}
    call = InferCall(
        executor.plan.signature.name,
        "",
        request_id,
        parameters or {},
        dict(given),
        tuple(RequestedOutput(name, {}) for name in outputs),
    )
    context = context if context is not None else CallContext()
    context.priority, _ = scheduling_parameters(call.parameters)
    return await executor.execute(call, context)


async def infer_of_model(target: FakeTarget, model: TargetModel, call: InferCall, context: CallContext) -> InferResult:
    """The answer of a target's model that is called by its own name."""
    inference = ModelInference(target, model, call, context)
    try:
        return inference.answer(await inference.work())
    except BaseException as error:
        inference.fail(error)
        raise


def context(*, timeout_ms: float | None = None, **options: Any) -> CallContext:
    """What surrounds a call; a timeout counts from now on the loop's virtual clock."""
    clock_ns = virtual_clock_of_loop()
    assert timeout_ms is None or clock_ns is not None, "a deadline wants the fixture 'virtual_clock'"
    if timeout_ms is not None:
        options["deadline_ns"] = clock_ns() + round(timeout_ms * 1e6)
    return CallContext(**options)


def num_other_tasks() -> int:
    """Tasks of the loop beside the one that asks."""
    return len(asyncio.all_tasks()) - 1


def claims_of(core: RouterCore) -> Callable[[Callable[[], bool]], Awaitable[None]]:
    """A function that waits until a claim about the router holds; it looks whenever the router has seen a change."""
    rechecked = asyncio.Event()
    recheck = core._lifecycle.recheck

    async def recheck_and_tell() -> None:
        await recheck()
        rechecked.set()

    async def until(claim: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not claim():
                rechecked.clear()
                await rechecked.wait()

    core._lifecycle.recheck = recheck_and_tell  # type: ignore[method-assign]
    return until


PIPE = """
name: "pipe" platform: "graph" max_batch_size: 4
input  [ { name: "X" data_type: TYPE_FP32 dims: [ 2 ] } ]
output [ { name: "Z" data_type: TYPE_FP32 dims: [ 2 ] } ]
node { name: "root" sequence {
  step { name: "one" model_name: "double" output_map { key: "Y" value: "M" } }
  step { name: "two" model_name: "double" input_map { key: "X" value: "M" } output_map { key: "Y" value: "Z" } } } }
"""
ENSEMBLE = """
name: "old" platform: "ensemble" max_batch_size: 4
input  [ { name: "X" data_type: TYPE_FP32 dims: [ 2 ] } ]
output [ { name: "Z" data_type: TYPE_FP32 dims: [ 2 ] } ]
ensemble_scheduling { step [
  { model_name: "double" model_version: -1 input_map { key: "X" value: "X" } output_map { key: "Y" value: "m" } },
  { model_name: "double" model_version: 1 input_map { key: "X" value: "m" } output_map { key: "Y" value: "Z" } } ] }
"""


def write(root: Path, text: str, name: str = "pipe", version: str = "1") -> None:
    """A graph file, or a Triton ensemble's configuration with its version folder."""
    folder = root / name / version
    folder.mkdir(parents=True, exist_ok=True)
    path = root / name / "config.pbtxt" if "ensemble_scheduling" in text else folder / "graph.pbtxt"
    path.write_text(text)


def serve(target: FakeTarget, *names: str, dims: int = 2, is_ready: bool = True) -> None:
    """Let the target list models that take X and give Y."""
    x, y = spec("X", dims=(dims,)), spec("Y", dims=(dims,))
    signatures = [signature(name, [x], [y], max_batch_size=4) for name in names]
    target.models = [TargetModel(signature, is_ready, config_of_signature(signature)) for signature in signatures]


@dataclass
class StartedRouter:
    """A running router.

    Attributes:
        refresh: Asks the targets again and waits until a claim holds.
    """

    core: RouterCore
    refresh: Callable[[Callable[[], bool]], Awaitable[None]]


@asynccontextmanager
async def started(root: Path, *targets: FakeTarget, **options: Any) -> AsyncIterator[StartedRouter]:
    """A running router, closed when the block ends."""
    core = RouterCore(root, targets, poll_s=3_600.0, **options)
    until = claims_of(core)
    await core.start()

    async def refresh(claim: Callable[[], bool]) -> None:
        for one in targets:
            core._catalog.wake(one.name)
        await until(claim)

    try:
        yield StartedRouter(core, refresh)
    finally:
        await core.close(grace_s=0)


def request(name: str = "pipe", version: str = "", **options: Any) -> InferCall:
    return InferCall(name, version, "r1", inputs={"X": tensor(1, 2, shape=(1, 2))}, **options)
