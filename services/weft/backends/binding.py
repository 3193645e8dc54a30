"""ONNX Runtime sessions with inputs and outputs bound to preallocated memory.

Source: https://onnxruntime.ai/docs/api/python/api_summary.html#data-on-device and, for CUDA graphs,
https://onnxruntime.ai/docs/execution-providers/CUDA-ExecutionProvider.html#using-cuda-graphs-preview
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from weft.base.tensors import Array
from weft.serving.backends.layout import Allocate

#: Most input shapes that one instance captures; each keeps its tensors and its graph in device memory.
MAX_GRAPHS = 32

_GRAPH_ID, _NO_GRAPH = "gpu_graph_id", "-1"
_Shapes = tuple[tuple[str, tuple[int, ...]], ...]


class BoundOutput(NamedTuple):
    """A requested output.

    Attributes:
        dtype: Element type.
        dims: Shape without the batch dimension; None: unknown before the session has run.
    """

    dtype: "np.dtype[Any]"
    dims: tuple[int, ...] | None


class BoundSession:
    """Runs a session with one copy per tensor between host and device, and none on the host.

    An output of known shape is written into an array of ``allocate``; any other stays on the device until it is copied
    to the host as a whole. Not thread-safe.

    Args:
        ort: The package.
        session: A session without string inputs or outputs.
        device: ``("cuda", 0)``, or ``("cpu", 0)``.
        outputs: Outputs of ``run``, by name.
        has_rows: Whether the first dimension of every tensor is the batch dimension.
        allocate: Creates arrays that the device can write to.
        captures: Whether runs are captured as a CUDA graph per set of shapes; the session has ``enable_cuda_graph``.
    """

    def __init__(
        self,
        ort: Any,
        session: Any,
        device: tuple[str, int],
        outputs: Mapping[str, BoundOutput],
        *,
        has_rows: bool,
        allocate: Allocate,
        captures: bool = False,
    ) -> None:
        self._ort = ort
        self._session = session
        self._device = device
        self._outputs = outputs
        self._has_rows = has_rows
        self._allocate = allocate
        self._captures = captures and all(output.dims is not None for output in outputs.values())
        self._captured: dict[_Shapes, _Captured] = {}
        self._options = ort.RunOptions()
        if captures:
            self._options.add_run_config_entry(_GRAPH_ID, _NO_GRAPH)

    def run(self, inputs: Mapping[str, Array], num_rows: int) -> dict[str, Array]:
        """Run on contiguous inputs; outputs are in host memory. Releases the GIL while the session runs."""
        if self._captures:
            shapes = tuple((name, array.shape) for name, array in inputs.items())
            captured = self._captured.get(shapes)
            if captured is None and len(self._captured) < MAX_GRAPHS:
                captured = self._captured[shapes] = self._bind_for_capture(inputs, num_rows)
            if captured is not None:
                return captured.run(self._session, inputs)
        binding = self._session.io_binding()
        for name, array in inputs.items():
            binding.bind_cpu_input(name, array)  # the session copies it to its device
        arrays: dict[str, Array] = {}
        for name, output in self._outputs.items():
            if output.dims is None:
                binding.bind_output(name, *self._device)
            else:
                array = arrays[name] = self._allocate(self._shape(output.dims, num_rows), output.dtype)
                binding.bind_output(name, "cpu", 0, output.dtype.type, array.shape, array.ctypes.data)
        self._session.run_with_iobinding(binding, self._options)
        binding.synchronize_outputs()
        values = binding.get_outputs()  # in the order in which they were bound
        return {
            name: arrays[name] if name in arrays else _on_host(value)
            for name, value in zip(self._outputs, values, strict=True)
        }

    def _bind_for_capture(self, inputs: Mapping[str, Array], num_rows: int) -> "_Captured":
        make = self._ort.OrtValue.ortvalue_from_shape_and_type
        binding = self._session.io_binding()
        sources = {name: make(array.shape, array.dtype.type, *self._device) for name, array in inputs.items()}
        results = {
            name: make(self._shape(output.dims or (), num_rows), output.dtype.type, *self._device)
            for name, output in self._outputs.items()
        }
        for name, value in sources.items():
            binding.bind_ortvalue_input(name, value)
        for name, value in results.items():
            binding.bind_ortvalue_output(name, value)
        options = self._ort.RunOptions()
        options.add_run_config_entry(_GRAPH_ID, str(len(self._captured) + 1))
        return _Captured(binding, options, sources, results)

    def _shape(self, dims: tuple[int, ...], num_rows: int) -> tuple[int, ...]:
        return (num_rows, *dims) if self._has_rows else dims


class _Captured(NamedTuple):
    """Tensors at fixed addresses, as a captured graph requires."""

    binding: Any
    options: Any
    sources: Mapping[str, Any]
    results: Mapping[str, Any]

    def run(self, session: Any, inputs: Mapping[str, Array]) -> dict[str, Array]:
        for name, array in inputs.items():
            self.sources[name].update_inplace(array)
        session.run_with_iobinding(self.binding, self.options)
        self.binding.synchronize_outputs()
        return {name: _on_host(value) for name, value in self.results.items()}


def _on_host(value: Any) -> Array:
    """Copy the tensor into memory of its own; for one on the host, ONNX Runtime returns a view."""
    array: Array = value.numpy()
    return array if array.flags.owndata else array.copy()
