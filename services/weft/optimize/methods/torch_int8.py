"""``torch-int8``: the linear layers of an exported torch program as int8."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from weft.backends.pt2 import load_program
from weft.base.errors import InvalidArgumentError, UnsupportedError
from weft.optimize.methods.method import Built, Inputs, SourceModel
from weft.optimize.methods.onnx_model import has_gpu_instances
from weft.serving.backends.loading import require

_TINY = 1e-12


class TorchInt8:
    """Weights with one scale for each output channel, activations with one for each row, found as it comes.

    An answer does not depend on the other rows of its batch. ``torch.ao`` and torchao quantise modules, or programs
    that inductor compiles afterwards; a file of ``torch.export`` holds neither, so that this rewrites its graph to
    ``torch._int_mm``, which uses oneDNN's integer product.
    """

    name = "torch-int8"

    def unsuitable(self, source: SourceModel) -> str:
        """Empty if the program has a linear layer, and runs on CPUs."""
        if why := why_not_torch(source):
            return why
        if has_gpu_instances(source):
            return "the integer product of this form is for CPUs, and the model has instances on a GPU"
        torch = require("torch", "model")
        nodes = _linear_nodes(torch, load_program(torch, source.file))
        return "" if nodes else "no linear layer has a constant weight of FP32"

    def build(self, source: SourceModel, calibration: Sequence[Inputs], folder: Path) -> Built:
        """Write the program.

        Raises:
            UnsupportedError: torch cannot export the program that was rewritten.
        """
        if not calibration:
            raise InvalidArgumentError("there is no calibration data; give at least one batch of the model's inputs")
        torch = require("torch", "model")
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


def why_not_torch(source: SourceModel) -> str:
    """Empty if the model is a file of ``torch.export``."""
    return "" if source.file.suffix == ".pt2" else f"{source.file.name} is not a program of torch.export"


def _linear_nodes(torch: Any, program: Any) -> list[Any]:
    weights = program.graph_signature.inputs_to_parameters | program.graph_signature.inputs_to_buffers
    return [
        node
        for node in program.graph.nodes
        if node.target == torch.ops.aten.linear.default
        and node.args[1].name in weights
        and node.args[1].meta["val"].dtype == torch.float32
    ]


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
    tensors = []
    for name, array in zip(names, _in_order(names, batch), strict=True):
        # A single row could be taken for a dimension that does not vary.
        rows = array.repeat(2, axis=0) if len(array) == 1 and not isinstance(values[name].shape[0], int) else array
        tensors.append(torch.from_numpy(rows.copy()))
    dims = [[dim(size) for size in values[name].shape] for name in names]
    tree = torch.utils._pytree
    arguments, keywords = tree.tree_unflatten(tensors, program.call_spec.in_spec)
    positional, named = tree.tree_unflatten(dims, program.call_spec.in_spec)
    return arguments, keywords, (*positional, *named.values())


def _in_order(names: Sequence[str], batch: Inputs) -> list[Any]:
    """The arrays in the order of the program's inputs: by name, or else in the order of the configuration."""
    if len(names) != len(batch):
        raise UnsupportedError(f"the program has {len(names)} inputs, the model {len(batch)}")
    return [batch[name] for name in names] if set(names) == set(batch) else list(batch.values())


def _quantize(torch: Any, module: Any) -> int:
    """Replace the linear layers of a graph module; how many."""

    class Int8Linear(torch.nn.Module):  # type: ignore[misc]
        def __init__(self, weight: Any, bias: Any) -> None:
            super().__init__()
            scale = (weight.abs().amax(dim=1) / 127).clamp_min(_TINY)
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

    count, graph = 0, module.graph
    for node in list(graph.nodes):
        if node.target != torch.ops.aten.linear.default or node.args[1].op != "get_attr":
            continue
        weight = _attribute(module, node.args[1].target)
        if weight.dtype != torch.float32:
            continue
        bias = node.args[2] if len(node.args) > 2 else None
        value = None if bias is None else _attribute(module, bias.target).detach()
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


def _attribute(module: Any, path: str) -> Any:
    parent, _, name = path.rpartition(".")
    return getattr(module.get_submodule(parent), name)
