"""Balancing by prefixes: a prompt goes to the replica that has computed most of it before, unless that is busy.

Which blocks a replica has cached is a matter of tokens, and prompts mostly come as text, which only the model
tokenizes. So the router remembers what it sent where, by the bytes of prompts as they come. What a replica has evicted
since costs little: then no other is likely to have it either.
"""

import random
import re
from collections import Counter, OrderedDict
from collections.abc import Collection, Sequence
from hashlib import blake2b
from math import ceil
from statistics import fmean
from typing import TYPE_CHECKING, Any

from weft.router.targets.balancing.rule import ReplicaT, least_outstanding, scores

if TYPE_CHECKING:
    from weft.base.core import InferCall, InferResult
    from weft.base.tensors import WireTensor

#: A replica has room up to so many times the mean of the calls in flight, and for so many whatever the mean. Of 1.25,
#: 1.5 and 2, and 1, 2 and 4, these gave the shortest times to the first token over light and heavy loads.
MAX_SHARE, MIN_ROOM = 1.5, 2
#: Inputs that hold prompts: token ids, or a text.
PROMPTS = ("input_ids", "text_input")
#: Bytes of a piece, about 64 tokens, and most pieces of a prompt: what follows does not count.
PIECE_BYTES, MAX_PIECES = 256, 512
#: Pieces that are remembered: 16 MiB of prompts, in 25 MB of memory; the least recently used go first.
MAX_REMEMBERED = 65_536
_MAX_ADDRESSES = 4096
#: When so many pieces were new to a replica, all counts are halved: a million tokens.
_MAX_NEW = 16_384
_LORA = re.compile(rb'"lora_name"\s*:\s*"((?:[^"\\]|\\.)*)"')


class Prompt:
    """A prompt as the rule sees it, and what it found.

    Attributes:
        pieces: Hashes of its whole pieces, each over model, adapter, salt and all bytes up to its end.
        home: Key of its first piece, equal in all processes.
        size: Bytes.
        expected, sent: Bytes that the chosen replica had got before, and when, as a number of prompts.
    """

    __slots__ = ("expected", "home", "pieces", "sent", "size")

    def __init__(self, pieces: list[int], home: str, size: int) -> None:
        self.pieces, self.home, self.size = pieces, home, size
        self.expected = self.sent = 0


def read_prompt(call: "InferCall") -> Prompt | None:
    """The prompt of a call; None: it has none, or one of less than a piece."""
    tensor = next((call.inputs[name] for name in PROMPTS if name in call.inputs), None)
    if tensor is None:
        return None
    data, start = tensor.data, 4 if tensor.datatype == "BYTES" else 0  # behind the length of the text
    end = start + min((len(data) - start) // PIECE_BYTES, MAX_PIECES) * PIECE_BYTES
    if end <= start:
        return None
    sampling = call.inputs.get("sampling_parameters")
    adapter = None if sampling is None else _LORA.search(sampling.data)
    apart = (
        call.model_name,
        call.model_version,
        call.parameters.get("cache_salt", ""),
        adapter.group(1) if adapter else b"",
    )
    pieces, before = [], hash(apart)
    for at in range(start, end, PIECE_BYTES):
        before = hash((before, bytes(data[at : at + PIECE_BYTES])))
        pieces.append(before)
    home = blake2b(repr(apart).encode(errors="surrogatepass"), digest_size=8)
    home.update(data[start : start + PIECE_BYTES])
    return Prompt(pieces, home.hexdigest(), len(data) - start)


class PrefixRule:
    """Of the replicas with room, the one that was sent most of the prompt; of several, that with fewest calls.

    Room is bounded twice. A replica has at most ``MAX_SHARE`` times the mean of the calls in flight, or ``MIN_ROOM``.
    And while more pieces than the mean and this prompt were new to it of late, it gets no prompt of which it knows less
    than half: else a system prompt that all send would bring all sessions to one cache. A prompt whose beginning
    is new goes to the first in its rendezvous order, so that routers that know nothing of one another agree. What has
    no prompt goes where ``least_outstanding`` says.

    Source:
        V. Mirrokni, M. Thorup, M. Zadimoghaddam, "Consistent hashing with bounded loads", SODA 2018; the memory of
        what was sent where is that of SGLang's router and of llm-d's approximate prefix scorer.

    Attributes:
        outcomes: Prompts that went to a replica with ``most`` of them, elsewhere because of ``load``, and ``new`` ones.
    """

    def __init__(self, generator: random.Random, *, max_remembered: int = MAX_REMEMBERED) -> None:
        self._generator = generator
        self._otherwise = least_outstanding(generator)
        self._max_remembered = max_remembered
        #: When each piece was last sent to which address; the least recently used piece first.
        self._sent: OrderedDict[int, dict[str, int]] = OrderedDict()
        self._num_prompts = 0
        #: Pieces that were new to each address, of late.
        self._num_new: Counter[str] = Counter()
        #: What was sent to an address until then, it has no more.
        self._lost: dict[str, int] = {}
        self.outcomes = Counter(most=0, load=0, new=0)

    def __call__(self, replicas: Sequence[ReplicaT], key: Any) -> ReplicaT:
        """See ``Rule``; ``key`` is a ``Prompt``, or anything else for a call without one."""
        if not isinstance(key, Prompt):
            return self._otherwise(replicas, "")
        addresses = {replica.address for replica in replicas}
        found = self._find(key, addresses)

        def known(replica: ReplicaT) -> int:
            return found.get(replica.address, (0, 0))[0]

        mean = (sum(replica.num_inflight for replica in replicas) + 1) / len(replicas)
        limit = max(ceil(MAX_SHARE * mean), MIN_ROOM)
        idle = [replica for replica in replicas if replica.num_inflight < limit]
        most_new = fmean(self._num_new[address] for address in addresses) + len(key.pieces)
        free = [
            one for one in idle if 2 * known(one) >= len(key.pieces) or self._num_new[one.address] <= most_new
        ] or idle
        num_known = max(map(known, free))
        if num_known:
            having = [replica for replica in free if known(replica) == num_known]
            chosen = min(having, key=lambda replica: (replica.num_inflight, self._generator.random()))
        else:
            chosen = min(free, key=scores(key.home))
        longest = max((num_pieces for num_pieces, _ in found.values()), default=0)
        self.outcomes["new" if not longest else "most" if num_known == longest else "load"] += 1
        key.expected, key.sent = num_known * PIECE_BYTES, found.get(chosen.address, (0, 0))[1]
        self._num_new[chosen.address] += len(key.pieces) - num_known
        if self._num_new[chosen.address] > _MAX_NEW:
            self._num_new = Counter({one: count // 2 for one, count in self._num_new.items() if count > 1})
        self._remember(key, chosen.address, addresses)
        return chosen

    def note(self, address: str, key: Any, result: "InferResult") -> None:
        """Learn from an answer: if much less was cached than expected, what was sent before is evicted, or lost."""
        if not isinstance(key, Prompt) or not key.expected:
            return
        num_tokens, num_cached = (_count(result.outputs.get(f"num_{name}_tokens")) for name in ("input", "cached"))
        if num_tokens and num_cached is not None and 2 * num_cached * key.size < num_tokens * key.expected:
            self._lost[address] = max(self._lost.pop(address, 0), key.sent)
            if len(self._lost) > _MAX_ADDRESSES:
                del self._lost[next(iter(self._lost))]

    def _find(self, key: Prompt, addresses: Collection[str]) -> dict[str, tuple[int, int]]:
        """By address, how many pieces it was sent, and when."""
        found: dict[str, tuple[int, int]] = {}
        for index in reversed(range(len(key.pieces))):
            for address, sent in self._sent.get(key.pieces[index], {}).items():
                if address not in found and address in addresses and sent > self._lost.get(address, 0):
                    found[address] = index + 1, sent
            if len(found) == len(addresses):
                break
        return found

    def _remember(self, key: Prompt, address: str, addresses: Collection[str]) -> None:
        self._num_prompts += 1
        for piece in reversed(key.pieces):  # the last ones are forgotten first
            places = self._sent.setdefault(piece, {})
            places[address] = self._num_prompts
            if len(places) > 2 * len(addresses) + 8:  # most of them have left
                self._sent[piece] = {one: sent for one, sent in places.items() if one in addresses}
            self._sent.move_to_end(piece)
        while len(self._sent) > self._max_remembered:
            self._sent.popitem(last=False)


def _count(tensor: "WireTensor | None") -> int | None:
    return None if tensor is None or len(tensor.data) < 4 else int.from_bytes(tensor.data[:4], "little")
