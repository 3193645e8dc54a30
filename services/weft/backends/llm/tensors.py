"""Inputs and outputs of every language model; names and types are those of Triton's vLLM backend."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from weft.backends.llm.chat import chat_parameters
from weft.base.errors import InvalidArgumentError
from weft.base.text.suggestion import suggestion


class TensorDeclaration(NamedTuple):
    """Type and dims of an input or output, as written in ``config.pbtxt``."""

    data_type: str
    dims: tuple[int, ...]


TEXT_INPUT, INPUT_IDS, STREAM, SAMPLING = "text_input", "input_ids", "stream", "sampling_parameters"
EXCLUDE_INPUT = "exclude_input_in_output"
TEXT_OUTPUT, FINISH_REASON = "text_output", "finish_reason"
OUTPUT_IDS, CONTEXT_IDS, NUM_PREVIOUS_TOKENS = "output_ids", "context_ids", "num_previous_tokens"
CUMULATIVE_LOGPROB, LOGPROBS = "cumulative_logprob", "logprobs"
NUM_INPUT_TOKENS, NUM_CACHED_TOKENS, NUM_OUTPUT_TOKENS = "num_input_tokens", "num_cached_tokens", "num_output_tokens"

_TEXT, _FLAG, _IDS = (
    TensorDeclaration("TYPE_STRING", (1,)),
    TensorDeclaration("TYPE_BOOL", (1,)),
    TensorDeclaration("TYPE_INT32", (-1,)),
)

#: Outputs that a request without requested outputs selects by an input ``return_<name>``.
ON_REQUEST = (
    FINISH_REASON,
    CUMULATIVE_LOGPROB,
    LOGPROBS,
    NUM_INPUT_TOKENS,
    NUM_CACHED_TOKENS,
    NUM_OUTPUT_TOKENS,
)

INPUTS: Mapping[str, TensorDeclaration] = {
    TEXT_INPUT: _TEXT,
    INPUT_IDS: _IDS,
    STREAM: _FLAG,
    SAMPLING: _TEXT,
    EXCLUDE_INPUT: _FLAG,
    **{f"return_{name}": _FLAG for name in ON_REQUEST},
}

OUTPUTS: Mapping[str, TensorDeclaration] = {
    TEXT_OUTPUT: TensorDeclaration("TYPE_STRING", (-1,)),
    FINISH_REASON: TensorDeclaration("TYPE_STRING", (-1,)),
    CUMULATIVE_LOGPROB: TensorDeclaration("TYPE_FP32", (-1,)),
    LOGPROBS: TensorDeclaration("TYPE_STRING", (-1,)),
    NUM_INPUT_TOKENS: TensorDeclaration("TYPE_UINT32", (1,)),
    NUM_CACHED_TOKENS: TensorDeclaration("TYPE_UINT32", (1,)),
    NUM_OUTPUT_TOKENS: TensorDeclaration("TYPE_UINT32", (-1,)),
    OUTPUT_IDS: _IDS,
    CONTEXT_IDS: _IDS,
    NUM_PREVIOUS_TOKENS: TensorDeclaration("TYPE_UINT32", (-1,)),
}


def complete(config: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Add every input and output, the decoupled policy and the chat template to a configuration.

    Args:
        config: See ``Backend.auto_complete``. Tensors that it declares must be a subset of these; its parameters take
            precedence over the folder's.
        directory: Version folder.

    Raises:
        InvalidArgumentError: It declares other tensors, a batch dimension, or sequence batching.
    """
    name = config.get("name", "")
    if int(config.get("max_batch_size", 0)):
        raise InvalidArgumentError(
            f"model '{name}': max_batch_size must be 0, got {config['max_batch_size']}; the engine forms its own "
            "batches: parameter 'max_num_seqs' says how many sequences run at once"
        )
    if "sequence_batching" in config:
        raise InvalidArgumentError(
            f"model '{name}': sequence_batching is not possible with backend 'llm'; remove it, and send the whole "
            "conversation with each request: the prefix cache keeps what was computed for it"
        )
    completed = dict(config)
    for kind, known in (("input", INPUTS), ("output", OUTPUTS)):
        declared = list(config.get(kind, ()))
        for tensor in declared:
            _check(name, kind, tensor, known)
        absent = known.keys() - {tensor["name"] for tensor in declared}
        added = [_spelled(kind, tensor, known[tensor]) for tensor in known if tensor in absent]
        completed[kind] = [{**tensor, "optional": True} if kind == "input" else tensor for tensor in declared] + added
    completed["max_batch_size"] = 0
    completed["model_transaction_policy"] = {"decoupled": True}
    chat = {name: {"string_value": text} for name, text in chat_parameters(directory).items()}
    completed["parameters"] = chat | config.get("parameters", {})
    return completed


def _spelled(kind: str, name: str, tensor: TensorDeclaration) -> dict[str, Any]:
    spelled = {"name": name, "data_type": tensor.data_type, "dims": list(tensor.dims)}
    return {**spelled, "optional": True} if kind == "input" else spelled


def _check(model: str, kind: str, tensor: Mapping[str, Any], known: Mapping[str, TensorDeclaration]) -> None:
    name = tensor.get("name", "")
    if name not in known:
        raise InvalidArgumentError(
            f"model '{model}': backend 'llm' has no {kind} '{name}'{suggestion(name, known)}; remove it, or all: the "
            "backend declares them itself"
        )
    wanted = known[name]
    got = TensorDeclaration(tensor.get("data_type", ""), tuple(map(int, tensor.get("dims", ()))))
    if got != wanted:
        raise InvalidArgumentError(
            f"model '{model}': {kind} '{name}' must be {wanted.data_type} {list(wanted.dims)}, got {got.data_type} "
            f"{list(got.dims)}; correct or remove it"
        )
