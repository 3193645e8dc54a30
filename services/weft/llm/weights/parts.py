"""Names of a model's weights, and the checkpoint tensors that each is fused from.

Projections with the same input are fused into one weight, because one large matrix product is faster than several small
ones: queries, keys and values (``qkv_proj``), gate and up (``gate_up_proj``).
"""

import json
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from weft.base.errors import InvalidArgumentError

_Json = TypeVar("_Json", dict[str, Any], list[Any])
_NUM_LISTED = 5
EMBEDDING, FINAL_NORM, LM_HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
LAYERS = "model.layers."


class Part(NamedTuple):
    """A tensor by its name in a Hugging Face folder; parts of a fused weight are concatenated along the first axis.

    Attributes:
        stored: Its shape in the folder if all experts are in one tensor, ``[num_experts, in, out]`` of a weight and
            ``[num_experts, out]`` of biases; empty: ``shape``.
        is_paired: Each output of a gate is stored beside that of its up; in ``shape`` gates come before ups.
    """

    name: str
    shape: tuple[int, ...]
    stored: tuple[int, ...] = ()
    is_paired: bool = False

    def rows(self, of_experts: Any) -> Any:
        """The rows of a tensor ``[num_experts, out, ...]``, expert by expert, in the order of ``shape``."""
        if self.is_paired:
            of_experts = of_experts.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
        return of_experts.flatten(0, 1)


class Piece(NamedTuple):
    """Some rows and columns of a tensor, those that a rank has; by default all."""

    part: Part
    rows: tuple[slice, ...] = (slice(None),)
    columns: slice = slice(None)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the rows one after another."""
        num_rows = sum(len(range(*rows.indices(self.part.shape[0]))) for rows in self.rows)
        return (num_rows, *(len(range(*self.columns.indices(width))) for width in self.part.shape[1:]))

    @property
    def cuts(self) -> list[tuple[slice, ...]]:
        """Indices of the stored tensor that have it; empty: the whole tensor."""
        part = self.part
        if self.shape == part.shape:
            return []
        if part.stored:
            outputs = part.shape[0] // part.stored[0]
            return [(slice(rows.start // outputs, rows.stop // outputs),) for rows in self.rows]
        return [(rows, self.columns)[: len(part.shape)] for rows in self.rows]


def layer_prefix(index: int) -> str:
    """Prefix of the weight names of layer ``index``."""
    return f"{LAYERS}{index}."


def is_matrix(name: str) -> bool:
    """Whether the weight is a matrix, not the embedding, a norm or a bias."""
    return name.endswith("proj.weight") or name == LM_HEAD


def is_router(name: str) -> bool:
    """Whether the weight chooses experts or weighs a shared one: a matrix that is never rounded."""
    return name.endswith("gate.weight")


def is_of_experts(name: str) -> bool:
    """Whether the weight has the matrices or biases of all experts of a layer, one after another."""
    return ".experts." in name


def is_norm(name: str) -> bool:
    """Whether the weight belongs to a norm."""
    return name.endswith("norm.weight")


def bias_of(name: str) -> str:
    """Name of the bias beside the weight ``name``."""
    return name.removesuffix("weight") + "bias"


def fused_shape(parts: list[Part]) -> tuple[int, ...]:
    """Shape of the weight that the parts make up."""
    return (sum(part.shape[0] for part in parts), *parts[0].shape[1:])


def listed(names: list[str]) -> str:
    """For error messages: the first name, the number of others, and the verb."""
    more = f" and {len(names) - _NUM_LISTED} more" if len(names) > _NUM_LISTED else ""
    verb = "is" if len(names) == 1 else "are"
    return f"{', '.join(repr(name) for name in names[:_NUM_LISTED])}{more} {verb}"


#: Weights that are not read, and why.
_OTHER_WEIGHTS = {
    "*.bin": "pickles, which can run code and are not read; save them as safetensors",
    "*.pt*": "pickles, which can run code and are not read; save them as safetensors",
    "consolidated*": "Mistral's own form; take its files for transformers, config.json and model*.safetensors",
}


def other_weights(folder: Path) -> str:
    """For the message that a folder has no weights: which others it has, and why these are not read; "" if none."""
    found = (f"; its {name} are {why}" for name, why in _OTHER_WEIGHTS.items() if any(folder.glob(name)))
    return next(found, "")


def read_object(path: Path) -> dict[str, Any] | None:
    """Read a JSON file of a model's folder, which must be an object; None if there is no such file.

    Raises:
        InvalidArgumentError: It holds something else, or cannot be read.
    """
    return read_json(path, dict)


def read_json(path: Path, kind: type[_Json]) -> _Json | None:
    """As ``read_object``, of a file that must hold a ``kind``, dict or list.

    Raises:
        InvalidArgumentError: It holds something else, or cannot be read.
    """
    try:
        parsed = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InvalidArgumentError(f"{path} cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"{path} is not JSON: {error}") from error
    if not isinstance(parsed, kind):
        names = {dict: "object", list: "array"}
        raise InvalidArgumentError(f"{path} must hold a JSON {names[kind]}, got {type(parsed).__name__}")
    return parsed
