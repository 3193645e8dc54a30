"""Every sample."""

from typing import Final

from tests.compat.graphs import (
    kserve_graphs,
    seldon1_graphs,
    seldon2_graphs,
    triton_basics,
    triton_language,
    triton_pictures,
    triton_programs,
    triton_refused,
    triton_shapes,
)
from tests.compat.graphs.shape import Shape

SHAPES: Final[list[Shape]] = [
    *triton_basics.SHAPES,
    *triton_pictures.SHAPES,
    *triton_language.SHAPES,
    *triton_programs.SHAPES,
    *triton_shapes.SHAPES,
    *triton_refused.SHAPES,
    *kserve_graphs.SHAPES,
    *seldon1_graphs.SHAPES,
    *seldon2_graphs.SHAPES,
]
