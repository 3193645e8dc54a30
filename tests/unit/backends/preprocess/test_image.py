"""The ``image`` transform: pixels, limits, and bytes that are no image."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image, ImageOps
from tests.unit.builders import execute_batch, load_backend, make_served_request

from weft.backends.preprocess import BACKENDS
from weft.backends.preprocess.image import crop, exact, letterbox, resize
from weft.base.errors import InvalidArgumentError

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
def make_backend(make_model_context):
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
def test_digits_survive_the_way_through_a_png(make_backend, enlarged):
    """A digit of sklearn, drawn at any whole multiple of its size, comes back as 64 numbers in 0 to 16."""
    from sklearn.datasets import load_digits  # takes half a second

    digits = load_digits().images[:3]
    pictures = [Image.fromarray(np.round(digit * 255 / 16).astype(np.uint8), "L") for digit in digits]
    data = [_encoded(p.resize((8 * enlarged, 8 * enlarged), Image.Resampling.NEAREST)) for p in pictures]
    (outcome,) = execute_batch(make_backend((64,), **DIGITS), make_served_request(IMAGE=data))
    assert np.float32 == outcome.outputs["PIXELS"].dtype
    np.testing.assert_allclose(outcome.outputs["PIXELS"], digits.reshape(3, 64), atol=16 / 255 / 2 + 1e-6)


@pytest.mark.parametrize("layout", ["CHW", "HWC", "FLAT"])
def test_pixels_equal_the_written_formula(make_backend, layout):
    """Resizing, scaling, normalising and layout equal a loop over channels, for an odd size."""
    picture = _noise(13, 7)
    resized = np.asarray(picture.resize((4, 6), Image.Resampling.BICUBIC), np.float64)
    expected = np.empty((3, 6, 4))
    for channel, (mean, std) in enumerate([(0.4, 0.2), (0.5, 0.3), (0.6, 0.4)]):
        expected[channel] = (resized[:, :, channel] / 255 - mean) / std
    expected = {"CHW": expected, "HWC": np.moveaxis(expected, 0, -1), "FLAT": expected.ravel()}[layout]  # type: ignore[assignment]
    parameters = {"mean": "0.4, 0.5, 0.6", "std": "0.2,0.3,0.4", "resample": "bicubic", "layout": layout}
    (outcome,) = execute_batch(
        make_backend(expected.shape, **SMALL, **parameters), make_served_request(IMAGE=[_encoded(picture)])
    )
    np.testing.assert_allclose(outcome.outputs["PIXELS"], expected[None], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("image_format", ["PNG", "JPEG", "WEBP", "BMP"])
def test_accepted_formats_are_decoded(make_backend, image_format):
    """Each format that the parameter names is decoded to about the same pixels."""
    flat = Image.new("RGB", (9, 5), (200, 100, 50))
    backend = make_backend((3, 6, 4), **SMALL, scale="1", formats="PNG, JPEG, WEBP, BMP")
    (outcome,) = execute_batch(backend, make_served_request(IMAGE=[_encoded(flat, image_format)]))
    np.testing.assert_allclose(outcome.outputs["PIXELS"][0].mean(axis=(1, 2)), [200, 100, 50], atol=4)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK"])
def test_every_eight_bit_mode_is_converted(small, mode):
    """Bilevel, gray, palette, transparent and CMYK images become RGB."""
    picture = Image.new("RGB", (5, 5), "white").convert(mode)
    options = {"transparency": b"\x00\xff"} if mode == "P" else {}
    data = _encoded(picture, "JPEG" if mode == "CMYK" else "PNG", **options)
    (outcome,) = execute_batch(small, make_served_request(IMAGE=[data]))
    np.testing.assert_allclose(outcome.outputs["PIXELS"], 1, atol=0.01)


@pytest.fixture
def pixels(make_model_context):
    """Gives the outputs for pictures with the given output and parameters."""

    def run(pictures, shape=(3, 6, 4), datatype="FP32", *, transform=False, **parameters):
        outputs = {"PIXELS": (datatype, shape)} | ({"TRANSFORM": ("FP32", (4,))} if transform else {})
        backend = load_backend(BACKENDS["image"], make_model_context(INPUT, outputs, **parameters))
        (outcome,) = execute_batch(backend, make_served_request(IMAGE=pictures))
        if isinstance(outcome, InvalidArgumentError):
            raise outcome
        return outcome.outputs

    return run


@pytest.mark.parametrize(("width", "height"), [(31, 17), (17, 31), (40, 40), (3, 100), (24, 25)])
def test_crop_is_that_of_a_resize_and_a_cut(pixels, width, height):
    """Crop equals resizing the shorter side and cutting out the centre as torchvision does, up to one level."""
    picture = _noise(width, height)
    short = 24
    scaled = (int(short * width / min(width, height)), int(short * height / min(width, height)))
    left, upper = round((scaled[0] - 20) / 2), round((scaled[1] - 22) / 2)
    full = picture.resize(scaled, Image.Resampling.BILINEAR)
    expected = np.asarray(full.crop((left, upper, left + 20, upper + 22)), np.int64)
    parameters = {"width": "20", "height": "22", "resize": "crop", "shortest_side": str(short), "layout": "HWC"}
    outputs = pixels([_encoded(picture)], (22, 20, 3), "UINT8", transform=True, **parameters)
    assert np.abs(expected - outputs["PIXELS"][0]).max() <= 1
    expected_transform = [scaled[0] / width, scaled[1] / height, -left, -upper]
    np.testing.assert_allclose(outputs["TRANSFORM"][0], expected_transform, rtol=1e-6)


@pytest.mark.parametrize(("width", "height"), [(31, 17), (17, 31), (20, 22), (200, 1)])
def test_letterbox_keeps_the_shape_and_fills_the_rest(pixels, width, height):
    """Letterbox is the picture resized to fit, in the middle, with the border of each channel around it."""
    picture = _noise(width, height)
    ratio = min(20 / width, 22 / height)
    size = (max(1, round(width * ratio)), max(1, round(height * ratio)))
    expected = Image.new("RGB", (20, 22), (1, 2, 3))
    corner = (20 - size[0]) // 2, (22 - size[1]) // 2
    expected.paste(picture.resize(size, Image.Resampling.BILINEAR), corner)
    parameters = {"width": "20", "height": "22", "resize": "letterbox", "fill": "1,2,3", "layout": "HWC"}
    outputs = pixels([_encoded(picture)], (22, 20, 3), "UINT8", transform=True, **parameters)
    np.testing.assert_array_equal(outputs["PIXELS"][0], np.asarray(expected))
    expected_transform = [size[0] / width, size[1] / height, *corner]
    np.testing.assert_allclose(outputs["TRANSFORM"][0], expected_transform, rtol=1e-6)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("image_format", ["JPEG", "PNG", "WEBP"])
def test_picture_is_turned_upright(pixels, orientation, image_format):
    """The EXIF orientation is applied as Pillow's own function does, unless it is turned off."""
    picture, exif = _noise(5, 7), Image.Exif()
    exif[0x0112] = orientation
    data = _encoded(picture, image_format, exif=exif, **({} if image_format == "PNG" else {"quality": 100}))
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
    options = {"layout": "HWC", "formats": "PNG,JPEG,WEBP"}
    for expected, is_applied in [(upright, "true"), (Image.open(io.BytesIO(data)), "false")]:
        width, height = expected.size
        parameters = {**options, "width": str(width), "height": str(height), "exif_orientation": is_applied}
        outputs = pixels([data], (height, width, 3), "UINT8", **parameters)
        np.testing.assert_array_equal(outputs["PIXELS"][0], np.asarray(expected.convert("RGB")))


def test_broken_exif_data_do_not_matter(pixels):
    """A picture whose EXIF data cannot be read is taken as it stands."""
    data = _encoded(_noise(4, 6), "PNG", exif=b"Exif\x00\x00nonsense")
    outputs = pixels([data], (6, 4, 3), "UINT8", **SMALL, layout="HWC")
    np.testing.assert_array_equal(outputs["PIXELS"][0], np.asarray(_noise(4, 6)))


@pytest.mark.parametrize("image_format", ["GIF", "WEBP", "PNG"])
def test_first_frame_of_an_animation_is_taken(pixels, image_format):
    """Of an animated GIF, WebP or PNG the first frame is the picture."""
    first, second = Image.new("RGB", (5, 5), (255, 0, 0)), Image.new("RGB", (5, 5), (0, 0, 255))
    data = _encoded(first, image_format, save_all=True, append_images=[second], duration=100, loop=0)
    outputs = pixels([data], **SMALL, scale="1", formats="GIF,WEBP,PNG")
    np.testing.assert_allclose(outputs["PIXELS"][0].mean(axis=(1, 2)), [255, 0, 0], atol=2)


def test_channels_may_be_blue_first(pixels):
    """Mode BGR gives the channels of RGB the other way round."""
    data = [_encoded(_noise(9, 8))]
    rgb, bgr = (pixels(data, **SMALL, mode=mode)["PIXELS"] for mode in ("RGB", "BGR"))
    np.testing.assert_array_equal(rgb[:, ::-1], bgr)


def test_half_precision_is_the_rounded_result(pixels):
    """An FP16 output is the FP32 result, rounded."""
    data = [_encoded(_noise(9, 8))]
    full, half = (pixels(data, datatype=datatype, **SMALL)["PIXELS"] for datatype in ("FP32", "FP16"))
    assert np.float16 == half.dtype
    np.testing.assert_array_equal(full.astype(np.float16), half)


class _Measured:
    """A picture that only notes how many pixels Pillow would hold between its two passes."""

    def __init__(self, size, passes):
        self.size, self.passes = size, passes
        self.width, self.height = size

    def resize(self, size, resample, box):
        self.passes.append(size[0] * (box[3] - box[1]))
        return _Measured(size, self.passes)


@pytest.mark.parametrize("source", [(1, 2**24), (2**24, 1), (4096, 4096), (16, 2**20)])
def test_very_long_picture_costs_no_more_memory(source):
    """Whatever its shape, a picture of 2**24 pixels never becomes more pixels on the way to 300 x 300."""
    for placement in (exact(source, (300, 300)), crop(source, (300, 300), 320), letterbox(source, (300, 300))):
        passes = []
        assert placement.size == resize(_Measured(source, passes), placement, None).size
        assert 2**24 >= max(passes)


def test_two_passes_by_hand_equal_pillows_own(monkeypatch):
    """The picture that is made smaller first downwards is that of one call, up to one level."""
    picture, placement = _noise(9, 400), crop((9, 400), (30, 30), 32)
    whole = np.asarray(resize(picture, placement, Image.Resampling.BILINEAR), np.int64)
    monkeypatch.setattr("weft.backends.preprocess.image._MAX_INTERMEDIATE_PIXELS", 100)
    parts = np.asarray(resize(picture, placement, Image.Resampling.BILINEAR), np.int64)
    assert np.abs(whole - parts).max() <= 1


@pytest.mark.parametrize("resize", ["exact", "crop", "letterbox"])
@pytest.mark.parametrize("size", [(1, 100_000), (100_000, 1)])
def test_very_long_picture_is_resized(pixels, resize, size):
    """A picture of one pixel by a hundred thousand is served like any other."""
    options = {"width": "300", "height": "300", "layout": "HWC", "resize": resize}
    outputs = pixels([_encoded(Image.new("1", size, 1))], (300, 300, 3), "UINT8", **options)
    assert 255 == outputs["PIXELS"].max()


def test_model_without_batch_dimension_gives_one_image(make_backend):
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
def test_bad_bytes_fail_their_own_request(small, data, message):
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


def test_bomb_is_refused_before_it_is_decoded(small):
    """A PNG of 12 kB with 100 megapixels is refused by its header, without a warning of Pillow."""
    bomb = _encoded(Image.new("1", (10_000, 10_000)))
    assert len(bomb) < 20_000
    (outcome,) = execute_batch(small, make_served_request(IMAGE=[bomb]))
    assert "10000 x 10000 = 100000000 pixels; at most 16777216 are allowed" in outcome.message


def _claiming(image_format, side):
    """A small picture whose header claims ``side`` by ``side`` pixels."""
    data = bytearray(_encoded(_noise(40, 30), image_format))
    if image_format == "JPEG":
        place, size = data.index(b"\xff\xc0") + 5, struct.pack(">HH", side, side)
    else:
        place, size = {
            "GIF": (6, struct.pack("<HH", side, side)),
            "BMP": (18, struct.pack("<ii", side, side)),
            "WEBP": (26, struct.pack("<HH", side, side)),
        }[image_format]
    data[place : place + len(size)] = size
    return bytes(data)


@pytest.mark.parametrize("image_format", ["JPEG", "GIF", "BMP", "WEBP"])
def test_bomb_of_any_format_is_refused_by_its_header(pixels, image_format):
    """In every format it is the size in the header that decides, before anything is decoded."""
    with pytest.raises(InvalidArgumentError, match=r"9000 x 9000 = 81000000 pixels; at most 16777216 are allowed"):
        pixels([_claiming(image_format, 9000)], **SMALL, formats="PNG,JPEG,WEBP,BMP,GIF")


def test_header_that_lies_about_a_huge_size_is_refused(small):
    """The size in the header decides, also where Pillow itself would raise."""
    (outcome,) = execute_batch(small, make_served_request(IMAGE=[_png_header(2**31 - 1, 2**31 - 1)]))
    assert isinstance(outcome, InvalidArgumentError)
    assert "at most 16777216 are allowed" in outcome.message


def test_limits_are_inclusive(make_backend):
    """Just max_pixels and max_encoded_bytes are accepted, one more is not."""
    picture = _noise(10, 10, "L")
    size = len(_encoded(picture))
    for max_pixels, max_bytes, is_accepted in [(100, size, True), (99, size, False), (100, size - 1, False)]:
        backend = make_backend((3, 6, 4), **SMALL, max_pixels=str(max_pixels), max_encoded_bytes=str(max_bytes))
        (outcome,) = execute_batch(backend, make_served_request(IMAGE=[_encoded(picture)]))
        assert is_accepted != isinstance(outcome, InvalidArgumentError)
