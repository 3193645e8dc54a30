"""``image``: encoded images to normalised pixel arrays."""

import io
import time
from typing import Any, ClassVar

import numpy as np

from weft_common.errors import InvalidArgumentError, WeftError
from weft_common.tensors import Array
from weft_serving.backends.base import Backend, Batch
from weft_serving.backends.loading import check_tensor, only_input, require
from weft_serving.backends.parameters import ParameterReader
from weft_serving.request import InferenceRequest, InferenceResponse, Outcome

_FORMATS = ("PNG", "JPEG", "WEBP", "BMP")
_CHANNELS = {"L": 1, "RGB": 3}
_RESAMPLING = ("nearest", "box", "bilinear", "hamming", "bicubic", "lanczos")
_PREFIX_BYTES = 16
# Pillow turns these into L or RGB without loss of range; 16-bit and float pixels it would clip.
_EIGHT_BIT_MODES = frozenset({"1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr"})


class ImageBackend(Backend):
    """Answers each encoded image with an array of pixels, resized, scaled and normalised.

    ::

        IMAGE BYTES [n, 1]  ->  PIXELS FP32 [n, *shape]
        pixels = (scale * value - mean[channel]) / std[channel]         value: 0 to 255

    Input and output may have any name. ``shape`` is [C, H, W], [H, W, C] or, for FLAT, [C * H * W] in the order of CHW;
    the output is declared with it. Transparency is dropped; of an animation the first frame is taken. The picture is
    stretched to ``width`` by ``height``.

    Parameters (``width`` and ``height`` required, the rest optional):
        width, height: Size of the result in pixels.
        mode: ``RGB`` (C = 3) or ``L`` (grayscale, C = 1). Default RGB.
        layout: ``CHW``, ``HWC`` or ``FLAT``. Default CHW.
        resample: ``nearest``, ``box``, ``bilinear``, ``hamming``, ``bicubic`` or ``lanczos``. Default bilinear.
        scale: Factor on the pixel value 0 to 255; a fraction such as 16/255 is allowed. Default 1/255.
        mean, std: One number, or one per channel with commas between, in units after ``scale``. Defaults 0 and 1.
        formats: Accepted formats out of PNG, JPEG, WEBP and BMP, commas between. Default PNG,JPEG.
        max_encoded_bytes: Larger files are refused, in bytes. Default 10485760.
        max_pixels: Images of more pixels (width times height) are refused before they are decoded. Default 16777216.

    What is no such image, is truncated or is over a limit is INVALID_ARGUMENT for its own request alone.
    """

    is_repeatable: ClassVar[bool] = True
    can_use_gpu: ClassVar[bool] = False

    def load(self) -> None:
        """Read the parameters and hold them against the declared tensors."""
        image = require("PIL.Image", "preprocess")
        image.init()
        self._input = only_input(self.model, ("BYTES",), (1,)).name
        parameters = ParameterReader(self.model)
        self._size = tuple(parameters.integer(key, 0, minimum=1, maximum=16384) for key in ("width", "height"))
        self._mode = parameters.choice("mode", "RGB", tuple(_CHANNELS))
        self._layout = parameters.choice("layout", "CHW", ("CHW", "HWC", "FLAT"))
        self._resample = image.Resampling[parameters.choice("resample", "bilinear", _RESAMPLING).upper()]
        self._scale = np.float32(parameters.number("scale", 1 / 255))
        self._mean = np.asarray(parameters.numbers("mean", (0.0,)), np.float32)
        self._std = np.asarray(parameters.numbers("std", (1.0,)), np.float32)
        formats = parameters.text("formats", "PNG,JPEG")
        self._max_encoded_bytes = parameters.integer("max_encoded_bytes", 10 * 2**20, minimum=1)
        self._max_pixels = parameters.integer("max_pixels", 2**24, minimum=1)
        parameters.finish()
        self._formats = {name: image.OPEN[name] for name in self._format_names(formats)}
        self._check_normalisation()
        self._check_output()

    def execute(self, batch: Batch) -> list[Outcome]:
        """Decode the images of each request."""
        batch.infer_start_ns = time.monotonic_ns()
        outcomes: list[Outcome] = []
        for request in batch.requests:
            try:
                outcomes.append(InferenceResponse({self._output: self._pixels(request)}))
            except WeftError as error:
                outcomes.append(error)
        batch.infer_end_ns = time.monotonic_ns()
        return outcomes

    def _pixels(self, request: InferenceRequest) -> Array:
        pixels = np.empty((request.num_rows, *self._shape), np.float32)
        for row, data in enumerate(request.array(self._input).ravel()):
            try:
                pixels[row] = self._transformed(self._decoded(data))
            except InvalidArgumentError as error:
                raise error.with_message(f"input '{self._input}' row {row}: {error.message}") from error
        return pixels if self.model.signature.max_batch_size else pixels[0]

    def _decoded(self, data: bytes) -> Any:
        """The picture, of the configured mode and size."""
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
            if (num_pixels := picture.width * picture.height) > self._max_pixels:
                raise InvalidArgumentError(
                    f"the image has {picture.width} x {picture.height} = {num_pixels} pixels; at most "
                    f"{self._max_pixels} are allowed"
                )
            if picture.mode not in _EIGHT_BIT_MODES:
                raise InvalidArgumentError(f"pixels of mode {picture.mode} are not supported; send 8 bits per channel")
            return picture.convert(self._mode).resize(self._size, self._resample)
        except (WeftError, MemoryError):
            raise
        except Exception as error:  # decoders raise many kinds on hostile bytes
            raise InvalidArgumentError(f"broken or truncated {name} image of {len(data)} bytes: {error}") from error

    def _transformed(self, picture: Any) -> Array:
        """Scaled, normalised and laid out, float32."""
        values = np.asarray(picture, np.float32).reshape(*self._size[::-1], _CHANNELS[self._mode])
        values = (values * self._scale - self._mean) / self._std
        return (values if self._layout == "HWC" else values.transpose(2, 0, 1)).reshape(self._shape)

    def _format_names(self, text: str) -> list[str]:
        names = [name.strip() for name in text.split(",")]
        if unknown := [name for name in names if name not in _FORMATS]:
            raise InvalidArgumentError(
                f"model '{self.model.signature.name}': parameter 'formats' must be some of {', '.join(_FORMATS)}, "
                f"got '{unknown[0]}'"
            )
        return names

    def _check_normalisation(self) -> None:
        channels = _CHANNELS[self._mode]
        for key, values in (("mean", self._mean), ("std", self._std)):
            if len(values) not in (1, channels) or (key == "std" and 0 in values):
                raise InvalidArgumentError(
                    f"model '{self.model.signature.name}': parameter '{key}' must be 1 or {channels} numbers"
                    f"{' other than 0' if key == 'std' else ''} for mode {self._mode}, got {values.tolist()}"
                )

    def _check_output(self) -> None:
        (width, height), channels = self._size, _CHANNELS[self._mode]
        self._shape = {
            "CHW": (channels, height, width),
            "HWC": (height, width, channels),
            "FLAT": (channels * height * width,),
        }[self._layout]
        outputs = self.model.signature.outputs
        if len(outputs) != 1:
            raise InvalidArgumentError(
                f"model '{self.model.signature.name}' must have exactly one output, got {len(outputs)}"
            )
        self._output = check_tensor(self.model, outputs[0], ("FP32",), self._shape).name
