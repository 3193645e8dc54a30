"""Steps of attention for the rows of one key-value head, emitted as vector code; ``cpu_kernel`` puts them together.

A row is one query head of one token. Every sum has one order, whatever stands beside it. Addresses are integers,
capital arguments are constants of the compiled kernel. Heads are taken 16 numbers at a time, their rest filled with
zeros.

A row's record in the scratch memory is, in float32: the query (``padded(D)``), the weighted values (``padded(D)``),
the scores or weights of a tile (``TILE``), the sums of weights by lane and the largest score (``LANES`` each).
"""

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from weft_kernels.vector_code import I32, I64, INTS, ITEM_BYTES, LANES, VECTOR, VectorCode, padded, pieces

#: Keys of one tile, a multiple of ``LANES``.
TILE = 64
#: Keys that ``score`` takes together; they lie in one block.
GROUP = 4
#: Rows of one key-value head that share what is loaded of a key.
MAX_ROWS = 4
#: Finite substitute for minus infinity.
NOTHING = -1e30

_MAX_SUMS = 24  # of the 32 vector registers
_ONE = ir.Constant(I64, 1)
_LANES_SHIFT = ir.Constant(I64, LANES.bit_length() - 1)


def record_bytes(head_dim: int) -> int:
    """Size of a row's record, a multiple of 64."""
    return _max_at(head_dim) + 4 * LANES


def _values_at(head_dim: int) -> int:
    return 4 * padded(head_dim)


def _scores_at(head_dim: int) -> int:
    return 8 * padded(head_dim)


def _sums_at(head_dim: int) -> int:
    return _scores_at(head_dim) + 4 * TILE


def _max_at(head_dim: int) -> int:
    return _sums_at(head_dim) + 4 * LANES


@intrinsic(prefer_literal=True)
def begin_row(typing: Any, row: Any, query: Any, scale: Any, sink: Any, D: Any, DTYPE: Any, HAS_SINK: Any) -> Any:
    """Scale a query, ``D`` numbers of type ``DTYPE``, into the row's record, and clear the rest of that.

    If ``HAS_SINK``, there is at ``sink`` a float32, the first score of the row, which has no value.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        code, (row, query, scale, sink) = VectorCode(builder), args[:4]
        head_dim, dtype = D.literal_value, DTYPE.literal_value
        for first, count in pieces(head_dim):
            loaded = code.load(code.at(query, first * ITEM_BYTES[dtype]), dtype, count)
            code.store(builder.fmul(loaded, code.splat(scale)), code.at(row, 4 * first))
            code.store(code.splat(0.0), code.at(row, _values_at(head_dim) + 4 * first))
        has_sink = bool(HAS_SINK.literal_value)
        code.store(ir.Constant(VECTOR, [float(has_sink), *[0.0] * (LANES - 1)]), code.at(row, _sums_at(head_dim)))
        code.store(code.splat(code.scalar(sink) if has_sink else NOTHING), code.at(row, _max_at(head_dim)))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32, types.int64, D, DTYPE, HAS_SINK), codegen


@intrinsic(prefer_literal=True)
def score(typing: Any, row: Any, index: Any, keys: Any, key_bytes: Any, ROWS: Any, D: Any, DTYPE: Any) -> Any:
    """Scores of ``ROWS`` adjacent rows, from ``row`` on, with the tile's group ``index`` of keys.

    Its ``GROUP`` keys stand at ``keys``, ``key_bytes`` from each other.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        code, (row, index, keys, key_bytes) = VectorCode(builder), args[:4]
        num_rows, head_dim, dtype = (x.literal_value for x in (ROWS, D, DTYPE))
        sums = [[code.splat(0.0)] * GROUP for _ in range(num_rows)]
        starts = [keys]
        for _ in range(GROUP - 1):
            starts.append(builder.add(starts[-1], key_bytes))
        for first, count in pieces(head_dim):
            loaded = [code.load(code.at(start, first * ITEM_BYTES[dtype]), dtype, count) for start in starts]
            for each in range(num_rows):
                query = code.load(code.at(row, record_bytes(head_dim) * each + 4 * first))
                sums[each] = [code.fma(query, key, total) for key, total in zip(loaded, sums[each], strict=True)]
        place = code.at(builder.add(row, builder.mul(index, ir.Constant(I64, 4 * GROUP))), _scores_at(head_dim))
        for each in range(num_rows):
            four = code.sum_four(sums[each])
            address = code.at(place, record_bytes(head_dim) * each)
            builder.store(four, builder.inttoptr(address, four.type.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4, ROWS, D, DTYPE), codegen


@intrinsic(prefer_literal=True)
def softmax_step(
    typing: Any, row: Any, low: Any, high: Any, cap: Any, scales: Any, D: Any, HAS_CAP: Any, HAS_SCALES: Any
) -> Any:
    """A row's step of the running softmax: scores of a tile become weights, and what was summed shrinks.

    The row sees keys ``[low, high)`` of the tile, one at least; other weights are 0 or undefined. ``cap`` is the soft
    cap, if ``HAS_CAP``. If ``HAS_SCALES``, there are at ``scales`` ``TILE`` float32, factors of the scores, and
    ``TILE`` further ones, of the weights, but not of their sum.
    """

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        code, (row, low, high, cap, scales) = VectorCode(b), args[:5]
        head_dim = D.literal_value
        scores, sums, largest_at = (code.at(row, at(head_dim)) for at in (_scores_at, _sums_at, _max_at))

        def each_vector() -> Any:
            last = b.add(b.lshr(b.sub(high, _ONE), _LANES_SHIFT), _ONE)
            return cgutils.for_range_slice(b, b.lshr(low, _LANES_SHIFT), last, _ONE, I64)

        def is_seen(vector: Any) -> Any:
            first = b.trunc(b.shl(vector, _LANES_SHIFT), I32)
            key = b.add(ir.Constant(INTS, list(range(LANES))), code.splat_int(first))
            low_key, high_key = (code.splat_int(b.trunc(x, I32)) for x in (low, high))
            return b.and_(b.icmp_signed(">=", key, low_key), b.icmp_signed("<", key, high_key))

        def place(address: Any, vector: Any) -> Any:
            return b.add(address, b.mul(vector, ir.Constant(I64, 4 * LANES)))

        old_max = code.load(largest_at)
        largest = cgutils.alloca_once_value(b, old_max)
        with each_vector() as (vector, _):
            x = code.load(place(scores, vector))
            if HAS_SCALES.literal_value:
                x = b.fmul(x, code.load(place(scales, vector)))
            if HAS_CAP.literal_value:
                x = b.fmul(code.splat(cap), code.tanh(b.fdiv(x, code.splat(cap))))
            x = b.select(is_seen(vector), x, code.splat(NOTHING))
            code.store(x, place(scores, vector))
            b.store(code.maximum(b.load(largest), x), largest)
        new_max = code.across(b.load(largest), code.maximum)
        shrink = code.exp(b.fsub(old_max, new_max))
        total = cgutils.alloca_once_value(b, b.fmul(code.load(sums), shrink))
        with each_vector() as (vector, _):
            weight = code.exp(b.fsub(code.load(place(scores, vector)), new_max))
            weight = b.select(is_seen(vector), weight, code.splat(0.0))
            b.store(b.fadd(b.load(total), weight), total)
            if HAS_SCALES.literal_value:
                weight = b.fmul(weight, code.load(code.at(place(scales, vector), 4 * TILE)))
            code.store(weight, place(scores, vector))
        code.store(b.load(total), sums)
        code.store(new_max, largest_at)
        for first, _ in pieces(head_dim):
            address = code.at(row, _values_at(head_dim) + 4 * first)
            code.store(b.fmul(code.load(address), shrink), address)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3, types.float32, types.int64, D, HAS_CAP, HAS_SCALES), codegen


@intrinsic(prefer_literal=True)
def weigh(
    typing: Any, row: Any, groups: Any, offset: Any, key_bytes: Any, low: Any, high: Any, ROWS: Any, D: Any, DTYPE: Any
) -> Any:
    """Add the values of keys ``[low, high)`` of a tile, times their weights, to those of ``ROWS`` rows, key by key.

    At ``groups`` there is an int64 for each group of ``GROUP`` keys; ``offset`` added, it is the address of the first
    of their values, which are ``key_bytes`` from each other.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        num_rows, head_dim, dtype = (x.literal_value for x in (ROWS, D, DTYPE))
        parts = pieces(head_dim)
        per_pass = -(-len(parts) // -(-num_rows * len(parts) // _MAX_SUMS))
        for start in range(0, len(parts), per_pass):
            _weigh_pieces(VectorCode(builder), parts[start : start + per_pass], num_rows, head_dim, dtype, args[:6])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6, ROWS, D, DTYPE), codegen


def _weigh_pieces(
    code: VectorCode, parts: list[tuple[int, int]], num_rows: int, head_dim: int, dtype: int, args: Any
) -> None:
    b, (row, groups, offset, key_bytes, low, high) = code.b, args
    records = [code.at(row, record_bytes(head_dim) * each) for each in range(num_rows)]
    places = [code.at(record, _values_at(head_dim) + 4 * first) for record in records for first, _ in parts]
    totals = [cgutils.alloca_once_value(b, code.load(place)) for place in places]
    with cgutils.for_range_slice(b, low, high, _ONE, I64) as (key, _):
        group = b.mul(b.udiv(key, ir.Constant(I64, GROUP)), ir.Constant(I64, 8))
        start = b.add(offset, b.load(b.inttoptr(b.add(groups, group), I64.as_pointer()), align=8))
        start = b.add(start, b.mul(b.urem(key, ir.Constant(I64, GROUP)), key_bytes))
        values = [code.load(code.at(start, first * ITEM_BYTES[dtype]), dtype, count) for first, count in parts]
        for each, record in enumerate(records):
            weight_at = code.at(b.add(record, b.mul(key, ir.Constant(I64, 4))), _scores_at(head_dim))
            weight = code.splat(code.scalar(weight_at))
            for total, value in zip(totals[each * len(parts) :], values, strict=False):
                b.store(code.fma(weight, value, b.load(total)), total)
    for place, total in zip(places, totals, strict=True):
        code.store(b.load(total), place)


@intrinsic(prefer_literal=True)
def end_row(typing: Any, row: Any, out: Any, D: Any, DTYPE: Any) -> Any:
    """Divide a row's weighted values by its sum of weights, into ``D`` numbers of type ``DTYPE`` at ``out``."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        code, (row, out) = VectorCode(builder), args[:2]
        head_dim, dtype = D.literal_value, DTYPE.literal_value
        divisor = code.across(code.load(code.at(row, _sums_at(head_dim))), builder.fadd)
        for first, count in pieces(head_dim):
            quotient = builder.fdiv(code.load(code.at(row, _values_at(head_dim) + 4 * first)), divisor)
            code.store(quotient, code.at(out, first * ITEM_BYTES[dtype]), dtype, count)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, D, DTYPE), codegen


@intrinsic(prefer_literal=True)
def prefetch(typing: Any, values: Any, key_bytes: Any, D: Any, DTYPE: Any) -> Any:
    """Bring ``GROUP`` values of one head, ``key_bytes`` from each other, to the second-level cache."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        code, (values, key_bytes) = VectorCode(builder), args[:2]
        for _ in range(GROUP):
            for offset in range(0, D.literal_value * ITEM_BYTES[DTYPE.literal_value], 64):
                code.prefetch(code.at(values, offset))
            values = builder.add(values, key_bytes)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, D, DTYPE), codegen
