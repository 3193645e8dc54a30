"""Language models on several ranks: time of a step, with what the ranks send to one another, and memory of each.

Imports no torch.
"""

import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from weft.base.errors import NotFoundError
from weft.base.text.suggestion import suggestion
from weft.capacity.costs.language_model import LanguageModel
from weft.capacity.roofline import DeviceTarget, Timing
from weft.llm.models.fields import DTYPE_BYTES


@dataclass(frozen=True, slots=True)
class Link:
    """What connects the devices of a model's ranks.

    Attributes:
        bytes_per_s: That a rank receives in a collective operation.
        peak_bytes_per_s: Of the data sheet, one way.
        start_s, hop_s: Latency of an operation of few bytes: its start, and each rank that data pass.
        source: Origin of the numbers.
    """

    name: str
    bytes_per_s: float
    peak_bytes_per_s: float
    start_s: float
    hop_s: float
    source: str = ""

    def gather_s(self, num_bytes: float, num_ranks: int) -> float:
        """Time in which every rank receives ``num_bytes`` of each other one."""
        num_others = num_ranks - 1
        return self.start_s + num_others * (self.hop_s + num_bytes / self.bytes_per_s) if num_others else 0.0

    def send_s(self, num_bytes: float) -> float:
        """Time in which one rank receives ``num_bytes`` of another."""
        return self.start_s + self.hop_s + num_bytes / self.bytes_per_s


@cache
def known_links() -> dict[str, Link]:
    """The links of ``links.toml`` by name."""
    table = tomllib.loads(files("weft.capacity").joinpath("links.toml").read_text(encoding="utf-8"))
    return {
        name: Link(
            name,
            1e9 * one["gb_per_s"],
            1e9 * one["peak_gb_per_s"],
            1e-6 * one["start_us"],
            1e-6 * one["hop_us"],
            one["source"],
        )
        for name, one in table.items()
    }


def find_link(name: str) -> Link:
    """A known link. Raises NotFoundError, which names the known ones."""
    if (found := known_links().get(name)) is None:
        raise NotFoundError(
            f"link '{name}' is not known{suggestion(name, known_links())}; known: {', '.join(known_links())}"
        )
    return found


@dataclass(frozen=True)
class RankTarget:
    """A language model on the devices of its ranks, alike, one rank on each.

    Attributes:
        stages: What a rank of each stage of the pipeline has.
        link: Between all ranks.
    """

    target: DeviceTarget
    stages: Sequence[LanguageModel]
    link: Link

    def decode(self, num_sequences: int, context: int) -> tuple[Timing, float]:
        """Time of a token for each of ``num_sequences``, ``context`` tokens long, and what of it is exchange, seconds.

        Stages work at the same time, on as many micro-batches. Context ranks all do the same.
        """
        count = min(num_sequences, len(self.stages))
        rows = -(-num_sequences // count)
        return self._flow(count, lambda stage: self.target.decode(stage, rows, context), rows, rows)

    def prefill(self, num_tokens: int, context: int) -> tuple[Timing, float]:
        """Time of a step that computes ``num_tokens`` tokens of one prompt, up to ``context``; as ``decode`` returns.

        Stages have equal parts of the tokens, one after the other, and of each part every context rank its share.
        """
        count, num_ranks = min(num_tokens, len(self.stages)), self.stages[0].sizes.context
        rows = -(-num_tokens // count // num_ranks)
        middle = max(context - (num_tokens - rows) // 2, rows)  # as many tokens before a rank's as on average
        return self._flow(count, lambda stage: self.target.prefill(stage, rows, middle), rows, 1, is_prompt=True)

    def _flow(
        self,
        count: int,
        alone: Callable[[LanguageModel], Timing],
        rows: int,
        num_sampled: int,
        *,
        is_prompt: bool = False,
    ) -> tuple[Timing, float]:
        """``count`` micro-batches go through all stages, which work at the same time."""
        timings = [alone(stage) for stage in self.stages]
        exchanges = [self._exchange_s(stage, rows, num_sampled, is_prompt=is_prompt) for stage in self.stages]
        totals = [timing.seconds + exchange_s for timing, exchange_s in zip(timings, exchanges, strict=True)]
        slowest = max(range(len(totals)), key=totals.__getitem__)
        if sum(totals) >= count * totals[slowest]:
            seconds, exchange_s = sum(totals), sum(exchanges)
        else:
            seconds, exchange_s = count * totals[slowest], count * exchanges[slowest]
        bound = "exchange" if exchange_s > seconds / 2 else timings[slowest].bound
        return Timing(seconds, bound), exchange_s

    def _exchange_s(self, stage: LanguageModel, rows: int, num_sampled: int, *, is_prompt: bool) -> float:
        """Of one micro-batch in a stage: sums over tensor ranks, logits, keys and values, and on to the next stage."""
        sizes, link, item = stage.sizes, self.link, DTYPE_BYTES[stage.engine.dtype]
        hidden_bytes = rows * stage.config.hidden_size * item
        is_first, is_last = (True, True) if stage.stage is None else (stage.stage.is_first, stage.stage.is_last)
        total_s = (2 * stage.num_layers + is_first) * link.gather_s(hidden_bytes, sizes.tensor)
        if stage.num_head:
            total_s += link.gather_s(num_sampled * stage.config.vocab_size * 4, sizes.tensor)
        if is_prompt:
            layer_bytes = rows * stage.kv_bytes_per_token / stage.num_layers
            total_s += stage.num_layers * link.gather_s(layer_bytes, sizes.context)
        return total_s if is_last else total_s + link.send_s(hidden_bytes)
