"""LoRA adapters of a model: read from PEFT's folders, kept in slots, added to the products of rows that name one."""

import math
import re
import threading
from collections.abc import Callable, Mapping
from hashlib import blake2b
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from weft.base.errors import InvalidArgumentError, NotFoundError, ResourceExhaustedError
from weft.base.observing.logs import get_logger
from weft.llm import ops
from weft.llm.models.model_config import TransformerConfig
from weft.llm.request import Adapter, EngineRequest
from weft.llm.weights.parts import Piece, listed, read_object

_LOG = get_logger("weft.llm")
CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_PREFIX, _HALVES = "base_model.model.", (".lora_A.weight", ".lora_B.weight")
#: Fields of PEFT that change what an adapter computes, or which weights it has, in ways that are not supported.
_UNSUPPORTED = (
    "use_dora", "use_qalora", "use_bdlora", "lora_bias", "fan_in_fan_out", "modules_to_save", "layer_replication",
    "trainable_token_indices", "target_parameters", "alora_invocation_tokens", "arrow_config",
)  # fmt: skip
#: Initial weights for which PEFT changes the model's own too.
_CHANGED_BASES = ("pissa", "olora", "corda", "loftq", "lora_ga")
#: Of ranks and alphas, so that a scale is a number in float32.
_MAX_NUMBER = 2**32


class _Target(NamedTuple):
    """Where a module of the checkpoint is in a fused product: its weight's name, and which part."""

    name: str
    part: int
    shape: tuple[int, ...]


def _targets(config: TransformerConfig) -> dict[str, _Target]:
    found = {}
    for name, parts in config.adapted_parts().items():
        for index, part in enumerate(parts):
            found[part.name.removesuffix(".weight")] = _Target(name, index, part.shape)
    return found


def _fault(folder: Path, problem: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"adapter in {folder}: {problem}")


def _scales(folder: Path) -> Callable[[str], tuple[int, float]]:
    """Rank and scale of a module by its name, as the folder's ``adapter_config.json`` says, which is validated."""
    config = read_object(folder / CONFIG_FILE)
    if config is None:
        raise NotFoundError(f"no {CONFIG_FILE} in {folder}; give the folder of a LoRA adapter that PEFT has saved")
    if config.get("peft_type") != "LORA":
        raise _fault(folder, f"peft_type must be LORA, got {config.get('peft_type')!r:.80}")
    for name in _UNSUPPORTED:
        if config.get(name):
            raise _fault(folder, f"{name} is not supported, got {config[name]!r:.80}; merge it into the model")
    if config.get("bias", "none") != "none":
        raise _fault(folder, f"bias must be none, got {config['bias']!r:.80}; merge it into the model")
    if str(config.get("init_lora_weights", "")).lower().startswith(_CHANGED_BASES):
        how = "save it converted, with path_initial_model_for_weight_conversion"
        raise _fault(folder, f"init_lora_weights changed the model's own weights; {how}")
    rank_of = _numbers(folder, config, "r", "rank_pattern")
    alpha_of = _numbers(folder, config, "lora_alpha", "alpha_pattern")

    def scale_of(module: str) -> tuple[int, float]:
        rank = rank_of(module)
        return rank, alpha_of(module) / (math.sqrt(rank) if config.get("use_rslora") else rank)

    return scale_of


def _numbers(folder: Path, config: Mapping[str, Any], field: str, pattern_field: str) -> Callable[[str], Any]:
    """A number by the name of a module: that of the first pattern that matches, else that of ``field``."""
    patterns = config.get(pattern_field) or {}
    if not isinstance(patterns, Mapping):
        raise _fault(folder, f"{pattern_field} must be an object of patterns and numbers, got {patterns!r:.80}")
    kinds, kind = ((int,), "whole number") if field == "r" else ((int, float), "number")
    for name, value in ((field, config.get(field)), *((pattern_field, value) for value in patterns.values())):
        if type(value) not in kinds or not 0 < value <= _MAX_NUMBER:
            raise _fault(folder, f"{name} must be a {kind} above 0, at most 2^32, got {value!r:.80}")
    try:
        compiled = [(re.compile(rf"(.*\.)?({key})$"), value) for key, value in patterns.items()]
    except (re.error, OverflowError, RecursionError) as error:
        raise _fault(folder, f"{pattern_field} has a key that is no pattern: {error}") from None
    return lambda module: next((value for pattern, value in compiled if pattern.match(module)), config[field])


def read_adapter(folder: Path, config: TransformerConfig, max_rank: int) -> list[tuple[_Target, Tensor, Tensor]]:
    """Read an adapter: of each module its place, ``[K, r]`` down, and ``[r, N]`` up with the scale, float32.

    Raises:
        NotFoundError: A file is missing.
        InvalidArgumentError: A file is invalid, does not fit the model, or has what is not supported.
    """
    scale_of = _scales(folder)
    try:
        stored = load_file(folder / WEIGHTS_FILE)
    except FileNotFoundError:
        raise NotFoundError(
            f"no {WEIGHTS_FILE} in {folder}; pickled weights are not read: save it as safetensors"
        ) from None
    except (SafetensorError, OSError) as error:
        raise _fault(folder, f"{WEIGHTS_FILE} is torn or no safetensors file: {error}") from error
    targets = _targets(config)
    modules = {
        name.removeprefix(_PREFIX).removesuffix(half) for name in stored for half in _HALVES if name.endswith(half)
    }
    known = {f"{_PREFIX}{module}{half}" for module in modules & targets.keys() for half in _HALVES}
    if surplus := sorted(stored.keys() - known):
        of = f"the linear layers of {config.name}'s attention and MLP"
        raise _fault(folder, f"{listed(surplus)} of no module that can have an adapter: {of}")
    if missing := sorted(known - stored.keys()):
        raise _fault(folder, f"{listed(missing)} missing; save it again")
    if not modules:
        raise _fault(folder, f"{WEIGHTS_FILE} has no tensors; save it again")
    read = []
    for module in sorted(modules):
        target, (rank, scale) = targets[module], scale_of(module)
        if rank > max_rank:
            raise _fault(
                folder, f"its rank must be at most max_lora_rank = {max_rank}, got {rank}; raise max_lora_rank"
            )
        halves = []
        for half, shape in zip(_HALVES, ((rank, target.shape[1]), (target.shape[0], rank)), strict=True):
            tensor = stored[_PREFIX + module + half]
            is_number = tensor.is_floating_point() and bool(tensor.float().isfinite().all())
            if tuple(tensor.shape) != shape or not is_number:
                got = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
                raise _fault(folder, f"'{module}{half}' must be finite numbers of shape {list(shape)}, got {got}")
            halves.append(tensor.float().t())
        read.append((target, halves[0], halves[1] * scale))
    return read


class LoraLinear:
    """A product, and the adapters of its rows.

    Args:
        pieces: What the product has of each part of its weight.

    Attributes:
        a, b: Matrices of all slots, as ``weft_kernels.adapters.reference.add_lora`` takes them.
    """

    def __init__(self, product: ops.Linear, bank: "LoraBank", pieces: list[Piece]) -> None:
        self._product = product
        self._bank = bank
        self._pieces = pieces
        self._ends = tuple(accumulate(piece.shape[0] for piece in pieces))
        shapes = (pieces[0].shape[1], len(pieces) * bank.max_rank), (bank.max_rank, self._ends[-1])
        self.a, self.b = (torch.zeros(bank.num_slots, *shape, dtype=bank.dtype, device=bank.device) for shape in shapes)
        # So that nothing is compiled while it serves.
        out, x = self.b.new_zeros(1, self._ends[-1]), self.a.new_zeros(1, self.a.shape[1])
        ops.add_lora(out, x, self.a, self.b, self._ends, torch.zeros(1, dtype=torch.int32, device=bank.device))

    def __call__(self, x: Tensor) -> Tensor:
        """``[T, in]`` to ``[T, out]``, newly allocated."""
        out = self._product(x)
        if self._bank.row_slots is not None:
            ops.add_lora(out, x, self.a, self.b, self._ends, self._bank.row_slots)
        return out

    def write(self, slot: int, part: int, down: Tensor, up: Tensor) -> None:
        """Write what this product has of the matrices ``[K, r]`` and ``[r, N]`` of a part into a slot of zeros."""
        piece, rank = self._pieces[part], down.shape[1]
        end, columns = self._ends[part], part * self.b.shape[1]
        self.a[slot, :, columns : columns + rank].copy_(down[piece.columns])
        self.b[slot, :rank, end - piece.shape[0] : end].copy_(torch.cat([up[:, rows] for rows in piece.rows], 1))


class LoraBank:
    """The adapters of one model. ``load``, ``unload``, ``acquire`` and ``release`` may be called on any thread.

    Matrices of all slots are allocated once, so that captured steps stay valid. A slot is written while no request uses
    it, beside running steps.

    Args:
        max_rank: Ranks of adapters, at most; smaller ones are padded with zeros.

    Attributes:
        linears: Products with adapters, by the names of their weights.
        write: Reads the adapter in a folder into a slot that no request uses; another if ranks have the matrices.
        row_slots: Slot of each row of the step that is computed, int32 ``[T]``, -1 for none; None: no row has one.
    """

    def __init__(
        self, config: TransformerConfig, num_slots: int, max_rank: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self.num_slots, self.max_rank, self.dtype, self.device = num_slots, max_rank, dtype, torch.device(device)
        self.row_slots: Tensor | None = None
        self._config = config
        self.write = self._write
        self.linears: dict[str, LoraLinear] = {}
        self._adapters: dict[str, Adapter] = {}
        self._free = list(reversed(range(num_slots)))
        self._lock = threading.Lock()  # of the table
        self._changing = threading.Lock()  # one load at a time

    def wrap(self, products: Mapping[str, ops.Linear], pieces: Mapping[str, list[Piece]]) -> dict[str, ops.Linear]:
        """The products, by the names of their weights, with adapters of those of which there are ``pieces``."""
        self.linears = {name: LoraLinear(products[name], self, own) for name, own in pieces.items()}
        return {**products, **self.linears}

    @property
    def adapters(self) -> list[Adapter]:
        """The loaded adapters, in the order of their loads."""
        with self._lock:
            return list(self._adapters.values())

    def load(self, name: str, folder: Path) -> None:
        """Load the adapter in a folder; blocks for the time of reading it.

        Raises:
            NotFoundError: A file is missing.
            InvalidArgumentError: The name is taken, or see ``read_adapter``.
            ResourceExhaustedError: Every slot is taken.
        """
        with self._changing:
            if name in self._adapters:
                raise InvalidArgumentError(
                    f"adapter '{name:.80}' is loaded already, from {self._adapters[name].folder}; unload it first"
                )
            if not self._free:
                raise ResourceExhaustedError(
                    f"max_loras = {self.num_slots} adapters are loaded, or unloaded and still in use; unload one, or "
                    f"raise max_loras; loaded are {self._names()}"
                )
            slot = self._free[-1]
            self.write(slot, folder)
            digest = blake2b(digest_size=16)
            for file in (CONFIG_FILE, WEIGHTS_FILE):
                digest.update((folder / file).read_bytes())
            with self._lock:
                self._free.remove(slot)
                self._adapters[name] = Adapter(name, folder, slot, digest.digest())
        _LOG.info("loaded adapter '%s' from %s", name, folder)

    def _write(self, slot: int, folder: Path) -> None:
        modules = read_adapter(folder, self._config, self.max_rank)
        for linear in self.linears.values():
            linear.a[slot].zero_()
            linear.b[slot].zero_()
        for target, down, up in modules:
            if target.name in self.linears:  # others are of other stages
                self.linears[target.name].write(slot, target.part, down, up)

    def unload(self, name: str) -> None:
        """Unload an adapter: new requests that name it are refused, running ones finish. Raises NotFoundError."""
        with self._lock:
            adapter = self._find(name)
            del self._adapters[name]
            adapter.is_unloaded = True
            self._free_unused(adapter)
        _LOG.info("unloaded adapter '%s'", name)

    def acquire(self, request: EngineRequest) -> None:
        """Give a request the adapter that its parameters name, until ``release``. Raises NotFoundError."""
        with self._lock:
            request.adapter = self._find(request.params.lora_name)
            request.adapter.requests.add(request)

    def release(self, request: EngineRequest) -> None:
        """The request has ended; no effect if it was released before."""
        adapter = request.adapter
        if adapter is None:
            return
        with self._lock:
            if request in adapter.requests:
                adapter.requests.discard(request)
                self._free_unused(adapter)

    def _free_unused(self, adapter: Adapter) -> None:
        if adapter.is_unloaded and not adapter.requests:
            self._free.append(adapter.slot)

    def _find(self, name: str) -> Adapter:
        if name not in self._adapters:
            raise NotFoundError(f"adapter '{name:.80}' is not loaded; loaded are {self._names()}")
        return self._adapters[name]

    def _names(self) -> str:
        return ", ".join(f"'{name}'" for name in self._adapters) or "none"
