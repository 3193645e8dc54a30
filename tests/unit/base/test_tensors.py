"""Tensors keep their elements on the way through bytes, and damaged bytes are refused with what is wrong."""

import struct

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.utils import deserialize_bytes_tensor, serialize_byte_tensor

from weft.base.errors import InvalidArgumentError
from weft.base.tensors import (
    ITEMSIZE_BYTES,
    NUMPY_BY_DATATYPE,
    WireTensor,
    bytes_tensor,
    check_bytes,
    datatype_of,
    decode,
    encode,
    encode_bytes,
    num_elements,
    split_bytes,
)

FIXED = sorted(ITEMSIZE_BYTES)
SHAPES = [(), (1,), (0,), (3, 0, 2), (2, 3), (1, 1, 1, 5)]
EXTREMES = {
    "BOOL": [True, False],
    "BF16": [-0.0, 1.5, 3.0e38],
    "FP16": [-0.0, 1.5, 65504.0],
    "FP32": [-0.0, 1.5, np.inf],
    "FP64": [-0.0, 1.5, -np.inf],
}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("datatype", [*FIXED, "BYTES"])
def test_round_trip(datatype, shape):
    """Every datatype keeps datatype, shape and elements, for empty, scalar and deep shapes."""
    array = np.arange(num_elements(shape)).reshape(shape).astype(NUMPY_BY_DATATYPE[datatype])
    if datatype == "BYTES":
        array = np.array([b"%d" % i for i in range(num_elements(shape))], dtype=np.object_).reshape(shape)
    tensor = encode(array)
    assert (datatype, shape) == (tensor.datatype, tensor.shape)
    assert datatype == "BYTES" or array.nbytes == len(tensor.data)
    decoded = decode(tensor)
    assert (array.dtype, shape, array.tolist()) == (decoded.dtype, decoded.shape, decoded.tolist())


@pytest.mark.parametrize("datatype", FIXED)
def test_extreme_values_keep_their_bits(datatype):
    """The largest, the smallest and the negative zero of each datatype come back with the same bits."""
    dtype = NUMPY_BY_DATATYPE[datatype]
    array = np.array(EXTREMES.get(datatype) or [np.iinfo(dtype).min, np.iinfo(dtype).max], dtype=dtype)
    assert array.tobytes() == decode(encode(array)).tobytes()


def test_wire_is_little_endian_row_major():
    """The protocol's bytes: little-endian, row after row; BF16 is the upper half of a float32."""
    array = np.asfortranarray(np.array([[1, 2], [3, 4]], dtype=np.uint16))
    assert bytes([1, 0, 2, 0, 3, 0, 4, 0]) == encode(array).data
    assert struct.pack("<2f", 1.5, -2.0) == encode(np.array([1.5, -2.0], dtype=np.float32)).data
    assert struct.pack("<f", 1.5)[2:] == encode(np.array([1.5], dtype=ml_dtypes.bfloat16)).data


def test_decode_is_a_read_only_view():
    """Decoding copies nothing and cannot change bytes that another call still sends."""
    data = np.arange(4, dtype=np.int32).tobytes()
    array = decode(WireTensor("INT32", (4,), data))
    assert array.base is not None
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1


@given(st.lists(st.binary(max_size=40), max_size=20))
def test_bytes_round_trip(elements):
    """Any list of byte strings, empty ones included, comes back as it was, from tritonclient too."""
    assert elements == split_bytes(encode_bytes(elements))
    tensor = bytes_tensor(elements, (len(elements),))
    check_bytes(tensor.data, len(elements), name="x", model="m")
    assert elements == decode(tensor).tolist()
    if elements:
        assert serialize_byte_tensor(np.array(elements, dtype=np.object_)).item() == encode_bytes(elements)
        assert elements == deserialize_bytes_tensor(encode_bytes(elements)).tolist()


@given(st.lists(st.text(max_size=10), max_size=5))
def test_text_is_sent_as_utf8(elements):
    """Strings become UTF-8 bytes."""
    assert [element.encode() for element in elements] == split_bytes(encode_bytes(elements))


def test_whatever_holds_bytes_is_sent_as_its_content():
    """Byte-like elements keep their content; arrays of numpy's own string types are BYTES, without the padding."""
    for kind in (bytes, bytearray, memoryview, np.bytes_):
        assert [b"a\x00b"] == split_bytes(encode_bytes([kind(b"a\x00b")]))  # type: ignore[list-item]
    for array in (np.array(["a", "bcd"]), np.array([b"a", b"bcd"])):
        assert "BYTES" == datatype_of(array)
        assert [b"a", b"bcd"] == split_bytes(encode(array).data)


@pytest.mark.parametrize("dtype", ["complex64", "datetime64[s]", ">f4"])
def test_dtype_without_datatype_is_refused(dtype):
    """A dtype that the protocol does not know is an error that names it."""
    with pytest.raises(InvalidArgumentError, match=r"has no V2 datatype"):
        encode(np.zeros(1, dtype=dtype))


def test_truncated_bytes_are_refused_at_every_offset():
    """Cut anywhere, also between elements, BYTES of a known count are refused; uncut they are not."""
    data = encode_bytes([b"ab", b"", b"cde"])
    check_bytes(data, 3, name="x", model="m")
    for cut in range(len(data)):
        with pytest.raises(InvalidArgumentError, match="string"):
            check_bytes(data[:cut], 3, name="x", model="m")
        with pytest.raises(InvalidArgumentError, match="string"):
            decode(WireTensor("BYTES", (3,), data[:cut]), name="x")


@pytest.mark.parametrize(
    ("data", "text", "element"),
    [
        (b"\x01\x00\x00", "incomplete string length indicator", 1),
        (b"\x01\x00\x00\x00", "incomplete string data", 1),
        (b"\xff\xff\xff\xffab", "incomplete string data", 1),
        (b"\x00\x00\x00\x00\x01", "incomplete string length indicator", 2),
        (encode_bytes([b"a"]) + b"\x05\x00\x00\x00b", "incomplete string data", 2),
    ],
)
def test_damaged_bytes_name_the_damage(data, text, element):
    """A cut length and a cut element, of 4 GiB too, are told apart, with the element in which the data ends."""
    with pytest.raises(InvalidArgumentError, match=f"{text} for inference input 'x'"):
        split_bytes(data, name="x")
    with pytest.raises(InvalidArgumentError, match=f"{text} for inference input 'x'.*end inside element {element};"):
        check_bytes(data, 9, name="x", model="m")


@pytest.mark.parametrize("count", [0, 1, 3])
def test_wrong_number_of_elements_is_refused(count):
    """Too few and too many BYTES elements are an error with both numbers."""
    data = encode_bytes([b""] * count)
    text = f"expected 2 string elements for inference input 'x' for model 'm', got {count}"
    with pytest.raises(InvalidArgumentError, match=text):
        check_bytes(data, 2, name="x", model="m")
    with pytest.raises(InvalidArgumentError, match=f"expected 2 string elements for inference input 'x', got {count}"):
        decode(WireTensor("BYTES", (2,), data), name="x")


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        *(
            (WireTensor("FP32", (2,), bytes(size)), f"byte size mismatch for input 'x'. Expected 8, got {size}")
            for size in (0, 7, 9, 16)
        ),
        (WireTensor("FP32", (-1, -2), bytes(8)), r"shape \[-1,-2\] of 'x'"),
        (WireTensor("BYTES", (-1, -2), bytes(8)), r"shape \[-1,-2\] of 'x'"),
        (WireTensor("FP8", (1,), b"\x00"), "unknown datatype 'FP8' for 'x'; use one of BOOL, "),
        (WireTensor("INT8", (2**32, 2**32), b""), f"byte size mismatch for input 'x'. Expected {2**64}, got 0"),
    ],
)
def test_a_tensor_that_cannot_be_is_refused(tensor, text):
    """Sizes that differ are told with both, exactly; negative dimensions and unknown datatypes by name."""
    with pytest.raises(InvalidArgumentError, match=text):
        decode(tensor, name="x")
