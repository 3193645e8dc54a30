"""Tensors of steps: rows are taken out in groups and put back in order; what is not as declared is said."""

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.router import make

from weft.base.errors import InternalError
from weft.base.signature import TensorSpec
from weft.base.tensors import NUMPY_BY_DATATYPE, WireTensor, bytes_tensor, decode, encode
from weft.router.tensors import join, misfit, split, without_rows

DATATYPES = sorted(NUMPY_BY_DATATYPE)


def table(datatype: str, num_rows: int, dims: tuple[int, ...] = (2,)) -> WireTensor:
    """A tensor whose elements all differ."""
    count = num_rows * int(np.prod(dims))
    if datatype == "BYTES":
        return bytes_tensor([f"{i}" * (i % 4) for i in range(count)], (num_rows, *dims))
    return encode(np.arange(count).reshape(num_rows, *dims).astype(NUMPY_BY_DATATYPE[datatype]))


@pytest.mark.parametrize("datatype", DATATYPES)
@pytest.mark.parametrize("rows", [[0], [2], [1, 2], [0, 2, 4], [0, 1, 3, 4]])
@pytest.mark.parametrize("dims", [(), (1,), (2, 3)])
def test_split_agrees_with_numpy(datatype: str, rows: list[int], dims: tuple[int, ...]) -> None:
    """For rows side by side and rows apart, for every datatype."""
    whole = table(datatype, 5, dims)
    (part,) = split(whole, [rows])
    np.testing.assert_array_equal(decode(whole)[rows], decode(part))
    assert datatype == part.datatype


@given(st.sampled_from(DATATYPES), st.lists(st.integers(0, 3), min_size=1, max_size=9))
def test_what_split_takes_apart_join_puts_together(datatype: str, choice: list[int]) -> None:
    """Whatever way each row goes."""
    whole = table(datatype, len(choice))
    groups = [[row for row, way in enumerate(choice) if way == wanted] for wanted in sorted(set(choice))]
    assert whole == join(list(zip(groups, split(whole, groups), strict=True)), len(choice))


@pytest.mark.parametrize("datatype", ["FP32", "BYTES"])
def test_all_rows_are_the_tensor_itself(datatype: str) -> None:
    """Nothing is copied where all rows go the same way."""
    whole = table(datatype, 4)
    (part,) = split(whole, [range(4)])
    assert part is whole
    assert join([(range(4), part)], 4) is whole


def test_rows_without_elements_are_rows() -> None:
    """A dimension of 0 leaves no bytes to tell the rows by."""
    whole = WireTensor("FP32", (3, 0), b"")
    parts = split(whole, [[0, 2], [1]])
    assert [(2, 0), (1, 0)] == [part.shape for part in parts]
    assert whole == join(list(zip([[0, 2], [1]], parts, strict=True)), 3)


def test_a_tensor_of_no_rows_has_its_variable_dimensions_at_zero() -> None:
    """Its datatype is the declared one."""
    assert WireTensor("FP32", (0, 0, 3), b"") == without_rows("FP32", (-1, 3))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (table("FP32", 1, (3,)), r"row 0 is FP32\[2\], row 1 is FP32\[3\]; a variable dimension must come out"),
        (table("FP64", 1), r"row 0 is FP32\[2\], row 1 is FP64\[2\]"),
        (table("FP32", 2), r"1 rows went into a step, and its answer has shape \[2, 2\]"),
        (WireTensor("FP32", (), bytes(4)), r"1 rows went into a step, and its answer has shape \[\]"),
    ],
)
def test_parts_that_do_not_make_one_tensor_are_refused(other: WireTensor, message: str) -> None:
    """The message names rows and shapes."""
    with pytest.raises(InternalError, match=message):
        join([([0], table("FP32", 1)), ([1], other)], 2)


def test_an_answer_for_all_rows_must_have_all_rows() -> None:
    """Also where nothing has to be put together."""
    with pytest.raises(InternalError, match=r"3 rows went into a step, and its answer has shape \[2, 2\]"):
        join([([0, 1, 2], table("FP32", 2))], 3)


@pytest.mark.parametrize("data", [b"", b"\x01\0\0", b"\x09\0\0\0a", b"\0\0\0\0" * 5])
def test_bytes_that_do_not_fit_their_shape_are_refused(data: bytes) -> None:
    """No row is made of what lies behind the end."""
    with pytest.raises(InternalError, match="bytes are not the strings of shape"):
        split(WireTensor("BYTES", (2, 2), data), [[0]])


def test_numbers_that_do_not_fit_their_shape_are_refused() -> None:
    """Rows have the same size."""
    with pytest.raises(InternalError, match="7 bytes are not 2 rows"):
        split(WireTensor("INT8", (2, 3), bytes(7)), [[0]])


def test_a_part_is_bytes() -> None:
    """It can go into a request as it is."""
    assert {bytes} == {type(part.data) for part in split(make.tensor(1, 2, 3, shape=(3, 1)), [[0, 2], [1]])}


def test_taking_rows_is_quick() -> None:
    """Some rows of 32 x FP32[10] take microseconds: the limit is ten times what they need, for slow machines."""
    whole, rows = table("FP32", 32, (10,)), [1, 3, 4, 9, 10, 20, 31]
    best_s = 1.0
    for _ in range(20):
        start_s = time.perf_counter()
        for _ in range(100):
            split(whole, [rows])
        best_s = min(best_s, (time.perf_counter() - start_s) / 100)
    assert best_s < 50e-6


FLOATS = TensorSpec("OUT", "FP32", (-1, 2))
TEXT = TensorSpec("OUT", "BYTES", (1,))


@pytest.mark.parametrize(
    ("spec", "tensor", "fault"),
    [
        (FLOATS, WireTensor("FP32", (1, 3, 2), bytes(24)), ""),
        (FLOATS, WireTensor("FP32", (0, 3, 2), b""), ""),
        (FLOATS, WireTensor("INT32", (1, 3, 2), bytes(24)), "it is INT32, declared as FP32"),
        (FLOATS, WireTensor("FP32", (1, 3, 3), bytes(36)), "its shape is [1,3,3], declared as [-1,-1,2]"),
        (FLOATS, WireTensor("FP32", (3, 2), bytes(24)), "its shape is [3,2], declared as [-1,-1,2]"),
        (FLOATS, WireTensor("FP32", (), bytes(4)), "its shape is [], declared as [-1,-1,2]"),
        (FLOATS, WireTensor("FP32", (1, -3, 2), b""), "its shape is [1,-3,2], declared as [-1,-1,2]"),
        (FLOATS, WireTensor("FP32", (1, 3, 2), bytes(23)), "it has 23 bytes, its shape [1,3,2] takes 24"),
        (TEXT, bytes_tensor(["a", "b"], (2, 1)), ""),
        (TEXT, bytes_tensor(["a"], (2, 1)), "its 5 bytes are not the 2 strings of shape [2,1]"),
        (TEXT, WireTensor("BYTES", (1, 1), b"\xff\xff\xff\xff"), "its 4 bytes are not the 1 strings of shape [1,1]"),
    ],
)
def test_what_differs_from_the_declaration_is_said(spec: TensorSpec, tensor: WireTensor, fault: str) -> None:
    """Datatype, rank, sizes that are fixed, and the number of bytes."""
    assert fault == misfit(tensor, spec, has_batch=True)


def test_without_batch_dimension_the_dims_are_the_shape() -> None:
    """A model that does not batch declares the whole shape."""
    tensor = WireTensor("FP32", (3, 2), bytes(24))
    assert "" == misfit(tensor, FLOATS, has_batch=False)
