"""Tokenizers of model folders, in all the forms in which they are published, as ``tokenizers`` computes them."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from typing_extensions import override

from weft.backends.tokenizers.definition import TokenizerFile
from weft.backends.tokenizers.gguf import GgufTokenizerFile
from weft.backends.tokenizers.sentencepiece import SentencePieceFile
from weft.backends.tokenizers.tiktoken import TekkenFile, TiktokenFile
from weft.base.errors import InvalidArgumentError
from weft.llm.weights.parts import read_object
from weft.serving.backends.loading import require


class JsonFile(TokenizerFile):
    """``tokenizer.json``, which ``tokenizers`` reads as it is."""

    file_names: ClassVar[tuple[str, ...]] = ("tokenizer.json",)

    def __init__(self, path: Path, config: Mapping[str, Any]) -> None:
        super().__init__(path, config)
        added = (read_object(path) or {}).get("added_tokens")
        self.added_tokens = [one for one in added if isinstance(one, dict)] if isinstance(added, list) else []

    @override
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")


#: A new form is a class, and its place here: of several files in a folder the first is taken.
FORMS: tuple[type[TokenizerFile], ...] = (JsonFile, TekkenFile, TiktokenFile, SentencePieceFile, GgufTokenizerFile)
#: For messages about a folder without any.
FILE_NAMES = "tokenizer.json, tokenizer.model, tekken.json or *.tiktoken"


def find_tokenizer(folder: Path) -> TokenizerFile | None:
    """The tokenizer of a model's folder; None if it has none. Raises InvalidArgumentError for a wrong file."""
    for form in FORMS:
        for name in form.file_names:
            for path in sorted(folder.glob(name)):
                if path.is_file() and form.fits(path):
                    return form(path, read_object(folder / "tokenizer_config.json") or {})
    return None


def tokenizer_at(path: Path) -> TokenizerFile:
    """The tokenizer in a file of any form; of an unusual name it is taken for ``tokenizer.json``.

    Raises:
        InvalidArgumentError: The file is not of its form.
    """
    forms = (form for form in FORMS if any(path.match(name) for name in form.file_names) and form.fits(path))
    return next(forms, JsonFile)(path, read_object(path.parent / "tokenizer_config.json") or {})


def load_tokenizer(file: TokenizerFile, extra: str) -> Any:
    """The ``tokenizers.Tokenizer`` of a file; ``extra``: what of Weft installs that package.

    Raises:
        InvalidArgumentError: The file is not a tokenizer.
        UnavailableError: The package ``tokenizers`` is not installed.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its own thread pool would compete with threads of instances
    tokenizers = require("tokenizers", extra)
    try:
        return tokenizers.Tokenizer.from_str(file.text())
    except InvalidArgumentError:
        raise
    except Exception as error:  # tokenizers raises nothing more specific
        raise InvalidArgumentError(f"{file.path} is not a tokenizer: {error}") from error
