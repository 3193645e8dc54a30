"""Inner loops of products on CPUs, as LLVM instructions: rows of ``x`` by a panel of outputs.

A step of a loop takes a word of 4 bytes of each output of the panel, and the same inputs of each row: 1 input in
float32, 2 in bfloat16, 4 in 8 bits. The words of an output are added one by one, first to last, whatever the number of
rows, so that the sums of a row are bitwise its own (those of codes are exact in any order). Sums stay in registers. How
a word is multiplied is up to the instruction set.
"""

import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numba.np.arrayobj import make_array

from weft_kernels.linear import instruction_sets
from weft_kernels.linear.instruction_sets import SET
from weft_kernels.linear.panel_code import FLOAT, I8, I32, I64, WORD_BYTES, Dot, PanelCode, WidenedDot, every

MOST_ROWS, MOST_WIDENED_ROWS, MOST_CODE_ROWS = SET.most_rows, SET.most_widened_rows, SET.most_code_rows
#: Outputs of a panel.
PANEL = SET.num_vectors * SET.lanes
#: Weights of 8 bits have a multiple of so many inputs, the last ones zeros.
CODES_STEP = WORD_BYTES * SET.dots["int8"].num_words
#: Inputs of a group of codes; those of 8 bits may have fewer.
GROUP, SMALL_GROUP = 32, 16
#: Whether rows of bfloat16 numbers are given as float32.
WIDENS_ROWS = issubclass(SET.dots["bfloat16"], WidenedDot)
#: Whether rows of codes are given as int16, but for 4-bit weights without a table.
HAS_SHORT_ROWS = SET.dots["int8"].row_bytes > WORD_BYTES
#: Whether codes of 8 bits are signed; see ``Dot``.
HAS_SIGNED_CODES = SET.dots["int8"].has_signed_codes
#: What compiled code is made from.
SOURCES = (sys.modules[__name__], *instruction_sets.SOURCES)

_LANES, _NUM_VECTORS = SET.lanes, SET.num_vectors
_VECTOR_BYTES = _LANES * WORD_BYTES
_STEP_BYTES = _NUM_VECTORS * _VECTOR_BYTES
_SCALES_BYTES = PANEL * 2


def _add_words(b: PanelCode, dot: Dot, num_rows: int, arguments: Sequence[Any]) -> None:
    """``words_product`` of a fixed number of rows."""
    for vectors in _parts(num_rows):
        _add_vectors(b, dot, num_rows, vectors, arguments)


def _parts(num_rows: int) -> list[range]:
    """Vectors of a panel that are multiplied at once: all, or as many as the registers hold sums of."""
    num_vectors = _NUM_VECTORS
    while num_vectors * num_rows > SET.most_sums:
        num_vectors //= 2
    return [range(first, first + num_vectors) for first in range(0, _NUM_VECTORS, num_vectors)]


def _is_in_pairs(dot: Dot, num_rows: int) -> bool:
    """Whether rows are multiplied in pairs: enough of them to make up for the arrangement of words."""
    return dot.num_words > 1 and num_rows > 3


def _add_vectors(b: PanelCode, dot: Dot, num_rows: int, vectors: Sequence[int], arguments: Sequence[Any]) -> None:
    x, stride, panel, steps, sums, ahead = arguments
    rows = b.rows(x, stride, num_rows)
    cells = [(row, vector) for row in range(num_rows) for vector in vectors]
    places = [b.at(sums, (row * _NUM_VECTORS + vector) * _VECTOR_BYTES) for row, vector in cells]
    is_in_pairs = _is_in_pairs(dot, num_rows)
    step_words = dot.num_words if is_in_pairs else 1
    #: The factors that are fewer are loaded first, and stay in registers.
    order = cells if len(vectors) <= num_rows else sorted(cells, key=lambda cell: cell[1])

    def step(index: Any, *totals: Any) -> list[Any]:
        start = b.times(index, _STEP_BYTES * step_words)
        place, words = b.at(panel, start), b.times(index, dot.row_bytes * step_words)
        if vectors[0] == 0:
            b.prefetch(b.at(ahead, start), _STEP_BYTES * step_words)
        found = dict(zip(cells, totals, strict=True))
        if is_in_pairs:
            own_rows = [b.at(row, words) for row in rows]
            for vector in vectors:
                ends = [b.at(place, word * _STEP_BYTES + vector * _VECTOR_BYTES) for word in range(step_words)]
                dot.add_pairs(found, vector, [b.load(each, dot.words) for each in ends], own_rows)
            return list(found.values())
        for part in range(dot.num_parts):
            own: dict[int, Any] = {}
            weights: dict[int, Any] = {}
            for row, vector in order:
                if row not in own:
                    own[row] = dot.row(b.at(rows[row], words), part)
                if vector not in weights:
                    weights[vector] = dot.weight(b.load(b.at(place, vector * _VECTOR_BYTES), dot.words), part)
                found[row, vector] = dot.add(found[row, vector], weights[vector], own[row])
        return list(found.values())

    totals = dict(zip(cells, [b.load(place, dot.sums) for place in places], strict=True))
    if is_in_pairs:
        totals, steps = dot.arranged(totals), b.b.lshr(steps, ir.Constant(I64, 1))
    totals = dict(zip(cells, b.loop(steps, list(totals.values()), step), strict=True))
    if is_in_pairs:
        totals = dot.arranged(totals)
    for place, total in zip(places, totals.values(), strict=True):
        b.store(total, place)


def _add_groups(b: PanelCode, num_bits: int, size: int, num_rows: int, arguments: Sequence[Any]) -> None:
    """``groups_product`` of a fixed number of rows."""
    for vectors in _parts(num_rows):
        _add_groups_of_vectors(b, num_bits, size, num_rows, vectors, arguments)


def _add_groups_of_vectors(
    b: PanelCode, num_bits: int, size: int, num_rows: int, vectors: Sequence[int], arguments: Sequence[Any]
) -> None:
    x, stride, panel, groups, sums, ahead, factors, factors_stride, table = arguments
    rows, row_factors = b.rows(x, stride, num_rows), b.rows(factors, factors_stride, num_rows)
    dot = SET.dots["int4" if num_bits == 4 and table is None else "int8"](b)
    group_bytes = bytes_of_group(num_bits, size)
    scales_at = group_bytes - 2 * _SCALES_BYTES
    is_in_pairs = _is_in_pairs(dot, num_rows)
    num_loads = dot.num_words if is_in_pairs and num_bits == 8 else 1

    def group(index: Any) -> list[Any]:
        start = b.times(index, group_bytes)
        place, words = b.at(panel, start), b.times(index, size // WORD_BYTES * dot.row_bytes)
        if vectors[0] == 0:
            b.prefetch(b.at(ahead, start), group_bytes)
        totals = {(row, vector): every(dot.sums, 0) for row in range(num_rows) for vector in vectors}
        for load in range(0, size // WORD_BYTES * num_bits // 8, num_loads):
            codes: dict[int, list[Any]] = {}
            for vector in vectors:
                loaded = [
                    b.load(b.at(place, (each * _NUM_VECTORS + vector) * _VECTOR_BYTES), b.bytes)
                    for each in range(load, load + num_loads)
                ]
                loaded = b.nibbles(loaded[0]) if num_bits == 4 else loaded
                codes[vector] = loaded if table is None else [SET.lookup(b, table, each) for each in loaded]
            first = load * len(loaded) // num_loads * dot.row_bytes
            own_rows = [b.at(b.at(row, words), first) for row in rows]
            if is_in_pairs:
                for vector in vectors:
                    dot.add_pairs(totals, vector, codes[vector], own_rows)
                continue
            for word, part in itertools.product(range(len(loaded)), range(dot.num_parts)):
                weights = [(vector, dot.weight(codes[vector][word], part)) for vector in vectors]
                for row, address in enumerate(own_rows):
                    own = dot.row(b.at(address, word * dot.row_bytes), part)
                    for vector, weight in weights:
                        totals[row, vector] = dot.add(totals[row, vector], weight, own)
        totals = dot.arranged(totals) if is_in_pairs else totals
        for vector in vectors:
            scale, offset = (
                b.b.fpext(b.load(b.at(place, scales_at + part + vector * _LANES * 2), b.halves), b.floats)
                for part in (0, _SCALES_BYTES)
            )
            for row in range(num_rows):
                at = row * _NUM_VECTORS + vector
                own = b.at(row_factors[row], b.times(index, 2 * WORD_BYTES))
                own_scale, own_sum = (b.spread(b.load(b.at(own, part), FLOAT)) for part in (0, WORD_BYTES))
                product = b.b.fmul(b.b.sitofp(dot.total(totals[row, vector]), b.floats), own_scale)
                total = b.fma(scale, product, b.load(b.at(sums, at * _VECTOR_BYTES), b.floats))
                b.store(b.fma(offset, own_sum, total), b.at(sums, at * _VECTOR_BYTES))
        return []

    b.loop(groups, [], group)


def bytes_of_group(num_bits: int, size: int) -> int:
    """Bytes of a group of so many inputs in a panel: codes, scales, offsets."""
    return PANEL * size * num_bits // 8 + 2 * _SCALES_BYTES


def _for_each_count(builder: Any, num_rows: Any, build: Callable[[int], None], most_rows: int) -> None:
    """``build(rows)`` for 1 to ``most_rows`` rows; when it runs, ``num_rows`` chooses."""
    after = builder.append_basic_block()
    choice = builder.switch(num_rows, after)
    for rows in range(1, most_rows + 1):
        block = builder.append_basic_block()
        choice.add_case(ir.Constant(I64, rows), block)
        builder.position_at_end(block)
        build(rows)
        builder.branch(after)
    builder.position_at_end(after)


@intrinsic
def words_product(
    typing: Any, rows: Any, num_rows: Any, x: Any, x_stride: Any, panel: Any, steps: Any, sums: Any, ahead: Any
) -> Any:
    """Add the products of a panel and of 1 to ``MOST_ROWS`` rows to ``sums``; see there for bfloat16 and codes.

    Args:
        typing: Of the compiler.
        rows: An array of the type of the weight: float32, uint16 for bfloat16, int8, or int32 for two codes of 16 bits
            in a word. So are the rows, but float32 for bfloat16 where ``WIDENS_ROWS``, and int16 for codes where
            ``HAS_SHORT_ROWS``.
        num_rows: Number of rows.
        x: Address of the first row.
        x_stride: Bytes from a row to the next.
        panel: Address of the panel, ``steps`` times ``PANEL`` words.
        steps: At least 1; for codes a multiple of ``CODES_STEP`` inputs.
        sums: Address of the sums, ``[num_rows, PANEL]`` of float32, or int32 for 8 bits.
        ahead: Address of what to prefetch, two cache lines of each 256 bytes of as many as the panel has.
    """
    name = {"uint16": "bfloat16", "int16": "int8", "int32": "shorts"}.get(str(rows.dtype), str(rows.dtype))
    kind = SET.dots[name]

    def generate(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        b = PanelCode(builder, _LANES)
        most_rows = {"bfloat16": MOST_WIDENED_ROWS, "float32": MOST_ROWS}.get(name, MOST_CODE_ROWS)
        _for_each_count(builder, arguments[1], lambda count: _add_words(b, kind(b), count, arguments[2:]), most_rows)
        return context.get_dummy_value()

    return types.void(rows, *[types.int64] * 7), generate


@intrinsic
def widen(typing: Any, panel: Any, steps: Any, wide: Any) -> Any:
    """Write 8-bit codes as two words for each one, with which ``words_product`` has less to do; see ``HAS_SHORT_ROWS``.

    Args:
        typing: Of the compiler.
        panel: Address of ``steps`` times ``PANEL`` words.
        steps: At least 1.
        wide: Address of the result.
    """

    def generate(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        b = PanelCode(builder, _LANES)
        panel, steps, wide = arguments
        dot = SET.dots["int8"](b)

        def step(index: Any) -> list[Any]:
            place, result = (b.at(start, b.times(index, _STEP_BYTES * size)) for start, size in ((panel, 1), (wide, 2)))
            for vector in range(_NUM_VECTORS):
                loaded = b.load(b.at(place, vector * _VECTOR_BYTES), dot.words)
                for part in range(2):
                    b.store(dot.weight(loaded, part), b.at(result, part * _STEP_BYTES + vector * _VECTOR_BYTES))
            return []

        b.loop(steps, [], step)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic
def groups_product(
    typing: Any, table: Any, num_rows: Any, x: Any, x_stride: Any, panel: Any, groups: Any, sums: Any, ahead: Any,
    factors: Any, factors_stride: Any,
) -> Any:  # fmt: skip
    """As ``words_product``, with rows of signed 8-bit codes and a panel of groups of 32 or 16 inputs.

    Args:
        typing: Of the compiler.
        table: uint8 array, whose number of axes says what the codes are: 1: 8-bit numbers, 2: 4-bit numbers, 3: indices
            of its 16 values, 4: 8-bit numbers in groups of 16. Those of 8 bits are signed where ``HAS_SIGNED_CODES``.
        num_rows: Number of rows.
        x: Address of the first row.
        x_stride: Bytes from a row to the next.
        panel: Address of ``groups`` times ``bytes_of_group``: codes, the scales of the outputs, float16, and their
            offsets, likewise.
        groups: At least 1.
        sums: Address of the sums, float32 ``[num_rows, PANEL]``.
        ahead: As there.
        factors: Address of the scale of each group of a row and of the sum of its numbers, float32.
        factors_stride: Bytes from a row of these to the next.
    """
    num_bits, size = {1: (8, GROUP), 2: (4, GROUP), 3: (4, GROUP), 4: (8, SMALL_GROUP)}[table.ndim]

    def generate(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        b = PanelCode(builder, _LANES)
        values = None
        if table.ndim == 3:
            address = builder.ptrtoint(make_array(table)(context, builder, arguments[0]).data, I64)
            quarter = b.load(address, ir.VectorType(I8, 16))
            lanes = ir.Constant(ir.VectorType(I32, 4 * _LANES), list(range(16)) * (_LANES // 4))
            values = builder.shuffle_vector(quarter, quarter, lanes)
        _for_each_count(
            builder, arguments[1], lambda count: _add_groups(b, num_bits, size, count, [*arguments[2:], values]),
            MOST_CODE_ROWS,
        )  # fmt: skip
        return context.get_dummy_value()

    return types.void(table, *[types.int64] * 9), generate


@intrinsic
def add_column(typing: Any, words: Any, shift: Any, number: Any, sums: Any) -> Any:
    """Add a number times one of the four codes in each word to ``sums``.

    Args:
        typing: Of the compiler.
        words: Address of ``PANEL`` words of 8-bit codes.
        shift: Bits of a word before the code.
        number: float32.
        sums: Address of float32 ``[PANEL]``.
    """

    def generate(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        b = PanelCode(builder, _LANES)
        words, shift, number, sums = arguments
        factor = b.spread(number)
        left = b.spread(builder.trunc(builder.sub(ir.Constant(I64, 24), shift), I32))
        for vector in range(_NUM_VECTORS):
            codes = builder.shl(b.load(b.at(words, vector * _VECTOR_BYTES), b.ints), left)
            codes = (builder.ashr if HAS_SIGNED_CODES else builder.lshr)(codes, every(b.ints, 24))
            place = b.at(sums, vector * _VECTOR_BYTES)
            b.store(b.fma(builder.sitofp(codes, b.floats), factor, b.load(place, b.floats)), place)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32, types.int64), generate


@intrinsic
def store_row(typing: Any, out: Any, address: Any, sums: Any, bias: Any, count: Any) -> Any:
    """Store the first of ``PANEL`` float32 sums and their biases, rounded to the nearest where the array is bfloat16.

    Args:
        typing: Of the compiler.
        out: An array of the type of the result, which alone is read: float32, or uint16 for bfloat16.
        address: Where to store.
        sums: Address of the sums.
        bias: Address of what is added to them.
        count: How many of them; all above ``PANEL``.
    """
    is_bfloat16 = str(out.dtype) == "uint16"

    def generate(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        b = PanelCode(builder, _LANES)
        _, address, sums, bias, count = arguments
        lanes, left = ir.Constant(b.ints, list(range(_LANES))), b.b.trunc(count, I32)
        places = [b.at(address, vector * _LANES * (2 if is_bfloat16 else 4)) for vector in range(_NUM_VECTORS)]
        values = []
        for vector in range(_NUM_VECTORS):
            total, own = (b.load(b.at(of, vector * _VECTOR_BYTES), b.floats) for of in (sums, bias))
            bits = builder.bitcast(builder.fadd(total, own), b.ints)
            values.append(b.bfloats(bits) if is_bfloat16 else bits)
        is_whole = builder.icmp_signed(">=", count, ir.Constant(I64, PANEL))
        with builder.if_else(is_whole) as (whole, cut):
            with whole:
                for value, place in zip(values, places, strict=True):
                    b.store(value, place)
            with cut:  # lane by lane where a CPU has no instruction
                for vector, (value, place) in enumerate(zip(values, places, strict=True)):
                    first = ir.Constant(I32, vector * _LANES)
                    mask = builder.icmp_signed("<", lanes, b.spread(builder.sub(left, first)))
                    pointer = builder.inttoptr(place, value.type.as_pointer())
                    name = f"llvm.masked.store.v{_LANES}i{value.type.element.width}.p0"
                    b.call(name, ir.VoidType(), value, pointer, ir.Constant(I32, 1), mask)
        return context.get_dummy_value()

    return types.void(out, *[types.int64] * 4), generate
