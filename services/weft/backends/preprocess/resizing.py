"""Image placement: which part of an image maps to which part of the result."""

from typing import Any, NamedTuple

# Pillow resizes horizontally first, into an image of the result's width and the old height: for one of 1 x 16777216
# pixels and a result of 224 x 224 that would be 15 GB.
_MAX_INTERMEDIATE_PIXELS = 2**24


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
