"""Methods for programs of ``torch.export``: ``torch-bf16``, ``torch-int8`` and ``torch-compile``."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from weft.backends.pt2 import load_program
from weft.base.errors import InvalidArgumentError, UnsupportedError
from weft.optimize.methods.method import Built, Inputs, OptimizationMethod, SourceModel
from weft.serving.backends.loading import require
from weft_kernels.processors import largest_code, multiplies_natively

_COMPILERS = ("c++", "g++", "clang++")
_TINY = 1e-12


def _method(
    name: str, why_not: Callable[[SourceModel], str], build: Callable[[SourceModel, Sequence[Inputs], Path], Built]
) -> OptimizationMethod:
    def unsuitable(source: SourceModel) -> str:
        return (
            why_not(source) if source.file.suffix == ".pt2" else f"{source.file.name} is not a program of torch.export"
        )

    return OptimizationMethod(name, unsuitable, build)


def _setting(
    name: str, why_not: Callable[[SourceModel], str], setting: Mapping[str, str], notes: str
) -> OptimizationMethod:
    """The same program with another setting of the backend ``pytorch``."""

    def build(source: SourceModel, calibration: Sequence[Inputs], folder: Path) -> Built:
        shutil.copyfile(source.file, folder / source.file.name)
        return Built(setting, f"the same program{notes}")

    return _method(name, why_not, build)


def _has_bf16() -> bool:
    return multiplies_natively(require("torch", "torch").bfloat16)


def _why_not_bf16(source: SourceModel) -> str:
    return "" if source.has_gpu_instances() or _has_bf16() else "this CPU has no instructions for bfloat16"


def _why_not_compile(source: SourceModel) -> str:
    if any(map(shutil.which, _COMPILERS)):
        return ""
    return f"torch.compile needs a compiler for C++ where the model is served: one of {', '.join(_COMPILERS)}"


def _why_not_int8(source: SourceModel) -> str:
    if source.has_gpu_instances():
        return "the integer product of this form is for CPUs, and the model has instances on a GPU"
    torch = require("torch", "torch")
    program = load_program(torch, source.file)
    weights = program.graph_signature.inputs_to_parameters | program.graph_signature.inputs_to_buffers
    has_linear = any(
        node.target == torch.ops.aten.linear.default
        and node.args[1].name in weights
        and node.args[1].meta["val"].dtype == torch.float32
        for node in program.graph.nodes
    )
    return "" if has_linear else "no linear layer has a constant weight of FP32"


def _build_int8(source: SourceModel, calibration: Sequence[Inputs], folder: Path) -> Built:
    if not calibration:
        raise InvalidArgumentError("there is no calibration data; give at least one batch of the model's inputs")
    torch = require("torch", "torch")
    program = load_program(torch, source.file)
    arguments, keywords, dims = _example(torch, program, calibration[-1])
    module = program.module(check_guards=False)
    count = _quantize(torch, module)
    try:
        with torch.no_grad():
            exported = torch.export.export(module, arguments, keywords, dynamic_shapes=dims)
    except Exception as error:  # torch raises many kinds
        raise UnsupportedError(f"torch cannot export the program with int8 layers: {error}") from error
    torch.export.save(exported, folder / source.file.name)
    return Built({}, f"{count} linear layers as int8, per output channel and row")


#: ``AUTOCAST``: operators that benefit compute in bfloat16; inputs and outputs keep their types.
TORCH_BF16 = _setting(
    "torch-bf16", _why_not_bf16, {"AUTOCAST": "bf16"}, "; linear layers and convolutions compute in bfloat16"
)
#: ``TORCH_COMPILE``: one program for each number of rows that is a power of two, compiled when it first comes.
TORCH_COMPILE = _setting(
    "torch-compile",
    _why_not_compile,
    {"TORCH_COMPILE": "inductor"},
    ", compiled as its shapes come; let warm-up send them",
)
#: Weights with one scale for each output channel, activations with one for each row, found as it comes: an answer does
#: not depend on the other rows of its batch. ``torch.ao`` and torchao quantise modules, or programs that inductor
#: compiles afterwards; a file of ``torch.export`` holds neither, so that this rewrites its graph to ``torch._int_mm``,
#: which uses oneDNN's integer product.
TORCH_INT8 = _method("torch-int8", _why_not_int8, _build_int8)


def _example(torch: Any, program: Any, batch: Inputs) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """Arguments for an export, and which of their dimensions vary, as in the first one."""
    values: Mapping[str, Any] = {
        node.name: node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"
    }
    limits = program.range_constraints
    known: dict[str, Any] = {}

    def dim(size: Any) -> Any:
        if isinstance(size, int):
            return torch.export.Dim.STATIC
        name, limit = str(size), limits.get(size.node.expr)
        least = max(1, int(limit.lower)) if limit is not None else 1
        most = int(limit.upper) if limit is not None and limit.upper < 2**31 else None
        return known.setdefault(name, torch.export.Dim(name, min=least, max=most))

    names = list(program.graph_signature.user_inputs)
    if len(names) != len(batch):
        raise UnsupportedError(f"the program has {len(names)} inputs, the model {len(batch)}")
    # By name, or else in the order of the configuration.
    arrays = [batch[name] for name in names] if set(names) == set(batch) else list(batch.values())
    tensors = []
    for name, array in zip(names, arrays, strict=True):
        # A single row could be taken for a dimension that does not vary.
        rows = array.repeat(2, axis=0) if len(array) == 1 and not isinstance(values[name].shape[0], int) else array
        tensors.append(torch.from_numpy(rows.copy()))
    dims = [[dim(size) for size in values[name].shape] for name in names]
    tree = torch.utils._pytree
    arguments, keywords = tree.tree_unflatten(tensors, program.call_spec.in_spec)
    positional, named = tree.tree_unflatten(dims, program.call_spec.in_spec)
    return arguments, keywords, (*positional, *named.values())


def _quantize(torch: Any, module: Any) -> int:
    """Replace the linear layers of a graph module; returns how many.

    Weights have 7 bits where products of 8 bits saturate on this CPU.
    """
    largest = largest_code()

    class Int8Linear(torch.nn.Module):  # type: ignore[misc]
        def __init__(self, weight: Any, bias: Any) -> None:
            super().__init__()
            scale = (weight.abs().amax(dim=1) / largest).clamp_min(_TINY)
            self.register_buffer("weight", (weight / scale[:, None]).round().to(torch.int8))
            self.register_buffer("scale", scale)
            self.register_buffer("bias", bias)

        def forward(self, x: Any) -> Any:
            rows = x.reshape(-1, x.shape[-1])
            scale = (rows.abs().amax(dim=1, keepdim=True) / 127).clamp_min(_TINY)
            integers = torch._int_mm((rows / scale).round().to(torch.int8), self.weight.t())
            y = integers.to(x.dtype) * scale * self.scale
            y = y if self.bias is None else y + self.bias
            return y.reshape(*x.shape[:-1], y.shape[-1])

    def attribute(path: str) -> Any:
        parent, _, name = path.rpartition(".")
        return getattr(module.get_submodule(parent), name)

    count, graph = 0, module.graph
    for node in list(graph.nodes):
        if node.target != torch.ops.aten.linear.default or node.args[1].op != "get_attr":
            continue
        weight = attribute(node.args[1].target)
        if weight.dtype != torch.float32:
            continue
        bias = node.args[2] if len(node.args) > 2 else None
        value = None if bias is None else attribute(bias.target).detach()
        module.add_submodule(f"int8_linear_{count}", Int8Linear(weight.detach(), value))
        with graph.inserting_before(node):
            replacement = graph.call_module(f"int8_linear_{count}", (node.args[0],))
        node.replace_all_uses_with(replacement)
        graph.erase_node(node)
        count += 1
    graph.eliminate_dead_code()
    used = {node.target for node in graph.nodes if node.op == "get_attr"}
    for name in [name for name, _ in [*module.named_parameters(), *module.named_buffers()]]:
        if not name.startswith("int8_linear_") and name not in used:
            parent, _, last = name.rpartition(".")
            delattr(module.get_submodule(parent), last)
    module.recompile()
    return count
