"""Incremental text of a generation, given only the last token ids before the new ones."""

from typing import NamedTuple

from weft.backends.postprocess.text.text_options import TextOptions
from weft.base.errors import InvalidArgumentError
from weft.serving.detokenizer import Demand, Detokenizer, StopStrings, is_enough


class DecodeContext(NamedTuple):
    """Token ids before a response.

    Attributes:
        prompt_ids: The end of the prompt, which the text continues; empty if unknown or too far away.
        ids: The end of the output, or all of it.
        num_missing: Number of output ids before ``ids``.
    """

    prompt_ids: list[int]
    ids: list[int]
    num_missing: int

    @classmethod
    def from_ids(cls, context_ids: list[int], num_previous: int) -> "DecodeContext":
        """Split the last ids of prompt and output; the output has ``num_previous`` ids in total."""
        num_prompt = max(0, len(context_ids) - num_previous)
        return cls(context_ids[:num_prompt], context_ids[num_prompt:], max(0, num_previous - len(context_ids)))


class GeneratedText:
    """The text of a generation up to its first stop string.

    Args:
        detokenizer: Detokenizer of the model.
        options: Text options of the request.
        context: Ids before the new ones; a complete stop string in their text has ended the generation.
    """

    def __init__(self, detokenizer: Detokenizer, options: TextOptions, context: DecodeContext) -> None:
        self._text = detokenizer.stream(skip_special_tokens=options.skips_special_tokens, prompt_ids=context.prompt_ids)
        self._stop = StopStrings(options.stop)
        self._shows_stop = options.shows_stop
        self._num_exempt = max(0, options.min_tokens - context.num_missing)
        exempt, rest = self._split(context.ids)
        self._text.push(exempt)
        text = self._text.push(rest)
        # The first characters after a gap may be wrong, and must not match a stop string.
        self._checked(text[max(0, len(text) - self._stop.max_kept_chars) :] if context.num_missing else text)

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string was found."""
        return self._stop.stopped_by is not None

    def push(self, ids: list[int]) -> str:
        """The text that is final so far; no stop string may end within the first ``min_tokens`` ids."""
        if self.is_stopped:
            return ""
        exempt, rest = self._split(ids)
        return self._text.push(exempt) + self._checked(self._text.push(rest))

    def finish(self) -> str:
        """The rest of the text."""
        return "" if self.is_stopped else self._checked(self._text.finish()) + self._stop.finish()

    def _split(self, ids: list[int]) -> tuple[list[int], list[int]]:
        """Split off the ids within ``min_tokens``, in which no stop string may end."""
        exempt, rest = ids[: self._num_exempt], ids[self._num_exempt :]
        self._num_exempt -= len(exempt)
        return exempt, rest

    def _checked(self, text: str) -> str:
        text = self._stop.push(text)
        return text + self._stop.stopped_by if self._shows_stop and self._stop.stopped_by else text


def new_text(
    detokenizer: Detokenizer,
    context: DecodeContext,
    ids: list[int],
    options: TextOptions,
    *,
    is_last: bool,
    is_ended: bool,
) -> str:
    """The text that ``ids`` add.

    Args:
        detokenizer: Detokenizer of the model.
        context: Ids before the new ones.
        ids: The new ids.
        options: Text options of the request.
        is_last: Whether they are the last ids.
        is_ended: Whether a stop string or a stop token ended the generation.

    Raises:
        InvalidArgumentError: The text depends on missing ids.
    """
    if context.num_missing:
        num_chars = StopStrings(options.stop).max_kept_chars
        if not is_enough(detokenizer, context.ids, ids, Demand(options.skips_special_tokens, num_chars, is_last)):
            raise InvalidArgumentError(
                f"the last {len(context.ids)} of {context.num_missing + len(context.ids)} token ids before a response "
                f"are too few for its text: the bytes of a character, or a stop string of up to {num_chars + 1} "
                "characters, may have begun before them; send more, or all with the end of the prompt before them"
            )
    text, is_stopped = _new_text(detokenizer, context, ids, options, is_last=is_last)
    if is_ended and not is_stopped and not options.shows_stop:  # then a stop token ended it
        text, _ = _new_text(detokenizer, context, ids[:-1], options, is_last=True)
    return text


def _new_text(
    detokenizer: Detokenizer, context: DecodeContext, ids: list[int], options: TextOptions, *, is_last: bool
) -> tuple[str, bool]:
    """The text that ``ids`` add, and whether a stop string has ended it, now or earlier."""
    text = GeneratedText(detokenizer, options, context)
    added = text.push(ids)
    if is_last:
        added += text.finish()
    return added, text.is_stopped
