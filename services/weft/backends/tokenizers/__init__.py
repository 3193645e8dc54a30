"""Tokenizers of model folders, in all the forms in which they are published, as ``tokenizers`` computes them."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from weft.backends.tokenizers.definition import Definition
from weft.backends.tokenizers.gguf import read_gguf
from weft.backends.tokenizers.sentencepiece import read_sentencepiece
from weft.backends.tokenizers.tiktoken import read_tekken, read_tiktoken
from weft.base.errors import InvalidArgumentError, WeftError
from weft.llm.weights.parts import read_object
from weft.serving.backends.loading import require

__all__ = ["FILE_NAMES", "Definition", "find_tokenizer", "load_tokenizer", "tokenizer_at"]


def _read_json(path: Path, config: Mapping[str, Any]) -> Definition:
    added = (read_object(path) or {}).get("added_tokens")
    tokens = [one for one in added if isinstance(one, dict)] if isinstance(added, list) else []
    return Definition(path, config, tokens, lambda library: library.Tokenizer.from_str(path.read_text("utf-8")))


#: Patterns of file names, in the order in which a folder is searched. A new form is a module, and a line here.
_FORMS: dict[str, Callable[[Path, Mapping[str, Any]], Definition | None]] = {
    "tokenizer.json": _read_json,
    "tekken.json": read_tekken,
    "*.tiktoken": read_tiktoken,
    "tokenizer.model": read_sentencepiece,
    "*.gguf": read_gguf,
}
FILE_NAMES = ", ".join(_FORMS)


def find_tokenizer(folder: Path) -> Definition | None:
    """The tokenizer of a model's folder; None if it has none. Raises InvalidArgumentError for a wrong file."""
    files = (path for name in _FORMS for path in sorted(folder.glob(name)) if path.is_file())
    path = next(files, None)
    return None if path is None else _read(path)


def tokenizer_at(path: Path) -> Definition:
    """The tokenizer in a file; of an unusual name it is taken for ``tokenizer.json``. Raises InvalidArgumentError."""
    if (definition := _read(path)) is None:
        raise InvalidArgumentError(f"{path} has no tokenizer; put the model's tokenizer.json beside it, and name that")
    return definition


def _read(path: Path) -> Definition | None:
    read = next((form for name, form in _FORMS.items() if path.match(name)), _read_json)
    return read(path, read_object(path.parent / "tokenizer_config.json") or {})


def load_tokenizer(definition: Definition, extra: str) -> Any:
    """The ``tokenizers.Tokenizer`` of a definition; ``extra``: what of Weft installs that package.

    Raises:
        InvalidArgumentError: The file is not a tokenizer.
        UnavailableError: The package ``tokenizers`` is not installed.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its own thread pool would compete with threads of instances
    library = require("tokenizers", extra)
    try:
        return definition.build(library)
    except WeftError:
        raise
    except Exception as error:  # tokenizers raises nothing more specific
        raise InvalidArgumentError(f"{definition.path} is not a tokenizer: {error}") from error
