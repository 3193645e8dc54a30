"""Requests to a cluster: prompts as chains of blocks, so that equal beginnings are seen, and when they arrive."""

import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

#: Tokens of a block in generated workloads; a chain of blocks stands for a prompt.
BLOCK = 128


@dataclass(slots=True, eq=False)
class Request:
    """A prompt and the length of its answer.

    Attributes:
        blocks: Names of the full blocks of prompt and answer, each of which stands for all tokens up to its end; those
            of an answer only where a later prompt continues it.
        key: Of the session or the group, for policies that take one.
        block_tokens: Of each block.
        first_s, end_s: Times of the first and the last token, once they are there.
        num_cached: Tokens of the prompt that were not computed.
    """

    arrival_s: float
    num_prompt: int
    num_output: int
    blocks: tuple[int, ...] = ()
    key: str = ""
    block_tokens: int = BLOCK
    num_cached: int = 0
    first_s: float = 0.0
    end_s: float = 0.0

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        return self.first_s - self.arrival_s

    @property
    def tpot_s(self) -> float:
        """Mean time of each further token."""
        return (self.end_s - self.first_s) / max(self.num_output - 1, 1)


def poisson(rate_per_s: float, num: int, seed: int) -> Iterator[float]:
    """Arrival times, seconds."""
    draw, now_s = random.Random(seed), 0.0
    for _ in range(num):
        now_s += draw.expovariate(rate_per_s)
        yield now_s


def fixed_lengths(rate_per_s: float, num: int, num_prompt: int, num_output: int, seed: int = 1) -> list[Request]:
    """Independent requests of one length."""
    return [Request(at_s, num_prompt, num_output) for at_s in poisson(rate_per_s, num, seed)]


def drawn_lengths(rate_per_s: float, num: int, mean_prompt: int, mean_output: int, seed: int = 1) -> list[Request]:
    """Independent requests whose lengths are log-normal (sigma 0.8), as those of chats are."""
    draw = random.Random(f"{seed} lengths")
    lengths = [
        [max(int(mean * draw.lognormvariate(-0.32, 0.8)), 1) for _ in range(num)] for mean in (mean_prompt, mean_output)
    ]
    return [Request(at_s, *pair) for at_s, *pair in zip(poisson(rate_per_s, num, seed), *lengths, strict=True)]


def sessions(
    rate_per_s: float,
    num: int,
    *,
    num_prompts: int = 64,
    system: int = 1024,
    turn: int = 256,
    output: int = 200,
    num_turns: int = 5,
    pause_s: float = 30.0,
    skew: float = 1.0,
    seed: int = 1,
) -> list[Request]:
    """Chats of several turns, each of which begins with one of ``num_prompts`` system prompts.

    A turn's prompt is all that was said before and ``turn`` tokens more.

    Args:
        rate_per_s: Of all turns together.
        system, turn, output: Tokens.
        num_turns: Of a session.
        skew: Exponent of how often system prompts are used, by rank (Zipf); 0: all alike.
        pause_s: Mean time from an answer to the next turn; from one turn to the next, the answer is not waited for.
    """
    draw, names = random.Random(seed), count(num_prompts << 20)
    weights = [(rank + 1) ** -skew for rank in range(num_prompts)]
    found: list[Request] = []
    begins = poisson(rate_per_s / num_turns, 2 * -(-num // num_turns), seed)  # so that none is missing at the end
    for session, begin_s in enumerate(begins):
        (group,) = draw.choices(range(num_prompts), weights)
        chain = [(group << 20) + index for index in range(system // BLOCK)]
        num_tokens, at_s = system, begin_s
        for _ in range(num_turns):
            num_tokens += turn
            chain += [next(names) for _ in range((num_tokens + output) // BLOCK - len(chain))]
            found.append(Request(at_s, num_tokens, output, tuple(chain), f"session-{session}"))
            num_tokens += output
            at_s += draw.expovariate(1 / pause_s)
    return sorted(found, key=lambda request: request.arrival_s)[:num]


def read_mooncake(path: Path, *, speed: float = 1.0, num_output: int = 0) -> list[Request]:
    """A trace that Mooncake published (``FAST25-release/traces``): blocks of 512 tokens, times in milliseconds.

    Args:
        speed: Arrivals come so many times as fast.
        num_output: In place of the trace's lengths of answers.
    """
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        one = json.loads(line)
        output = num_output or max(one["output_length"], 1)
        blocks = tuple(one["hash_ids"][: one["input_length"] // 512])
        found.append(Request(one["timestamp"] / 1e3 / speed, one["input_length"], output, blocks, str(blocks[:1]), 512))
    return sorted(found, key=lambda request: request.arrival_s)


def copies(requests: Iterable[Request]) -> list[Request]:
    """Equal requests without results, for another run."""
    return [
        Request(one.arrival_s, one.num_prompt, one.num_output, one.blocks, one.key, one.block_tokens)
        for one in requests
    ]
