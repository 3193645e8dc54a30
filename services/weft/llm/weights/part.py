"""A tensor of a checkpoint, as a model asks for it: ``Part``."""

from typing import NamedTuple


class Part(NamedTuple):
    """A tensor by its name in a Hugging Face folder; parts of a fused weight are concatenated along the first axis."""

    name: str
    shape: tuple[int, ...]
