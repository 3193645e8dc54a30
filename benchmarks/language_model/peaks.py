"""What this CPU's instructions for products reach on one core, with all numbers in registers."""

import itertools
import time
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from weft_kernels.linear.instruction_sets import SET
from weft_kernels.linear.panel_code import PanelCode

#: Inputs of a word by the names of ``SET.dots``.
_INPUTS = {"float32": 1, "bfloat16": 2, "int8": 4, "int4": 4}
#: Weights and rows in registers, with the sums of all of their products; of codes 16 registers hold three rows.
_NUM_WEIGHTS, _NUMS_ROWS = 2, (3, 4)
_NUM_STEPS, _NUM_TRIES = 1_000_000, 7


def operations_per_s(name: str) -> float:
    """Additions and multiplications of products with weights of ``float32``, ``bfloat16``, ``int8`` or ``int4``.

    The best of several loops of the instructions for one part of a word.
    """
    return max(_operations_per_s(name, num_rows) for num_rows in _NUMS_ROWS)


def _operations_per_s(name: str, num_rows: int) -> float:
    dot_class = SET.dots[name]

    @intrinsic
    def loop(typing: Any, memory: Any) -> Any:
        def generate(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
            code = PanelCode(builder, SET.lanes)
            dot = dot_class(code)
            (memory,) = arguments
            places = [code.at(memory, at * 64) for at in range(_NUM_WEIGHTS * num_rows)]
            rows = [dot.row(place, 0) for place in places[:num_rows]]
            first = [dot.weight(code.load(place, dot.words), 0) for place in places[:_NUM_WEIGHTS]]
            more = code.load(memory, code.ints)

            def step(index: Any, *values: Any) -> list[Any]:
                weights, sums = values[:_NUM_WEIGHTS], values[_NUM_WEIGHTS:]
                cells = itertools.product(weights, rows)
                added = [dot.add(each, *cell) for each, cell in zip(sums, cells, strict=True)]
                if dot.sums != code.floats:  # else products could be computed once
                    bits = [builder.bitcast(each, code.ints) for each in weights]
                    weights = [builder.bitcast(builder.add(each, more), weights[0].type) for each in bits]
                return [*weights, *added]

            first += [code.load(place, dot.sums) for place in places]
            sums = code.loop(ir.Constant(ir.IntType(64), _NUM_STEPS), first, step)[_NUM_WEIGHTS:]
            for each, place in zip(sums, places, strict=True):
                code.store(each, place)
            return context.get_dummy_value()

        return types.void(types.int64), generate

    @numba.njit(nogil=True)
    def run(memory: int) -> None:
        loop(memory)

    buffer = np.arange(_NUM_WEIGHTS * num_rows * 64).astype(np.uint8) % 15
    run(buffer.ctypes.data)
    times_s = []
    for _ in range(_NUM_TRIES):
        start_s = time.thread_time()
        run(buffer.ctypes.data)
        times_s.append(time.thread_time() - start_s)
    num_products = SET.lanes * _INPUTS[name] / dot_class.num_parts * _NUM_WEIGHTS * num_rows * _NUM_STEPS
    return 2 * num_products / min(times_s)
