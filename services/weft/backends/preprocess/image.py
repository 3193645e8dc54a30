"""``image``: encoded images to normalised pixel arrays."""

import io
import struct
import time
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from weft.base.errors import InvalidArgumentError, WeftError
from weft.base.tensors import NUMPY_BY_DATATYPE, Array
from weft.serving.backends.base import Backend, Batch
from weft.serving.backends.loading import check_tensor, only_input, require
from weft.serving.backends.parameters import ParameterReader
from weft.serving.request.request import InferenceRequest, InferenceResponse, Outcome

_CHANNELS = {"L": 1, "RGB": 3, "BGR": 3}
_RESAMPLING = ("nearest", "box", "bilinear", "hamming", "bicubic", "lanczos")
_MAX_SIDE = 16384
_TRANSFORM = "TRANSFORM"
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF")
_PREFIX_BYTES = 16
# Pillow converts these to L or RGB without loss of range; it would clip 16-bit and float pixels.
_EIGHT_BIT_MODES = frozenset({"1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr"})
_EXIF_ORIENTATION = 0x0112
# Transposition that makes an image of that EXIF orientation upright.
_TURNS = {
    2: "FLIP_LEFT_RIGHT", 3: "ROTATE_180", 4: "FLIP_TOP_BOTTOM", 5: "TRANSPOSE", 6: "ROTATE_270", 7: "TRANSVERSE",
    8: "ROTATE_90",
}  # fmt: skip
# Pillow resizes horizontally first, into an image of the result's width and the old height: for one of 1 x 16777216
# pixels and a result of 224 x 224 that would be 15 GB.
_MAX_INTERMEDIATE_PIXELS = 2**24


class ImageDecoder:
    """Decodes files of a few formats of ``FORMATS``; other data never reaches a decoder.

    ``max_pixels`` limits width times height, as declared in the header; the EXIF orientation may be applied.
    """

    def __init__(
        self, formats: Sequence[str], *, max_encoded_bytes: int, max_pixels: int, applies_orientation: bool
    ) -> None:
        image = require("PIL.Image", "transforms")
        image.init()
        self._formats = {name: image.OPEN[name] for name in formats}
        self._turns = {orientation: image.Transpose[name] for orientation, name in _TURNS.items()}
        self._max_encoded_bytes = max_encoded_bytes
        self._max_pixels = max_pixels
        self._applies_orientation = applies_orientation

    def decode(self, data: bytes, mode: str) -> Any:
        """Decode an image, upright, in Pillow's ``mode``; of an animation the first frame; transparency is dropped.

        Raises:
            InvalidArgumentError: The data is not an image of these formats, is truncated, or exceeds a limit.
        """
        if len(data) > self._max_encoded_bytes:
            raise InvalidArgumentError(
                f"the image has {len(data)} bytes; at most {self._max_encoded_bytes} are allowed"
            )
        prefix = data[:_PREFIX_BYTES]
        name = next((name for name, (_, accepts) in self._formats.items() if accepts(prefix)), None)
        if name is None:
            raise InvalidArgumentError(
                f"not an image in {' or '.join(self._formats)}: {len(data)} bytes that begin with {prefix!r}"
            )
        try:
            # The plugin itself reads the header only; Image.open would also apply Pillow's process-wide size limit.
            picture = self._formats[name][0](io.BytesIO(data), "")
            self._check_header(picture)
            turn = self._turn(picture) if self._applies_orientation else None
            picture = picture.convert(mode)
            return picture if turn is None else picture.transpose(turn)
        except (WeftError, MemoryError):
            raise
        except Exception as error:  # decoders raise many kinds on hostile bytes
            raise InvalidArgumentError(f"broken or truncated {name} image of {len(data)} bytes: {error}") from error

    def _check_header(self, picture: Any) -> None:
        if (num_pixels := picture.width * picture.height) > self._max_pixels:
            raise InvalidArgumentError(
                f"the image has {picture.width} x {picture.height} = {num_pixels} pixels; at most {self._max_pixels} "
                "are allowed"
            )
        if picture.mode not in _EIGHT_BIT_MODES:
            raise InvalidArgumentError(f"pixels of mode {picture.mode} are not supported; send 8 bits per channel")

    def _turn(self, picture: Any) -> Any:
        """The transposition that makes the image upright; None if it is, or if its EXIF data cannot be read."""
        try:
            return self._turns.get(picture.getexif().get(_EXIF_ORIENTATION))
        except (SyntaxError, ValueError, TypeError, KeyError, IndexError, struct.error):
            return None


class Placement(NamedTuple):
    """Mapping of one image to a result of fixed size.

    Attributes:
        box: Part of the image to resize: left, upper, right, lower, in its pixels; may be fractional.
        size: Width and height after resizing, in pixels of the result.
        offset: Position of its upper left corner in the result.
        transform: ``scale_x, scale_y, offset_x, offset_y`` from the image to the result: x' = scale_x * x + offset_x.
    """

    box: tuple[float, float, float, float]
    size: tuple[int, int]
    offset: tuple[int, int]
    transform: tuple[float, float, float, float]


def exact(source: tuple[int, int], target: tuple[int, int]) -> Placement:
    """Stretch the whole image to the whole result."""
    scale_x, scale_y = target[0] / source[0], target[1] / source[1]
    return Placement((0, 0, *source), target, (0, 0), (scale_x, scale_y, 0, 0))


def crop(source: tuple[int, int], target: tuple[int, int], shortest_side: int) -> Placement:
    """Scale the image so that its shorter side is ``shortest_side``, and cut out the centre.

    Only the visible part is resized, so a very long image costs no more than another. Sizes and offsets are rounded
    like in torchvision's ``Resize`` and ``CenterCrop``.
    """
    shorter = min(source)
    scaled = tuple(int(shortest_side * side / shorter) for side in source)
    offset_x, offset_y = (round((full - kept) / 2) for full, kept in zip(scaled, target, strict=True))
    scale_x, scale_y = scaled[0] / source[0], scaled[1] / source[1]
    box = (
        offset_x / scale_x,
        offset_y / scale_y,
        min((offset_x + target[0]) / scale_x, source[0]),
        min((offset_y + target[1]) / scale_y, source[1]),
    )
    return Placement(box, target, (0, 0), (scale_x, scale_y, -offset_x, -offset_y))


def letterbox(source: tuple[int, int], target: tuple[int, int]) -> Placement:
    """Scale the whole image to fit, centred; the caller fills the border."""
    scale = min(target[0] / source[0], target[1] / source[1])
    width, height = (max(1, round(side * scale)) for side in source)
    offset = (target[0] - width) // 2, (target[1] - height) // 2
    return Placement((0, 0, *source), (width, height), offset, (width / source[0], height / source[1], *offset))


def resize(picture: Any, placement: Placement, resample: Any) -> Any:
    """Resize the ``box`` of the image to the ``size`` of the placement, with bounded intermediate memory."""
    left, upper, right, lower = placement.box
    width, height = placement.size
    if width * (lower - upper) > _MAX_INTERMEDIATE_PIXELS and width > picture.width:
        picture = picture.resize((picture.width, height), resample, (0, upper, picture.width, lower))
        upper, lower = 0, height
    return picture.resize(placement.size, resample, (left, upper, right, lower))


class ImageBackend(Backend):
    """Decodes each image into an array of pixels, resized, scaled and normalised.

    ::

        IMAGE BYTES [n, 1]  ->  PIXELS FP32, FP16 or UINT8 [n, *shape] (, TRANSFORM FP32 [n, 4])
        pixels = (scale * value - mean[channel]) / std[channel]         value: 0 to 255

    Input and output may have any name. ``shape`` is [C, H, W], [H, W, C] or, for FLAT, [C * H * W] in the order of CHW;
    the output is declared with it. UINT8 are the raw values, neither scaled nor normalised. The EXIF orientation is
    applied; transparency is dropped; of an animation the first frame is used; palettes,
    grayscale and CMYK are converted to ``mode``.

    The output TRANSFORM, if declared, is scale_x, scale_y, offset_x, offset_y from the upright image to the result:
    x' = scale_x * x + offset_x. The backend ``nms`` uses it to return boxes in pixels of the original image.

    Parameters (``width`` and ``height`` required, the rest optional):
        width, height: Size of the result in pixels.
        resize: ``exact`` stretches the image; ``crop`` scales its shorter side to ``shortest_side`` and cuts out the
            centre; ``letterbox`` scales it to fit, centred on a background of ``fill``. Default exact.
        shortest_side: For crop, in pixels, at least width and height; 256 with a width of 224 is usual. Default: the
            larger one of width and height.
        fill: For letterbox, 0 to 255, one number, or one per channel, comma-separated. Default 0.
        mode: ``RGB``, ``BGR`` (C = 3) or ``L`` (grayscale, C = 1). Default RGB.
        layout: ``CHW``, ``HWC`` or ``FLAT``. Default CHW.
        resample: ``nearest``, ``box``, ``bilinear``, ``hamming``, ``bicubic`` or ``lanczos``. Default bilinear.
        scale: Factor on the pixel value 0 to 255; a fraction such as 16/255 is allowed. Default 1/255.
        mean, std: One number, or one per channel, comma-separated, in units after ``scale``. Defaults 0 and 1.
        exif_orientation: Whether the EXIF orientation is applied. Default true.
        formats: Accepted formats out of PNG, JPEG, WEBP, BMP and GIF, comma-separated. Default PNG,JPEG.
        max_encoded_bytes: Size limit of a file, in bytes. Default 10485760.
        max_pixels: Limit of width times height, checked before decoding. Default 16777216.

    Data in another format, truncated or over a limit is INVALID_ARGUMENT for its own request alone.

    Source:
        Resampling is Pillow's, which is antialiased like torchvision's with ``antialias``; crop is
        ``Resize`` and ``CenterCrop`` of https://github.com/pytorch/vision; letterbox is ``LetterBox`` of
        https://github.com/ultralytics/ultralytics with a symmetric border.
    """

    is_repeatable: ClassVar[bool] = True
    has_no_effects: ClassVar[bool] = True
    can_use_gpu: ClassVar[bool] = False

    def load(self) -> None:
        """Read the parameters and validate them against the declared tensors."""
        self._input = only_input(self.model, ("BYTES",), (1,)).name
        parameters = ParameterReader(self.model)
        width, height = (parameters.integer(key, 0, minimum=1, maximum=_MAX_SIDE) for key in ("width", "height"))
        self._size = width, height
        self._mode = parameters.choice("mode", "RGB", tuple(_CHANNELS))
        self._layout = parameters.choice("layout", "CHW", ("CHW", "HWC", "FLAT"))
        self._resize = parameters.choice("resize", "exact", ("exact", "crop", "letterbox"))
        longer = max(width, height)
        self._shortest_side = parameters.integer("shortest_side", longer, minimum=longer, maximum=_MAX_SIDE)
        fill = parameters.numbers("fill", (0,), size=_CHANNELS[self._mode])
        self._fill = np.array(fill).astype(np.uint8)
        if not np.array_equal(self._fill, fill):
            raise parameters.fault("fill", fill, "whole numbers from 0 to 255")
        self._read_output(parameters)
        resample = parameters.choice("resample", "bilinear", _RESAMPLING)
        self._decoder = ImageDecoder(
            parameters.choices("formats", "PNG,JPEG", FORMATS),
            max_encoded_bytes=parameters.integer("max_encoded_bytes", 10 * 2**20, minimum=1),
            max_pixels=parameters.integer("max_pixels", 2**24, minimum=1),
            applies_orientation=parameters.flag("exif_orientation", True),
        )
        parameters.finish()
        self._resample = require("PIL.Image", "transforms").Resampling[resample.upper()]

    def execute(self, batch: Batch) -> list[Outcome]:
        """Decode the images of each request."""
        batch.infer_start_ns = time.monotonic_ns()
        outcomes: list[Outcome] = []
        for request in batch.requests:
            try:
                outcomes.append(InferenceResponse(self._outputs(request)))
            except InvalidArgumentError as error:
                outcomes.append(error)
        batch.infer_end_ns = time.monotonic_ns()
        return outcomes

    def _outputs(self, request: InferenceRequest) -> dict[str, Array]:
        width, height = self._size
        values = np.empty((request.num_rows, height, width, _CHANNELS[self._mode]), np.uint8)
        transforms = np.empty((request.num_rows, 4), np.float32)
        for row, data in enumerate(request.array(self._input).ravel()):
            try:
                transforms[row] = self._draw(data, values[row])
            except InvalidArgumentError as error:
                raise error.with_message(f"input '{self._input}' row {row}: {error.message}") from error
        outputs = {self._output: self._normalised(values)}
        if self._gives_transform:
            outputs[_TRANSFORM] = transforms
        if not self.model.signature.max_batch_size:
            outputs = {name: array[0] for name, array in outputs.items()}
        return outputs

    def _draw(self, data: bytes, result: Array) -> tuple[float, float, float, float]:
        """Decode and resize the image into ``result``, uint8 ``[H, W, C]``; returns its transform."""
        picture = self._decoder.decode(data, "L" if self._mode == "L" else "RGB")
        if self._resize == "exact":
            placement = exact(picture.size, self._size)
        elif self._resize == "crop":
            placement = crop(picture.size, self._size, self._shortest_side)
        else:
            placement = letterbox(picture.size, self._size)
        values = np.asarray(resize(picture, placement, self._resample))
        values = values.reshape(*placement.size[::-1], result.shape[-1])
        (left, upper), (width, height) = placement.offset, placement.size
        if placement.size != self._size:
            result[:] = self._fill
        result[upper : upper + height, left : left + width] = values[:, :, ::-1] if self._mode == "BGR" else values
        return placement.transform

    def _normalised(self, values: Array) -> Array:
        """Normalise ``values``, uint8 ``[n, H, W, C]``, into the layout and datatype of the output."""
        values = values if self._layout == "HWC" else values.transpose(0, 3, 1, 2)
        if self._dtype == np.uint8:
            return np.ascontiguousarray(values).reshape(len(values), *self._shape)
        pixels = np.empty(values.shape, np.float32)
        np.multiply(values, self._factor, out=pixels)
        pixels += self._offset
        return pixels.astype(self._dtype, copy=False).reshape(len(values), *self._shape)

    def _read_output(self, parameters: ParameterReader) -> None:
        (width, height), channels = self._size, _CHANNELS[self._mode]
        self._shape = {
            "CHW": (channels, height, width),
            "HWC": (height, width, channels),
            "FLAT": (channels * height * width,),
        }[self._layout]
        outputs = [spec for spec in self.model.signature.outputs if spec.name != _TRANSFORM]
        transforms = [spec for spec in self.model.signature.outputs if spec.name == _TRANSFORM]
        if len(outputs) != 1:
            raise self.model.fault(
                "output",
                f"model '{self.model.signature.name}' must have exactly one output, and may have {_TRANSFORM} beside "
                f"it, got {', '.join(spec.name for spec in self.model.signature.outputs)}",
            )
        self._gives_transform = any(check_tensor(self.model, spec, ("FP32",), (4,)) for spec in transforms)
        output = check_tensor(self.model, outputs[0], ("FP32", "FP16", "UINT8"), self._shape)
        self._output, self._dtype = output.name, NUMPY_BY_DATATYPE[output.datatype]
        scale = parameters.number("scale", 1 / 255)
        mean, std = (
            parameters.numbers(key, default, size=channels) for key, default in (("mean", (0,)), ("std", (1,)))
        )
        if 0 in std:
            raise parameters.fault("std", ",".join(map(str, std)), "other than 0")
        for key in ("scale", "mean", "std"):
            if self._dtype == np.uint8 and key in self.model.parameters:
                raise parameters.fault(key, self.model.parameters[key], "left out for an output of UINT8")
        # scale * value / std - mean / std, one number per channel, along the channels of the layout.
        shape = (-1,) if self._layout == "HWC" else (-1, 1, 1)
        self._factor = (scale / np.array(std)).astype(np.float32).reshape(shape)
        self._offset = (-np.array(mean) / np.array(std)).astype(np.float32).reshape(shape)
