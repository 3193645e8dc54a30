"""Measures operations in ONNX Runtime on this CPU, by family and size, with synthetic models."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from weft.capacity.machine.profile import RESIDENT_BYTES, Times

_OPSET, _IR_VERSION = 20, 10
_ROUNDS, _MIN_ROUND_S, _MAX_RUNS = 5, 2e-3, 400
_SHORT, _LONG = 2, 10
#: Elements of the activations of what is not a product.
_ELEMENTS = (1 << 8, 1 << 12, 1 << 15, 1 << 18, 1 << 20, 1 << 22)
_WIDTH = 256
_ROWS = (1, 4, 16, 64, 256, 1024)
_SIDES = (16, 64, 256, 512, 1024)
#: Rows and columns of products of activations, and their inner dimension.
_TILES, _INNER = (8, 32, 128, 512), 32
#: Bytes of all weights of a model that caches hold in part, and hardly.
_STREAMED_BYTES, _STREAMED_SIDE = (16 << 20, 64 << 20), 512


class Chain:
    """A model of nodes in a chain; every tensor is float32, the input ``x`` of the given shape."""

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
        return _serialized(self._nodes, {"x": self._shape}, {self._last: None}, self._weights)


#: Appends the node of an index to a chain.
_Add = Callable[[Chain, int], None]


def chain_of(shape: tuple[int, ...], num_nodes: int, add: _Add) -> bytes:
    """A model of ``num_nodes`` nodes, each appended by ``add`` with its index."""
    chain = Chain(shape)
    for index in range(num_nodes):
        add(chain, index)
    return chain.serialized()


def several(shape: tuple[int | str, ...], num_tensors: int) -> bytes:
    """A model with inputs ``x``, ``y``, ``z``, ... and as many outputs."""
    names = [chr(ord("x") + index) for index in range(num_tensors)]
    nodes = [helper.make_node("Neg", [name], [f"{name}_out"]) for name in names]
    return _serialized(nodes, dict.fromkeys(names, shape), {f"{name}_out": shape for name in names}, [])


def _serialized(nodes: Sequence[Any], inputs: dict[str, Any], outputs: dict[str, Any], weights: Sequence[Any]) -> bytes:
    given, made = (
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in tensors.items()]
        for tensors in (inputs, outputs)
    )
    graph = helper.make_graph(nodes, "measured", given, made, weights)
    opsets = [helper.make_opsetid("", _OPSET), helper.make_opsetid("com.microsoft", 1)]
    return bytes(helper.make_model(graph, opset_imports=opsets, ir_version=_IR_VERSION).SerializeToString())


def make_session(model: bytes, num_threads: int, level: str = "ORT_DISABLE_ALL") -> Any:
    """An ONNX Runtime session on the CPU, by default without graph optimisation."""
    import onnxruntime as ort  # noqa: PLC0415  # an extra

    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads, options.log_severity_level = num_threads, 1, 3
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, level)
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def best_run_s(session: Any, shape: tuple[int, ...], names: Sequence[str] = ("x",)) -> float:
    """Seconds per run in the fastest round."""
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


def measure_times(num_threads: int) -> Times:
    """Measure everything with ``num_threads`` threads; takes about ten seconds."""
    runtime = _Runtime(num_threads)
    matmuls = [(float(tile), runtime.matmul_s(tile)) for tile in _TILES]
    convs = [
        (rows, 9.0 * channels, outputs, runtime.conv_s(int(rows), channels, int(outputs)))
        for channels in (1, 16, 32, 128)
        for rows, outputs in ((rows, float(max(channels, 16))) for rows in (64.0, 512.0, 4096.0))
    ]
    node_s = runtime.node_s((1, 4), _negate, long=42)
    one_s = runtime.chain_s((1, 4), 1, _negate)
    three_s = best_run_s(make_session(several((1, 4), 3), num_threads), (1, 4), ("x", "y", "z"))
    tensor_s = max((three_s - one_s - 2 * node_s) / 4, 1e-8)
    run_s = max(one_s - node_s - 2 * tensor_s, 1e-7)
    return Times(runtime.families(), runtime.products(), matmuls, convs, runtime.streamed(), node_s, run_s, tensor_s)


def _negate(chain: Chain, _: int) -> None:
    chain.add("Neg")


def _weights(side: int, number: int) -> list[NDArray[np.float32]]:
    """They differ: the runtime keeps equal ones once."""
    rng = np.random.default_rng(0)
    return [rng.normal(0, side**-0.5, (side, side)).astype(np.float32) for _ in range(number)]


class _Runtime:
    """Measures with a given number of threads; results are seconds, or points that begin with the size."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads

    def chain_s(self, shape: tuple[int, ...], num_nodes: int, add: _Add, level: str = "ORT_DISABLE_ALL") -> float:
        """A run of a chain."""
        return best_run_s(make_session(chain_of(shape, num_nodes, add), self._num_threads, level), shape)

    def node_s(self, shape: tuple[int, ...], add: _Add, *, long: int = _LONG) -> float:
        """Seconds of one of many equal nodes: the difference between a longer and a shorter chain."""
        short_s, long_s = (self.chain_s(shape, number, add) for number in (_SHORT, long))
        return max((long_s - short_s) / (long - _SHORT), 1e-8)

    def families(self) -> dict[str, list[tuple[float, float]]]:
        """Bytes moved and seconds of operations that are no products."""
        ones = np.ones(_WIDTH, np.float32)
        adds: dict[str, _Add] = {
            "element": lambda chain, _: chain.add("Add", ones * 1e-3),
            "function": lambda chain, _: chain.add("Gelu"),
            "norm": lambda chain, _: chain.add("LayerNormalization", ones, ones * 0),
            "softmax": lambda chain, _: chain.add("Softmax"),
            "transpose": lambda chain, _: chain.add("Transpose", perm=[0, 2, 1, 3]),
        }
        found: dict[str, list[tuple[float, float]]] = {}
        for elements in _ELEMENTS:
            shape = (max(elements // _WIDTH, 1), min(_WIDTH, elements))
            side = max(int((elements / 32) ** 0.5), 1)
            heads = (1, side, max(elements // (32 * side), 1), 32)
            for family, add in adds.items():
                seconds = self.node_s(heads if family == "transpose" else shape, add)
                found.setdefault(family, []).append((8.0 * elements, seconds))
            found.setdefault("copy", []).append((8.0 * elements, self._copy_s(elements)))
            found.setdefault("reduce", []).append((4.0 * elements, self._reduce_s(shape)))
        return found

    def _copy_s(self, elements: int) -> float:
        """One concatenation of two tensors of half as many elements."""
        shape = (max(elements // 2, 1),)

        def add(chain: Chain, index: int) -> None:
            if index % 2:
                chain.add("Slice", np.array([0]), np.array([shape[0]]), np.array([0]))
            else:
                chain.add("Concat", twice=True, axis=0)

        return 2 * self.node_s(shape, add) * 2 / 3  # one of the pair moves twice what the other does

    def _reduce_s(self, shape: tuple[int, int]) -> float:
        def chained(shrink: Callable[[Chain], None]) -> float:
            def add(chain: Chain, index: int) -> None:
                if index % 2:
                    chain.add("Expand", np.array(shape))
                else:
                    shrink(chain)

            return self.node_s(shape, add)

        reduced_s = chained(lambda chain: chain.add("ReduceMean", np.array([1]), keepdims=1))
        sliced_s = chained(lambda chain: chain.add("Slice", np.array([0]), np.array([1]), np.array([1])))
        return max(2 * (reduced_s - sliced_s), 3e-7)

    def products(self) -> list[tuple[float, float, float]]:
        """Rows, side and seconds of products with square weights that the caches hold."""
        points = []
        for side in _SIDES:
            long = min(_LONG, max(RESIDENT_BYTES // (4 * side * side), 3))
            weights = _weights(side, long)
            for rows in _ROWS:
                seconds = self.node_s((rows, side), lambda chain, i: chain.add("MatMul", weights[i]), long=long)  # noqa: B023  # used within the turn
                points.append((float(rows), float(side), seconds))
        return points

    def streamed(self) -> list[tuple[float, float, float]]:
        """Operations per second of products by the bytes of all weights, and rows."""
        side, points = _STREAMED_SIDE, []
        for num_bytes in _STREAMED_BYTES:
            num_nodes = num_bytes // (4 * side * side)
            weights = _weights(side, num_nodes)
            for rows in _ROWS[:-1]:
                seconds = self.chain_s((rows, side), num_nodes, lambda chain, i: chain.add("MatMul", weights[i]))  # noqa: B023  # used within the turn
                points.append((float(num_bytes), float(rows), 2.0 * num_nodes * rows * side * side / seconds))
        return points

    def matmul_s(self, tile: int) -> float:
        """One product of activations ``[tile, 32] x [32, tile]`` among 16, and the one back."""

        def add(chain: Chain, op_type: str, missing: int, **options: Any) -> None:
            chain.add(op_type, **options)
            chain.add("Slice", np.array([0]), np.array([_INNER]), np.array([2]))
            if tile < _INNER:
                chain.add("Pad", np.array([0, 0, 0, 0, 0, missing]))

        missing = max(_INNER - tile, 0)
        fused = {"twice": True, "domain": "com.microsoft", "transB": 1, "alpha": 1e-3}
        full_s = self.node_s((16, tile, _INNER), lambda chain, _: add(chain, "FusedMatMul", missing, **fused), long=6)
        try:
            rest_s = self.node_s((16, tile, min(tile, _INNER)), lambda chain, _: add(chain, "Neg", missing), long=6)
        except Exception:
            rest_s = 0.0
        return max(full_s - rest_s, 1e-7) / 16

    def conv_s(self, rows: int, given: int, channels: int) -> float:
        """A 3x3 convolution in the runtime's blocked layout; of one input channel, the first of a model."""
        rng = np.random.default_rng(0)
        shape = (rows // 64, given, 8, 8)

        def add(chain: Chain, index: int) -> None:
            width = given if index == 0 else channels
            chain.add("Conv", rng.normal(0, 0.1, (channels, width, 3, 3)).astype(np.float32), pads=[1, 1, 1, 1])

        short_s, long_s = (self.chain_s(shape, number, add, "ORT_ENABLE_ALL") for number in (2, 8))
        next_s = max((long_s - short_s) / 6, 1e-7)
        if given == channels:
            return next_s
        return max(long_s - 7 * next_s - self.chain_s((shape[0], channels, 8, 8), 1, _negate), 1e-7)
