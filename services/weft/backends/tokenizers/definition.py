"""What a tokenizer's file says, whatever its form."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from weft.base.errors import InvalidArgumentError

#: Most tokens, and characters of one: the time for merges grows with its square.
MAX_TOKENS, _MAX_TOKEN_CHARS = 2**21, 1024
#: Digits of an id: more are no 32-bit number.
_MAX_ID_DIGITS = 9


class Definition(NamedTuple):
    """A tokenizer as a file defines it.

    Attributes:
        config: ``tokenizer_config.json``, completed with what the file says of the same fields.
        added_tokens: Those found in a text before it is split, as in ``tokenizer.json``.
        build: Makes the tokenizer, given the package ``tokenizers``; takes seconds for a large vocabulary.
    """

    path: Path
    config: Mapping[str, Any]
    added_tokens: list[dict[str, Any]]
    build: Callable[[Any], Any]


def fault(path: Path, what: str) -> InvalidArgumentError:
    """Error about a tokenizer's file."""
    return InvalidArgumentError(
        f"{path} is not a tokenizer: {what}; fetch it again, or put the model's tokenizer.json beside it"
    )


def define(
    path: Path,
    config: Mapping[str, Any],
    said: Mapping[str, Any],
    tokens: Sequence[str],
    build: Callable[[Mapping[str, Any], Any], Any],
    *,
    special_ids: Iterable[int],
    symbol_ids: Iterable[int] = (),
    is_normalized: bool = False,
) -> Definition:
    """Put together what a file and the ``tokenizer_config.json`` beside it say.

    Args:
        config: The second, which takes precedence over ``said``, its fields in the file.
        build: Makes a tokenizer without added tokens, given all fields and the package.
        special_ids: Of tokens that are no text.
        symbol_ids: Of tokens that are found in a text before it is split, if ``is_normalized`` in the normalized text.

    Raises:
        InvalidArgumentError: There are too many tokens or too long ones, one has no text or that of another, or a
            field is wrong.
    """
    if len(tokens) > MAX_TOKENS or (longest := max(map(len, tokens), default=0)) > _MAX_TOKEN_CHARS:
        allowed = f"at most {MAX_TOKENS} tokens of {_MAX_TOKEN_CHARS} characters"
        raise fault(path, f"{allowed} are read, got {len(tokens)}, the longest of {longest}")
    if not all(tokens) or len(set(tokens)) != len(tokens):
        raise fault(path, "each token must have a text of its own")
    merged = {**said, **{name: value for name, value in config.items() if value is not None}}
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    added = {each: {**plain, "content": tokens[each], "normalized": is_normalized} for each in symbol_ids}
    added |= {each: {**plain, "content": tokens[each], "special": True} for each in special_ids}
    own = merged.get("added_tokens_decoder")
    for number, token in (own if isinstance(own, dict) else {}).items():
        is_id = number.isdecimal() and len(number) <= _MAX_ID_DIGITS
        if not is_id or not isinstance(token, dict) or not isinstance(token.get("content"), str):
            raise fault(path, f"tokenizer_config.json has no content for token {number:.80} of added_tokens_decoder")
        added[int(number)] = plain | {name: token[name] for name in ("content", *plain) if name in token}
    listed = [{"id": number, **added[number]} for number in sorted(added)]
    return Definition(path, merged, listed, partial(_built, path, merged, listed, build))


def _built(path: Path, config: Mapping[str, Any], added: list[dict[str, Any]], build: Any, library: Any) -> Any:
    tokenizer = build(config, library)
    tokenizer.add_tokens(
        [library.AddedToken(**{name: value for name, value in token.items() if name != "id"}) for token in added]
    )
    for token in added:
        if (got := tokenizer.token_to_id(token["content"])) != token["id"]:
            raise fault(path, f"token {token['content']!r} must have id {token['id']}, and gets {got}: ids have gaps")
    texts = [_text_of(config.get(name)) if config.get(f"add_{name}") else "" for name in ("bos_token", "eos_token")]
    ids = {text: tokenizer.token_to_id(text) for text in texts if text}
    if None in ids.values():
        raise fault(path, f"it lacks {' or '.join(map(repr, ids))}, with which a text begins or ends")
    single = [*texts[:1], "$A", *texts[1:]]
    tokenizer.post_processor = library.processors.TemplateProcessing(
        single=[each for each in single if each],
        pair=[each for each in (*single, "$B:1") if each],
        special_tokens=list(ids.items()),
    )
    return tokenizer


def _text_of(token: Any) -> str:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""


def merges_of(tokens: Iterable[str], known: Collection[str]) -> list[tuple[str, str]]:
    """Every pair of ``known`` tokens that makes one of ``tokens``, which come in the order in which they are made."""
    return [
        (token[:at], token[at:])
        for token in tokens
        for at in range(1, len(token))
        if token[:at] in known and token[at:] in known
    ]
