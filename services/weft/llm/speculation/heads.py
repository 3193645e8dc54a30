"""``HeadProposer``: a layer on the target's hidden states makes the drafts (EAGLE-3, MTP)."""

import math
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from typing_extensions import override

from weft.base.errors import InvalidArgumentError
from weft.llm.device_state import DeviceState
from weft.llm.models.heads import HeadConfig, HeadLayer
from weft.llm.models.model import TransformerModel
from weft.llm.models.weights import load_folder, random_weights
from weft.llm.scheduler.plan import ForwardPlan, Int32, Int64
from weft.llm.speculation.draft_model import DraftModelProposer
from weft.llm.weights.checkpoint import Checkpoint
from weft.llm.weights.parts import EMBEDDING, LM_HEAD

#: Rows of the target's states that wait to be kept, at most.
_MAX_WAITING_ROWS = 512


class DraftHead(TransformerModel):
    """The head of ``target``: its logits are of the target's vocabulary, and what it lacks is the target's.

    Args:
        weights: By the names of ``config.weight_parts``; see ``TransformerModel``.
        target_ids: The target's token for each that the head can draft, ``[draft_vocab_size]``; None: the same ones.
    """

    config: HeadConfig
    _layers: list[HeadLayer]  # type: ignore[assignment]  # a list of what ``config`` makes

    def __init__(
        self,
        config: HeadConfig,
        weights: MutableMapping[str, Any],
        target: TransformerModel,
        *,
        target_ids: Tensor | None = None,
        max_model_len: int = 0,
        num_bits: int = 0,
    ) -> None:
        own, shared = weights.get(EMBEDDING), target.embedding
        self._shares_embedding = own is None or torch.equal(own.to(shared), shared)
        if self._shares_embedding:
            weights[EMBEDDING] = shared
        self._target = target
        self._has_lm_head = LM_HEAD in weights
        self._target_ids = None if target_ids is None else target_ids.to(target.device)
        super().__init__(
            config,
            weights,
            dtype=target.dtype,
            device=target.device,
            max_model_len=max_model_len,
            num_bits=num_bits,
            lm_head=None if self._has_lm_head else target.lm_head,
        )
        self.taps = config.own_taps

    @override
    def rows_of(self, token_ids: Tensor) -> Tensor:
        return self._target.rows_of(token_ids) if self._shares_embedding else super().rows_of(token_ids)

    @override
    def logits(self, hidden: Tensor) -> Tensor:
        if not self._has_lm_head:
            return self._target.logits(hidden)
        own = super().logits(hidden)
        if self._target_ids is None:
            return own
        return own.new_full((len(own), self.config.vocab_size), -math.inf).index_copy_(1, self._target_ids, own)

    def attach(self) -> None:
        """Let the target return the states that this head reads."""
        self._target.taps = self.config.taps

    def target_states(self, hidden: Tensor) -> Tensor:
        """States ``[T, hidden_size]`` from the result of the target's ``forward``."""
        if not self.config.taps:
            return hidden
        return self._layers[0].merged(hidden[:, self._target.config.hidden_size :].contiguous())

    def own_states(self, hidden: Tensor) -> Tensor:
        """States ``[T, hidden_size]`` from the result of this head's ``forward``."""
        return hidden[:, self.config.hidden_size :].contiguous() if self.taps else hidden


def load_head(
    folder: Path, config: HeadConfig, target: TransformerModel, *, has_weights: bool, seed: int, **options: int
) -> DraftHead:
    """Load the head of ``config`` from its folder; ``options`` are those of ``DraftHead``.

    ``has_weights`` False: weights are random.

    Raises:
        NotFoundError: A file is missing.
        InvalidArgumentError: A file is invalid, or does not fit ``config``.
    """
    if not has_weights:
        ids = torch.arange(config.draft_vocab_size) if config.draft_vocab_size else None
        random = random_weights(config, seed, dtype=target.dtype, device=target.device)
        return DraftHead(config, dict(random), target, target_ids=ids, **options)
    weights = load_folder(folder, config, dtype=target.dtype, device=target.device)
    return DraftHead(config, weights, target, target_ids=_target_ids(folder, config), **options)


def _target_ids(folder: Path, config: HeadConfig) -> Tensor | None:
    """The target's token for each that the head can draft, from their differences; None: they are the same."""
    size = config.draft_vocab_size
    with Checkpoint.open(folder) as checkpoint:
        stored = checkpoint.find("d2t")
        if stored is None and size in (0, config.vocab_size):
            return None
        allowed = f"whole numbers, one for each of draft_vocab_size = {size} tokens"
        if stored is None or stored.shape != (size,) or stored.dtypes not in (("I64",), ("I32",)):
            got = "none" if stored is None else f"{stored.dtypes[0]} {list(stored.shape)}"
            raise InvalidArgumentError(f"weights: 'd2t' must be {allowed}, got {got}; fetch the head again")
        ids = checkpoint.read("d2t").long() + torch.arange(size)
    if not 0 <= int(ids.min()) <= int(ids.max()) < config.vocab_size or len(ids.unique()) < size:
        raise InvalidArgumentError(
            f"weights: 'd2t' must lead to different tokens of the model's {config.vocab_size}, got ids from "
            f"{int(ids.min())} to {int(ids.max())}; fetch the head again"
        )
    return ids


class HeadProposer(DraftModelProposer):
    """A ``DeviceProposer``: from the target's state of each token and the next token, a head guesses the one after.

    An entry of its cache is at the place of the state. The states of all tokens are kept by their places too, so that
    entries can be computed at any time: what the target finds in its prefix cache has its states, and what was never
    computed, since nobody had drafts, is caught up on as a draft model's. Two exceptions: the last entry of what a new
    sequence shares with others depends on its own next token, and is computed again; and where drafts follow one
    another, the head's own state stands for the target's, so these entries do not count as computed.
    """

    _lag = 1
    _model: DraftHead

    @override
    def bind(self, state: DeviceState, num_blocks: int, block_size: int) -> None:
        head = self._model
        head.attach()
        self._features = torch.empty(0)
        self._waiting_states: list[tuple[Int64, Tensor]] = []
        self._num_waiting = 0
        super().bind(state, num_blocks, block_size)
        shape = (num_blocks * block_size, head.config.hidden_size)
        self._features = torch.zeros(shape, dtype=head.dtype, device=head.device)

    @override
    def propose(self, plan: ForwardPlan, token_ids: Tensor) -> None:
        if len(plan.new_slots):
            is_new = np.isin(plan.slots, plan.new_slots)
            self._cache.start(plan.slots[is_new], np.maximum(self._ends(plan)[is_new] - 1, 0).astype(np.int64))
        super().propose(plan, token_ids)

    @override
    def observe(self, plan: ForwardPlan, hidden: Tensor, num_accepted: npt.NDArray[np.int32]) -> None:
        # On a GPU a captured step overwrites its result.
        self._waiting_states.append((plan.slot_mapping, hidden.clone() if hidden.is_cuda else hidden))
        self._num_waiting += len(hidden)
        if self._num_waiting >= _MAX_WAITING_ROWS:
            self._keep()

    def _keep(self) -> None:
        """Keep the states of the steps since the last call, in one product: rows cost less together."""
        if not self._waiting_states:
            return
        places, rows = zip(*self._waiting_states, strict=True)
        self._waiting_states, self._num_waiting = [], 0
        states, upload = self._model.target_states(torch.cat(rows)), self._state.upload
        kept, from_end = np.unique(np.concatenate(places)[::-1], return_index=True)  # of a place the last one counts
        self._features.index_put_((upload(kept),), states.index_select(0, upload(len(states) - 1 - from_end)))

    @override
    def _ends(self, plan: ForwardPlan) -> Int32:
        return plan.ctx_len - np.diff(plan.q_start)  # before the step's own tokens, whose states are not known yet

    @override
    def _features_at(self, places: Int64) -> Tensor:
        self._keep()
        return self._features.index_select(0, self._state.upload(places))

    @override
    def _features_of(self, hidden: Tensor) -> Tensor:
        return self._model.own_states(hidden)
