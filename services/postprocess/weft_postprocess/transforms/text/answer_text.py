"""The text that some token ids add to an answer of a language model, where only the last ids before them are known."""

from typing import NamedTuple

from weft_common.errors import InvalidArgumentError
from weft_postprocess.transforms.text.text_options import TextOptions
from weft_serving.detokenizer import Demand, Detokenizer, StopStrings, is_enough


class Before(NamedTuple):
    """What is known of the time before a response.

    Attributes:
        prompt_ids: The end of the prompt, whose text goes on; none if it is not known, or too far away.
        ids: The end of the answer, or all of it.
        num_missing: So many ids of the answer are before ``ids``.
    """

    prompt_ids: list[int]
    ids: list[int]
    num_missing: int

    @classmethod
    def of(cls, context_ids: list[int], num_previous: int) -> "Before":
        """Of the last ids of prompt and answer, ``num_previous`` of which all are the answer's."""
        num_prompt = max(0, len(context_ids) - num_previous)
        return cls(context_ids[:num_prompt], context_ids[num_prompt:], max(0, num_previous - len(context_ids)))


class AnswerText:
    """The text of an answer up to its first stop string.

    Args:
        detokenizer: Of the tokenizer.
        options: Of the request.
        before: Pushed already; a stop string that is complete there has stopped the text.
    """

    def __init__(self, detokenizer: Detokenizer, options: TextOptions, before: Before) -> None:
        self._text = detokenizer.stream(skip_special_tokens=options.skips_special_tokens, prompt_ids=before.prompt_ids)
        self._stop = StopStrings(options.stop)
        self._shows_stop = options.shows_stop
        self._num_exempt = max(0, options.min_tokens - before.num_missing)
        exempt, rest = self._split(before.ids)
        self._text.push(exempt)
        text = self._text.push(rest)
        # The first characters after a gap may be wrong, and must not look like a stop string.
        self._checked(text[max(0, len(text) - self._stop.max_kept_chars) :] if before.num_missing else text)

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string was met."""
        return self._stop.stopped_by is not None

    def push(self, ids: list[int]) -> str:
        """The text that is certain now; no stop string ends within the first ``min_tokens`` ids."""
        if self.is_stopped:
            return ""
        exempt, rest = self._split(ids)
        return self._text.push(exempt) + self._checked(self._text.push(rest))

    def finish(self) -> str:
        """The rest of the text."""
        return "" if self.is_stopped else self._checked(self._text.finish()) + self._stop.finish()

    def _split(self, ids: list[int]) -> tuple[list[int], list[int]]:
        """Those that no stop string ends in, and the others."""
        exempt, rest = ids[: self._num_exempt], ids[self._num_exempt :]
        self._num_exempt -= len(exempt)
        return exempt, rest

    def _checked(self, text: str) -> str:
        text = self._stop.push(text)
        return text + self._stop.stopped_by if self._shows_stop and self._stop.stopped_by else text


def added_text(
    detokenizer: Detokenizer, before: Before, ids: list[int], options: TextOptions, *, is_last: bool, is_ended: bool
) -> str:
    """The text that ``ids`` add.

    Args:
        detokenizer: Of the tokenizer.
        before: What is known of the time before.
        ids: The new ones.
        options: Of the request.
        is_last: Whether the answer ends with them.
        is_ended: Whether a stop string or its last token has ended it.

    Raises:
        InvalidArgumentError: The text depends on ids that are missing.
    """
    if before.num_missing:
        num_chars = StopStrings(options.stop).max_kept_chars
        if not is_enough(detokenizer, before.ids, ids, Demand(options.skips_special_tokens, num_chars, is_last)):
            raise InvalidArgumentError(
                f"the last {len(before.ids)} of {before.num_missing + len(before.ids)} token ids before a response are "
                f"too few for its text: the bytes of a character, or a stop string of up to {num_chars + 1} "
                "characters, may have begun before them; send more, or all with the end of the prompt before them"
            )
    text, is_stopped = _added(detokenizer, before, ids, options, is_last=is_last)
    if is_ended and not is_stopped and not options.shows_stop:  # then a token has ended it
        text, _ = _added(detokenizer, before, ids[:-1], options, is_last=True)
    return text


def _added(
    detokenizer: Detokenizer, before: Before, ids: list[int], options: TextOptions, *, is_last: bool
) -> tuple[str, bool]:
    """The text that ``ids`` add, and whether a stop string has ended it, now or before."""
    text = AnswerText(detokenizer, options, before)
    added = text.push(ids)
    if is_last:
        added += text.finish()
    return added, text.is_stopped
