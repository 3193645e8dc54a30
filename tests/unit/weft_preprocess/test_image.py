"""The ``image`` transform: pixels, limits, and bytes that are no image."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from weft_common.errors import InvalidArgumentError
from weft_preprocess.transforms import BACKENDS

INPUT = {"IMAGE": ("BYTES", (1,))}
DIGITS = {"width": "8", "height": "8", "mode": "L", "scale": "16/255", "layout": "FLAT", "resample": "box"}
SMALL = {"width": "4", "height": "6"}


def _encoded(picture, image_format="PNG", **options):
    buffer = io.BytesIO()
    picture.save(buffer, image_format, **options)
    return buffer.getvalue()


def _noise(width, height, mode="RGB"):
    channels = {"L": (), "RGB": (3,), "RGBA": (4,)}[mode]
    values = np.random.default_rng(0).integers(0, 256, (height, width, *channels), np.uint8)
    return Image.fromarray(values, mode)


def _png_header(width, height):
    """A PNG that claims a size and has no pixels."""
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(b"")), (b"IEND", b"")]
    parts = (struct.pack(">I", len(d)) + k + d + struct.pack(">I", zlib.crc32(k + d)) for k, d in chunks)
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


@pytest.fixture
def make_backend(make_model_context, load_backend):
    """Makes a loaded transform whose output has the given shape."""

    def make(shape, **parameters):
        model = make_model_context(INPUT, {"PIXELS": ("FP32", shape)}, **parameters)
        return load_backend(BACKENDS["image"], model)

    return make


@pytest.fixture
def small(make_backend):
    """A transform to 4 x 6 RGB with defaults."""
    return make_backend((3, 6, 4), **SMALL)


@pytest.mark.parametrize("enlarged", [1, 3, 5])
def test_digits_survive_the_way_through_a_png(make_backend, make_served_request, execute_batch, enlarged):
    """A digit of sklearn, drawn at any whole multiple of its size, comes back as 64 numbers in 0 to 16."""
    digits = load_digits().images[:3]
    pictures = [Image.fromarray(np.round(digit * 255 / 16).astype(np.uint8), "L") for digit in digits]
    data = [_encoded(p.resize((8 * enlarged, 8 * enlarged), Image.Resampling.NEAREST)) for p in pictures]
    (outcome,) = execute_batch(make_backend((64,), **DIGITS), make_served_request(IMAGE=data))
    assert np.float32 == outcome.outputs["PIXELS"].dtype
    np.testing.assert_allclose(outcome.outputs["PIXELS"], digits.reshape(3, 64), atol=16 / 255 / 2 + 1e-6)


@pytest.mark.parametrize("layout", ["CHW", "HWC", "FLAT"])
def test_pixels_equal_the_written_formula(make_backend, make_served_request, execute_batch, layout):
    """Resizing, scaling, normalising and layout equal a loop over channels, for an odd size."""
    picture = _noise(13, 7)
    resized = np.asarray(picture.resize((4, 6), Image.Resampling.BICUBIC), np.float64)
    expected = np.empty((3, 6, 4))
    for channel, (mean, std) in enumerate([(0.4, 0.2), (0.5, 0.3), (0.6, 0.4)]):
        expected[channel] = (resized[:, :, channel] / 255 - mean) / std
    expected = {"CHW": expected, "HWC": np.moveaxis(expected, 0, -1), "FLAT": expected.ravel()}[layout]
    parameters = {"mean": "0.4, 0.5, 0.6", "std": "0.2,0.3,0.4", "resample": "bicubic", "layout": layout}
    (outcome,) = execute_batch(
        make_backend(expected.shape, **SMALL, **parameters), make_served_request(IMAGE=[_encoded(picture)])
    )
    np.testing.assert_allclose(outcome.outputs["PIXELS"], expected[None], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("image_format", ["PNG", "JPEG", "WEBP", "BMP"])
def test_accepted_formats_are_decoded(make_backend, make_served_request, execute_batch, image_format):
    """Each format that the parameter names is decoded to about the same pixels."""
    flat = Image.new("RGB", (9, 5), (200, 100, 50))
    backend = make_backend((3, 6, 4), **SMALL, scale="1", formats="PNG, JPEG, WEBP, BMP")
    (outcome,) = execute_batch(backend, make_served_request(IMAGE=[_encoded(flat, image_format)]))
    np.testing.assert_allclose(outcome.outputs["PIXELS"][0].mean(axis=(1, 2)), [200, 100, 50], atol=4)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK"])
def test_every_eight_bit_mode_is_converted(small, make_served_request, execute_batch, mode):
    """Bilevel, gray, palette, transparent and CMYK images become RGB."""
    picture = Image.new("RGB", (5, 5), "white").convert(mode)
    options = {"transparency": b"\x00\xff"} if mode == "P" else {}
    data = _encoded(picture, "JPEG" if mode == "CMYK" else "PNG", **options)
    (outcome,) = execute_batch(small, make_served_request(IMAGE=[data]))
    np.testing.assert_allclose(outcome.outputs["PIXELS"], 1, atol=0.01)


def test_model_without_batch_dimension_gives_one_image(make_backend, make_served_request, execute_batch):
    """With max_batch_size 0 input and output have no batch dimension."""
    backend = make_backend((3, 6, 4), **SMALL, max_batch_size=0)
    (outcome,) = execute_batch(backend, make_served_request(IMAGE=np.array([_encoded(_noise(5, 5))], np.object_)))
    assert (3, 6, 4) == outcome.outputs["PIXELS"].shape


_GOOD = _encoded(_noise(31, 17))
_JPEG = _encoded(_noise(31, 17), "JPEG")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not an image in PNG or JPEG: 0 bytes that begin with b''"),
        (b"GIF89a" + bytes(20), "not an image in PNG or JPEG: 26 bytes that begin with b'GIF89a"),
        (b"hello", "not an image in PNG or JPEG"),
        (_encoded(_noise(4, 4), "BMP"), "not an image in PNG or JPEG"),
        (_GOOD[:8], "broken or truncated PNG image of 8 bytes"),
        (_GOOD[:60], "broken or truncated PNG image of 60 bytes"),
        (_GOOD[: len(_GOOD) // 2], "broken or truncated PNG image"),
        (_GOOD[:40] + bytes(40) + _GOOD[80:], "broken or truncated PNG image"),
        (_JPEG[:3], "broken or truncated JPEG image"),
        (_JPEG[: len(_JPEG) // 2], "broken or truncated JPEG image"),
        (_png_header(0, 5), "broken or truncated PNG image"),
        (_encoded(Image.fromarray(np.zeros((3, 3), np.uint16))), "pixels of mode I;16 are not supported"),
    ],
)
def test_bad_bytes_fail_their_own_request(small, make_served_request, execute_batch, data, message):
    """What cannot be decoded is INVALID_ARGUMENT with its row; the batch mates have their pixels."""
    first, bad, last = execute_batch(
        small,
        make_served_request(IMAGE=[_GOOD]),
        make_served_request(IMAGE=[_GOOD, data]),
        make_served_request(IMAGE=[_JPEG]),
    )
    assert isinstance(bad, InvalidArgumentError)
    assert message in bad.message
    assert bad.message.startswith("input 'IMAGE' row 1: ")
    assert (1, 3, 6, 4) == first.outputs["PIXELS"].shape == last.outputs["PIXELS"].shape


def test_bomb_is_refused_before_it_is_decoded(small, make_served_request, execute_batch):
    """A PNG of 12 kB with 100 megapixels is refused by its header, without a warning of Pillow."""
    bomb = _encoded(Image.new("1", (10_000, 10_000)))
    assert len(bomb) < 20_000
    (outcome,) = execute_batch(small, make_served_request(IMAGE=[bomb]))
    assert "10000 x 10000 = 100000000 pixels; at most 16777216 are allowed" in outcome.message


def test_header_that_lies_about_a_huge_size_is_refused(small, make_served_request, execute_batch):
    """The size in the header decides, also where Pillow itself would raise."""
    (outcome,) = execute_batch(small, make_served_request(IMAGE=[_png_header(2**31 - 1, 2**31 - 1)]))
    assert isinstance(outcome, InvalidArgumentError)
    assert "at most 16777216 are allowed" in outcome.message


def test_limits_are_inclusive(make_backend, make_served_request, execute_batch):
    """Just max_pixels and max_encoded_bytes are accepted, one more is not."""
    picture = _noise(10, 10, "L")
    size = len(_encoded(picture))
    for max_pixels, max_bytes, is_accepted in [(100, size, True), (99, size, False), (100, size - 1, False)]:
        backend = make_backend((3, 6, 4), **SMALL, max_pixels=str(max_pixels), max_encoded_bytes=str(max_bytes))
        (outcome,) = execute_batch(backend, make_served_request(IMAGE=[_encoded(picture)]))
        assert is_accepted != isinstance(outcome, InvalidArgumentError)


@pytest.mark.parametrize(
    ("shape", "parameters", "message"),
    [
        ((3, 6, 4), {"width": "4"}, "'height' must be a whole number from 1 to 16384, got '0'"),
        ((3, 4, 6), SMALL, "'PIXELS' must be FP32 [3, 6, 4], got FP32 [3, 4, 6]"),
        ((3, 6, 4), {**SMALL, "mode": "CMYK"}, "'mode' must be one of L, RGB, got 'CMYK'"),
        ((3, 6, 4), {**SMALL, "mean": "0.1,0.2"}, "'mean' must be 1 or 3 numbers for mode RGB"),
        ((3, 6, 4), {**SMALL, "std": "0"}, "'std' must be 1 or 3 numbers other than 0 for mode RGB"),
        ((3, 6, 4), {**SMALL, "scale": "1/0"}, "'scale' must be finite numbers such as 0.5 or 16/255, got '1/0'"),
        ((3, 6, 4), {**SMALL, "scale": "nan"}, "'scale' must be finite numbers"),
        ((3, 6, 4), {**SMALL, "formats": "PNG,SVG"}, "'formats' must be some of PNG, JPEG, WEBP, BMP, got 'SVG'"),
        ((3, 6, 4), {**SMALL, "resampling": "box"}, "unknown parameter 'resampling'; did you mean 'resample'?"),
    ],
)
def test_wrong_configuration_is_a_load_error(make_backend, shape, parameters, message):
    """What the configuration has wrong is named when the model loads."""
    with pytest.raises(InvalidArgumentError) as error:
        make_backend(shape, **parameters)
    assert message in error.value.message
