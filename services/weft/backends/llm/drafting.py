"""Loading of proposers that work on the device: a draft model, or Medusa heads; imports torch."""

import json
from pathlib import Path
from typing import Any

import torch

from weft.base.errors import InvalidArgumentError
from weft.llm.config import EngineConfig, TransformerConfig
from weft.llm.kv_window import kv_window
from weft.llm.models.model import TransformerModel
from weft.llm.models.registry import read_config
from weft.llm.models.weights import load_folder, random_weights
from weft.llm.speculation.device_proposer import DeviceProposer
from weft.llm.speculation.draft_model import DraftModelProposer
from weft.llm.speculation.medusa import MedusaProposer
from weft.llm.speculation.medusa_heads import MedusaHeads

_TOKENIZER = "tokenizer.json"


def read_draft_config(directory: Path, config: EngineConfig, model: TransformerConfig) -> TransformerConfig | None:
    """Configuration of the draft model that ``config`` names; None: it names none.

    Args:
        directory: Folder of the target.
        config: Need not be resolved.
        model: Of the target.

    Raises:
        NotFoundError: The folder has no ``config.json``.
        InvalidArgumentError: It is not supported, or does not fit the target: another vocabulary, a shorter context.
    """
    if config.speculation != "draft":
        return None
    folder = directory / config.draft_model
    draft = read_config(folder)
    if draft.vocab_size != model.vocab_size:
        raise InvalidArgumentError(
            f"draft_model must have the model's vocabulary of {model.vocab_size} tokens, got {draft.vocab_size} in "
            f"{folder}; take a smaller model of the same family"
        )
    if differing := _differing_token(directory, folder):
        raise InvalidArgumentError(
            f"draft_model must have the model's tokenizer; that in {folder} has another id for {differing}; take a "
            f"smaller model of the same family"
        )
    longest = config.max_model_len or model.max_context_len
    if draft.max_context_len < longest:
        raise InvalidArgumentError(
            f"draft_model must have a context of {longest} tokens at least, got {draft.max_context_len} in {folder}; "
            f"set max_model_len to {draft.max_context_len}, or take another one"
        )
    window = kv_window(config, model).num_tokens
    if window and not 0 < min(draft.windows) <= max(draft.windows) <= window:
        raise InvalidArgumentError(
            f"draft_model must have a sliding window of at most {window} tokens in every layer, as the model has, got "
            f"{sorted(set(draft.windows))} in {folder}, 0 for none; take another one"
        )
    return draft


def load_proposer(
    directory: Path,
    config: EngineConfig,
    model: TransformerModel,
    draft_config: TransformerConfig | None,
    *,
    has_weights: bool,
) -> DeviceProposer | None:
    """The proposer on the device that ``config`` asks for; None: it asks for none.

    Args:
        directory: Folder of the target.
        config: Resolved.
        model: The target.
        draft_config: The result of ``read_draft_config``.
        has_weights: Whether a draft model's weights are loaded; False: random ones.

    Raises:
        NotFoundError: A file is missing.
        InvalidArgumentError: A file is invalid, the heads are of another model, or are fewer than drafts.
    """
    folder = directory / config.draft_model
    if draft_config is not None:
        dtype = getattr(torch, config.dtype)
        if has_weights:
            weights = load_folder(folder, draft_config, dtype=dtype, device=config.device)
        else:
            weights = dict(random_weights(draft_config, max(config.seed, 0), dtype=dtype, device=config.device))
        draft = TransformerModel(
            draft_config,
            weights,
            dtype=dtype,
            device=config.device,
            max_model_len=config.max_model_len,
            num_bits=config.num_bits,
        )
        return DraftModelProposer(draft, config.max_num_batched_tokens)
    if config.speculation != "medusa":
        return None
    heads = MedusaHeads.load(folder, directory, model.config, model.dtype, config.device)
    if len(heads.heads) < config.num_speculative_tokens:
        raise InvalidArgumentError(
            f"num_speculative_tokens must be at most {len(heads.heads)}, the heads in {folder}, got "
            f"{config.num_speculative_tokens}; lower it, or train more with weft train-heads --num-heads"
        )
    return MedusaProposer(model, heads)


def _differing_token(directory: Path, folder: Path) -> str:
    """A token that has different ids in the two tokenizers; "": none, or one of the folders has no tokenizer."""
    paths = [directory / _TOKENIZER, folder / _TOKENIZER]
    if not all(path.is_file() for path in paths):
        return ""
    ours, theirs = (_ids_of_tokens(path) for path in paths)
    return next((repr(token) for token, number in sorted(ours.items()) if theirs.get(token) != number), "")


def _ids_of_tokens(path: Path) -> dict[str, Any]:
    try:
        tokenizer = json.loads(path.read_bytes())
        vocabulary = tokenizer["model"]["vocab"]
        if isinstance(vocabulary, list):  # a unigram model: pairs of token and score, the id is the index
            vocabulary = {token: number for number, (token, _) in enumerate(vocabulary)}
        return dict(vocabulary) | {added["content"]: added["id"] for added in tokenizer.get("added_tokens") or ()}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InvalidArgumentError(f"{path} is not a tokenizer: {type(error).__name__}: {error}") from error
