"""Trains Medusa heads for a model's folder on a user's text; torch is imported when ``train_heads`` runs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from weft.base.errors import AlreadyExistsError, InvalidArgumentError, NotFoundError

_TOKENS_SUFFIX = ".npy"
#: Tokenizing takes about 40 bytes of memory for each byte of text.
_MAX_TEXT_BYTES = 2**26


class HeadRow(NamedTuple):
    """Accuracy of one head on held-out text; shares from 0 to 1.

    Attributes:
        top_1, top_3, top_5: The text's token is among its 1, 3 or 5 likeliest.
        agreement: Its likeliest token is the model's.
        overlap: Shared probability of its distribution and the model's.
    """

    top_1: float
    top_3: float
    top_5: float
    agreement: float
    overlap: float


class HeadReport(NamedTuple):
    """Result of a training.

    Attributes:
        num_tokens: Tokens of the text that were used.
    """

    output: Path
    num_tokens: int
    heads: list[HeadRow]


def train_heads(
    folder: Path,
    data: Path,
    output: Path,
    *,
    max_tokens: int = 131072,
    device: str = "cpu",
    force: bool = False,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
    **training: Any,
) -> HeadReport:
    """Train heads on the model of a folder and write them; nothing is written if anything fails.

    Args:
        folder: A Hugging Face folder; with ``tokenizer.json``, unless ``data`` has token ids.
        data: UTF-8 text, or a ``.npy`` file with a 1-D array of token ids. Its last tenth is held out.
        output: Gets ``medusa_heads.safetensors`` and ``medusa_heads.json``.
        max_tokens: Of a longer text, what lies beyond is not used.
        force: Write over heads that exist.
        on_step: Called after each step of the optimizer with its number from 1 and its loss in nats.
        training: Fields of ``HeadTraining``.

    Raises:
        AlreadyExistsError: There are heads in ``output``, and ``force`` is false.
        NotFoundError: A file is missing.
        InvalidArgumentError: The folder has no model that can be served, the text is too short, too long or no text,
            or an argument is out of its range.
        OSError: A file cannot be read or written.
    """
    import torch  # noqa: PLC0415  # seconds, and other commands do without

    from weft.llm.models.model import TransformerModel  # noqa: PLC0415
    from weft.llm.models.registry import read_config  # noqa: PLC0415
    from weft.llm.models.weights import load_folder, numbers_of  # noqa: PLC0415
    from weft.llm.speculation import head_training  # noqa: PLC0415
    from weft.llm.speculation.medusa import DESCRIPTION_FILENAME, MedusaHeads, fingerprint  # noqa: PLC0415
    from weft.llm.weights.parts import EMBEDDING, LM_HEAD  # noqa: PLC0415

    settings = head_training.HeadTraining(**training)
    if not force and (output / DESCRIPTION_FILENAME).exists():
        raise AlreadyExistsError(f"{output / DESCRIPTION_FILENAME} exists; nothing was done. --force writes over it")
    if device.partition(":")[0] == "cuda" and not torch.cuda.is_available():
        raise InvalidArgumentError(f"device must be cpu on this machine, which has no GPU for torch, got {device!r}")
    config = read_config(folder)
    token_ids = _token_ids(folder, data, config.vocab_size)[:max_tokens]
    own = fingerprint(folder)
    weights = load_folder(folder, config, dtype=torch.float32, device=device)
    lm_head = numbers_of(weights[EMBEDDING if config.tie_word_embeddings else LM_HEAD])
    embedding = numbers_of(weights[EMBEDDING]) * config.embedding_scale
    model = TransformerModel(config, weights, dtype=torch.float32, device=device)
    heads, accuracies = head_training.train_heads(model, embedding, lm_head, token_ids, settings, on_step)
    rows = [HeadRow._make((*each.top_k, each.agreement, each.overlap)) for each in accuracies]
    facts = {"num_training_tokens": len(token_ids), "held_out": [row._asdict() for row in rows]}
    MedusaHeads(heads, own).save(output, facts)
    return HeadReport(output, len(token_ids), rows)


def _token_ids(folder: Path, data: Path, vocab_size: int) -> npt.NDArray[np.int64]:
    if not data.is_file():
        raise NotFoundError(f"no file {data}; --data takes a text, or token ids in a {_TOKENS_SUFFIX} file")
    return _saved_ids(data, vocab_size) if data.suffix == _TOKENS_SUFFIX else _text_ids(folder, data)


def _saved_ids(data: Path, vocab_size: int) -> npt.NDArray[np.int64]:
    try:
        ids = np.load(data, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise InvalidArgumentError(f"{data} is no array of numpy: {error}") from error
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise InvalidArgumentError(f"{data} must have a 1-D array of token ids, got {ids.dtype} {list(ids.shape)}")
    is_wrong = (ids < 0) | (ids >= vocab_size)
    if is_wrong.any():
        raise InvalidArgumentError(
            f"{data}: token ids of this model are 0 to {vocab_size - 1}, got {ids[is_wrong.argmax()]} at index "
            f"{is_wrong.argmax()}; use the model's own tokenizer"
        )
    return np.asarray(ids, np.int64)


def _text_ids(folder: Path, data: Path) -> npt.NDArray[np.int64]:
    from weft.backends.llm.text import TextCodec  # noqa: PLC0415  # loads the tokenizer's library

    if (num_bytes := data.stat().st_size) > _MAX_TEXT_BYTES:
        raise InvalidArgumentError(
            f"{data} must have at most {_MAX_TEXT_BYTES} bytes, got {num_bytes}; give a part of it, or token ids in a "
            f"{_TOKENS_SUFFIX} file"
        )
    text = data.read_bytes()
    codec = TextCodec.from_folder(folder, len(text))
    if codec is None:
        raise NotFoundError(
            f"no tokenizer in {folder}; give token ids, a 1-D array in a {_TOKENS_SUFFIX} file, as --data"
        )
    ids = codec.ids(text, str(data), adds_special_tokens=False, parses_special_tokens=False)[1]
    return np.asarray(ids, np.int64)
