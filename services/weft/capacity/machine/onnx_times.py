"""How long operations take in ONNX Runtime on this CPU, by family and size, in models made for that."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from weft.capacity.machine.profile import RESIDENT_BYTES, Times

_OPSET, _IR_VERSION = 20, 10
Floats = NDArray[np.float32]


class Chain:
    """A model whose nodes feed one another; every tensor is float32.

    Args:
        shape: Of the input ``x``.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._shape = shape
        self._nodes: list[Any] = []
        self._weights: list[Any] = []
        self._last = "x"

    def add(
        self, op_type: str, *weights: NDArray[Any], domain: str = "", twice: bool = False, **attributes: Any
    ) -> None:
        """Append a node that takes the result so far, then constants; ``twice``: the result so far again."""
        names = []
        for weight in weights:
            names.append(f"w{len(self._weights)}")
            self._weights.append(numpy_helper.from_array(weight, names[-1]))
        output = f"t{len(self._nodes)}"
        inputs = [self._last, *([self._last] if twice else []), *names]
        self._nodes.append(helper.make_node(op_type, inputs, [output], domain=domain, **attributes))
        self._last = output

    def serialized(self) -> bytes:
        """The model."""
        graph = helper.make_graph(
            self._nodes,
            "chain",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, self._shape)],
            [helper.make_tensor_value_info(self._last, TensorProto.FLOAT, None)],
            self._weights,
        )
        opsets = [helper.make_opsetid("", _OPSET), helper.make_opsetid("com.microsoft", 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=_IR_VERSION)
        return bytes(model.SerializeToString())


def chain_of(shape: tuple[int, ...], num_nodes: int, add: Callable[[Chain, int], None]) -> bytes:
    """A model of so many nodes, each appended by ``add`` with its index."""
    chain = Chain(shape)
    for index in range(num_nodes):
        add(chain, index)
    return chain.serialized()


def several(shape: tuple[int | str, ...], num_tensors: int) -> bytes:
    """A model of inputs ``x``, ``y``, ``z``, ... and as many outputs."""
    names = [chr(ord("x") + index) for index in range(num_tensors)]
    graph = helper.make_graph(
        [helper.make_node("Neg", [name], [f"{name}_out"]) for name in names],
        "several",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in names],
        [helper.make_tensor_value_info(f"{name}_out", TensorProto.FLOAT, shape) for name in names],
    )
    opsets = [helper.make_opsetid("", _OPSET)]
    return bytes(helper.make_model(graph, opset_imports=opsets, ir_version=_IR_VERSION).SerializeToString())


_ROUNDS, _MIN_ROUND_S, _MAX_RUNS = 5, 2e-3, 400
_SHORT, _LONG = 2, 10
#: Elements of the activations of what is not a product.
_ELEMENTS = (1 << 8, 1 << 12, 1 << 15, 1 << 18, 1 << 20, 1 << 22)
_WIDTH = 256
_ROWS = (1, 4, 16, 64, 256, 1024)
_SIDES = (16, 64, 256, 512, 1024)
#: Rows and columns of products of activations, and their inner dimension.
_TILES = (8, 32, 128, 512)
_INNER = 32
#: Bytes of all weights of a model that caches hold in part, and hardly.
_STREAMED_BYTES = (16 << 20, 64 << 20)
_STREAMED_SIDE = 512


def measure_times(num_threads: int) -> Times:
    """Measure all of it with so many threads; takes about ten seconds."""
    rng = np.random.default_rng(0)
    ones = np.ones(_WIDTH, np.float32)
    builders: dict[str, Callable[[Chain, int], None]] = {
        "element": lambda chain, _: chain.add("Add", ones * 1e-3),
        "function": lambda chain, _: chain.add("Gelu"),
        "norm": lambda chain, _: chain.add("LayerNormalization", ones, ones * 0),
        "softmax": lambda chain, _: chain.add("Softmax"),
        "transpose": lambda chain, _: chain.add("Transpose", perm=[0, 2, 1, 3]),
        "copy": lambda chain, _: chain.add("Concat", twice=True, axis=0),
    }
    families = {}
    for family, add in builders.items():
        points = []
        for elements in _ELEMENTS:
            if family == "copy":
                points.append(_copy_point(elements, num_threads))
                continue
            rows = max(elements // _WIDTH, 1)
            shape = _transposed_shape(elements) if family == "transpose" else (rows, min(_WIDTH, elements))
            seconds = _node_s(shape, add, num_threads)
            points.append((8.0 * elements, seconds))
        families[family] = points
    families["reduce"] = [(4.0 * elements, _reduce_s(elements, num_threads)) for elements in _ELEMENTS]
    products = []
    for side in _SIDES:
        long = min(_LONG, max(RESIDENT_BYTES // (4 * side * side), 3))
        weights = [rng.normal(0, side**-0.5, (side, side)).astype(np.float32) for _ in range(long)]
        for rows in _ROWS:
            seconds = _node_s((rows, side), partial(_add_product, weights), num_threads, long=long)
            products.append((float(rows), float(side), seconds))
    matmuls = [(float(tile), _matmul_s(tile, num_threads)) for tile in _TILES]
    convs = [(*shape, _conv_s(*shape, num_threads)) for shape in _conv_shapes()]
    streamed = [point for num_bytes in _STREAMED_BYTES for point in _streamed(num_bytes, num_threads)]
    node_s = _node_s((1, 4), lambda chain, _: chain.add("Neg"), num_threads, long=42)
    one_s = best_run_s(make_session(chain_of((1, 4), 1, lambda chain, _: chain.add("Neg")), num_threads), (1, 4))
    three_s = best_run_s(make_session(several((1, 4), 3), num_threads), (1, 4), ("x", "y", "z"))
    tensor_s = max((three_s - one_s - 2 * node_s) / 4, 1e-8)
    run_s = max(one_s - node_s - 2 * tensor_s, 1e-7)
    return Times(families, products, matmuls, convs, streamed, node_s, run_s, tensor_s)


def _add_product(weights: Sequence[Floats], chain: Chain, index: int) -> None:
    chain.add("MatMul", weights[index])


def make_session(model: bytes, num_threads: int, level: str = "ORT_DISABLE_ALL") -> Any:
    """A session of ONNX Runtime on the CPU, with the graph as it is unless another level is given."""
    import onnxruntime as ort  # noqa: PLC0415  # the extra [model]

    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads, options.log_severity_level = num_threads, 1, 3
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, level)
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def best_run_s(session: Any, shape: tuple[int, ...], names: Sequence[str] = ("x",)) -> float:
    """Seconds of the fastest round's runs."""
    array = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    inputs = dict.fromkeys(names, array)
    clock = time.thread_time if session.get_session_options().intra_op_num_threads == 1 else time.perf_counter
    session.run(None, inputs)
    start = clock()
    session.run(None, inputs)
    once = clock() - start
    runs = min(max(int(_MIN_ROUND_S / max(once, 1e-7)), 1), _MAX_RUNS)
    best = float("inf")
    for _ in range(_ROUNDS):
        start = clock()
        for _ in range(runs):
            session.run(None, inputs)
        best = min(best, (clock() - start) / runs)
    return best


def _node_s(shape: tuple[int, ...], add: Callable[[Chain, int], None], num_threads: int, *, long: int = _LONG) -> float:
    """Seconds of one of many equal nodes: what a longer chain takes more than a shorter one."""
    short_s, long_s = (best_run_s(make_session(chain_of(shape, n, add), num_threads), shape) for n in (_SHORT, long))
    return max((long_s - short_s) / (long - _SHORT), 1e-8)


def _transposed_shape(elements: int) -> tuple[int, ...]:
    side = max(int((elements / 32) ** 0.5), 1)
    return (1, side, max(elements // (32 * side), 1), 32)


def _copy_point(elements: int, num_threads: int) -> tuple[float, float]:
    """One concatenation of two tensors of half as many elements: bytes moved and seconds."""
    shape = (max(elements // 2, 1),)

    def add(chain: Chain, index: int) -> None:
        if index % 2:
            chain.add("Slice", np.array([0]), np.array([shape[0]]), np.array([0]))
        else:
            chain.add("Concat", twice=True, axis=0)

    pair_s = 2 * _node_s(shape, add, num_threads)
    # One of the pair moves twice what the other does.
    return 8.0 * elements, pair_s * 2 / 3


def _reduce_s(elements: int, num_threads: int) -> float:
    rows = max(elements // _WIDTH, 1)
    shape = (rows, min(_WIDTH, elements))

    def add(chain: Chain, index: int) -> None:
        if index % 2:
            chain.add("Expand", np.array(shape))
        else:
            chain.add("ReduceMean", np.array([1]), keepdims=1)

    def expand(chain: Chain, index: int) -> None:
        chain.add("Slice", np.array([0]), np.array([1]), np.array([1])) if index % 2 == 0 else chain.add(
            "Expand", np.array(shape)
        )

    return max(2 * (_node_s(shape, add, num_threads) - _node_s(shape, expand, num_threads)), 3e-7)


def _matmul_s(tile: int, num_threads: int) -> float:
    """Seconds of one product of activations ``[tile, 32] x [32, tile]`` among 16, and of the one back."""
    shape = (16, tile, _INNER)

    def add(chain: Chain, index: int) -> None:
        chain.add("FusedMatMul", twice=True, domain="com.microsoft", transB=1, alpha=1e-3)
        chain.add("Slice", np.array([0]), np.array([_INNER]), np.array([2]))
        if tile < _INNER:
            chain.add("Pad", np.array([0, 0, 0, 0, 0, _INNER - tile]))

    def rest(chain: Chain, index: int) -> None:
        chain.add("Neg")
        chain.add("Slice", np.array([0]), np.array([_INNER]), np.array([2]))
        if tile < _INNER:
            chain.add("Pad", np.array([0, 0, 0, 0, 0, max(_INNER - min(tile, _INNER), 0)]))

    full = _node_s(shape, add, num_threads, long=6)
    try:
        other = _node_s((16, tile, min(tile, _INNER)), rest, num_threads, long=6)
    except Exception:
        other = 0.0
    return max(full - other, 1e-7) / 16


def _conv_shapes() -> list[tuple[float, float, float]]:
    return [
        (rows, 9.0 * channels, float(max(channels, 16)))
        for channels in (1, 16, 32, 128)
        for rows in (64.0, 512.0, 4096.0)
    ]


def _conv_s(rows: float, inputs: float, outputs: float, num_threads: int) -> float:
    """Seconds of a 3x3 convolution in the runtime's blocked layout; of one input channel, the first of a model."""
    channels, given = int(outputs), int(inputs) // 9
    rng = np.random.default_rng(0)
    shape = (int(rows) // 64, given, 8, 8)

    def add(chain: Chain, index: int) -> None:
        width = given if index == 0 else channels
        chain.add("Conv", rng.normal(0, 0.1, (channels, width, 3, 3)).astype(np.float32), pads=[1, 1, 1, 1])

    def model_s(num_nodes: int) -> float:
        return best_run_s(make_session(chain_of(shape, num_nodes, add), num_threads, "ORT_ENABLE_ALL"), shape)

    next_s = max((model_s(8) - model_s(2)) / 6, 1e-7)
    return (
        next_s
        if given == channels
        else max(
            model_s(8)
            - 7 * next_s
            - best_run_s(
                make_session(chain_of((shape[0], channels, 8, 8), 1, lambda chain, _: chain.add("Neg")), num_threads),
                (shape[0], channels, 8, 8),
            ),
            1e-7,
        )
    )


def _streamed(num_bytes: int, num_threads: int) -> list[tuple[float, float, float]]:
    """Operations per second of products whose weights are so many bytes in all, by rows.

    The weights differ: the runtime keeps equal ones once.
    """
    side, rng = _STREAMED_SIDE, np.random.default_rng(0)
    num_nodes = num_bytes // (4 * side * side)
    weights = [rng.normal(0, side**-0.5, (side, side)).astype(np.float32) for _ in range(num_nodes)]
    points = []
    for rows in _ROWS[:-1]:
        model = chain_of((rows, side), num_nodes, lambda chain, index: chain.add("MatMul", weights[index]))
        seconds = best_run_s(make_session(model, num_threads), (rows, side))
        points.append((float(num_bytes), float(rows), 2.0 * num_nodes * rows * side * side / seconds))
    return points
