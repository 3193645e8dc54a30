"""Sampling parameters that affect detokenization, and the tokenizer's file."""

import json
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from weft.base.errors import InvalidArgumentError
from weft.serving.backends.base import ModelContext
from weft.serving.backends.loading import model_file, require


class TextOptions(NamedTuple):
    """Options of detokenization; names and defaults are vLLM's.

    Attributes:
        stop: Stop strings.
        shows_stop: ``include_stop_str_in_output``.
        skips_special_tokens: Whether to omit tokens such as ``</s>``.
        min_tokens: Tokens in which no stop string may end.
    """

    stop: tuple[str, ...] = ()
    shows_stop: bool = False
    skips_special_tokens: bool = True
    min_tokens: int = 0

    @classmethod
    def from_json(cls, text: bytes) -> "TextOptions":
        """Parse the options in ``sampling_parameters``.

        Raises:
            InvalidArgumentError: ``text`` is not a JSON object, or a member is invalid.
        """
        try:
            members = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InvalidArgumentError(f"the sampling parameters are no JSON: {error}") from None
        if not isinstance(members, dict):
            raise InvalidArgumentError(f"the sampling parameters must be a JSON object, got {text[:40]!r}")
        return cls.from_members(members)

    @classmethod
    def from_members(cls, members: Mapping[str, Any]) -> "TextOptions":
        """Select and validate the options among ``members``; others belong to the model.

        Raises:
            InvalidArgumentError: A member is invalid.
        """
        if members.get("n", 1) != 1:
            raise InvalidArgumentError(
                f"'n' must be 1 where the text is made of token ids alone, got {_shown(members['n'])}; send the "
                "request as often as answers are wanted"
            )
        min_tokens = members.get("min_tokens", 0)
        if type(min_tokens) is not int or min_tokens < 0:
            raise InvalidArgumentError(f"'min_tokens' must be a whole number from 0, got {_shown(min_tokens)}")
        return cls(
            _stop(members.get("stop") or []),
            _flag(members, "include_stop_str_in_output", False),
            _flag(members, "skip_special_tokens", True),
            min_tokens,
        )


def _stop(value: object) -> tuple[str, ...]:
    stop = [value] if isinstance(value, str) else value
    if not isinstance(stop, list) or not all(isinstance(each, str) and each for each in stop):
        raise InvalidArgumentError(f"'stop' must be a string or a list of strings, none empty, got {_shown(value)}")
    return tuple(stop)


def _flag(members: Mapping[str, Any], name: str, default: bool) -> bool:
    value = members.get(name, default)
    if not isinstance(value, bool):
        raise InvalidArgumentError(f"'{name}' must be true or false, got {_shown(value)}")
    return value


def _shown(value: object) -> str:
    return json.dumps(value)[:80]


def read_tokenizer(model: ModelContext) -> Any:
    """Load the ``tokenizers.Tokenizer`` in the version folder: ``tokenizer.json``, or ``default_model_filename``.

    Raises:
        InvalidArgumentError: The file is not a tokenizer.
        NotFoundError: It does not exist.
        UnavailableError: The package is not installed.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # instance threads are the parallelism
    path = model_file(model, "tokenizer.json")
    tokenizers = require("tokenizers", "postprocess")
    try:
        return tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # tokenizers raises nothing more specific
        raise InvalidArgumentError(f"{path} is not a tokenizer: {error}") from error
