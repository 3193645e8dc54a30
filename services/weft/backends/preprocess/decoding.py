"""Image decoding with limits that are checked before any pixel is decoded."""

import io
import struct
from collections.abc import Sequence
from typing import Any

from weft.base.errors import InvalidArgumentError, WeftError
from weft.serving.backends.loading import require

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


class ImageDecoder:
    """Decodes files of a few formats.

    Args:
        formats: Some of ``FORMATS``; other data never reaches a decoder.
        max_encoded_bytes: Size limit of a file.
        max_pixels: Limit of width times height, as declared in the header.
        applies_orientation: Whether to apply the EXIF orientation.
    """

    def __init__(
        self, formats: Sequence[str], *, max_encoded_bytes: int, max_pixels: int, applies_orientation: bool
    ) -> None:
        image = require("PIL.Image", "preprocess")
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
