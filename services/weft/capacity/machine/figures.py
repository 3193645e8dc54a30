"""Figures of a machine, as plain values."""

from typing import NamedTuple

#: Bytes of all weights of a model where products are measured side by side.
RESIDENT_BYTES = 4 << 20


class Times(NamedTuple):
    """Seconds of one node.

    Attributes:
        families: By family, pairs of bytes moved and seconds, by size.
        products: Rows, side of the square weight, seconds.
        matmuls: Side of the square result, seconds of one product with an inner dimension of 32.
        convs: Rows (pixels), inputs, outputs, seconds.
        streamed: Bytes of all weights of a model, rows, operations per second: weights that come from further away
            with every run.
        node_s: A node that does nothing.
        run_s: A call of ``run`` beside its nodes and tensors.
        tensor_s: An input or output of a call.
    """

    families: dict[str, list[tuple[float, float]]]
    products: list[tuple[float, float, float]]
    matmuls: list[tuple[float, float]]
    convs: list[tuple[float, float, float, float]]
    streamed: list[tuple[float, float, float]]
    node_s: float
    run_s: float
    tensor_s: float


class TorchTimes(NamedTuple):
    """Of exported programs.

    Attributes:
        products: Rows, side of the square weight, seconds.
        node_s: An operator on a few numbers.
        run_s: A call of a program beside its operators, a tensor in and one out.
    """

    products: list[tuple[float, float, float]]
    node_s: float
    run_s: float


class LinearTimes(NamedTuple):
    """Of the engine's kernels.

    Attributes:
        products: By kind of weight, points of bytes of all weights, rows, and weights multiplied per second.
        decode: Tokens of context, and bytes of keys and values read per second by a sequence of one new token.
        prefill: Tokens of a prompt, and operations of its attention per second.
    """

    products: dict[str, list[tuple[float, float, float]]]
    decode: list[tuple[float, float]]
    prefill: list[tuple[float, float]]


class Runtimes(NamedTuple):
    """Of a service with one model.

    Attributes:
        memory_bytes: By backend, resident memory of the process with a model that has hardly any weights; ``""``:
            without a model.
        request_s, request_cpu_s: A request by backend, by the clock and in CPU time of the service, less the call of
            ONNX Runtime or of the program.
        byte_s: A byte of inputs and outputs.
    """

    memory_bytes: dict[str, int]
    request_s: dict[str, float]
    request_cpu_s: dict[str, float]
    byte_s: float


class EngineTimes(NamedTuple):
    """Of the language-model engine, seconds apart from products with weights.

    Attributes:
        step_s: A step.
        layer_s: A layer of a step.
        sequence_s: Each further sequence of a step.
        request_s: A request apart from its steps.
        next_request_s: Each further one that is sent at the same time.
        memory_bytes: Resident memory of a service with an engine that has hardly any weights.
    """

    step_s: float
    layer_s: float
    sequence_s: float
    request_s: float
    next_request_s: float
    memory_bytes: int


class GpuFigures(NamedTuple):
    """Of a GPU, as reached by torch.

    Attributes:
        name: As its driver names it.
        memory_bytes: In all.
        bytes_per_s: Read and written by a copy.
        flops_per_s: Of large products by type.
        kernel_s: A kernel that does next to nothing.
    """

    name: str
    memory_bytes: int
    bytes_per_s: float
    flops_per_s: dict[str, float]
    kernel_s: float
