"""Reads the folder of an encoder: of transformers, or of sentence-transformers. Imports no torch."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from weft.base.errors import InvalidArgumentError, NotFoundError
from weft.llm.models.fields import Fields, count, fault
from weft.llm.weights.parts import read_json, read_object

POOLINGS = ("mean", "cls", "max", "last_token")
#: Keys of a pooling's configuration before sentence-transformers 5.3, which has ``pooling_mode``.
_POOLING_KEYS = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_lasttoken": "last_token",
}
_ARCHITECTURE = re.compile(
    r"(Bert|Roberta|XLMRoberta|Camembert|ModernBert)(Model|ForMaskedLM|ForSequenceClassification)"
)
_ACTIVATIONS = ("Identity", "Tanh", "GELU", "ReLU", "Sigmoid")


@dataclass(frozen=True)
class Dense:
    """A layer behind the pooling, whose weights are in ``path``."""

    path: Path
    num_inputs: int
    num_outputs: int
    has_bias: bool
    activation: str


@dataclass(frozen=True)
class EncoderFolder:
    """An encoder as its folder describes it.

    Attributes:
        path: Of ``config.json``, weights and ``tokenizer.json``.
        family: The part of its class's name before ``Model``.
        num_labels: Scores of a pair of texts; 0: it makes vectors.
        max_len: Most tokens of a text or pair.
        pooling: One of ``POOLINGS``.
        normalizes: Vectors are scaled to length 1.
        has_sigmoid: Scores are from 0 to 1.
        prompts: What goes before a text, by name; that of the name "" by default.
        lowers: Texts are made lower case first.
    """

    path: Path
    fields: Fields
    family: str
    num_labels: int
    max_len: int
    pooling: str = "mean"
    layers: tuple[Dense, ...] = ()
    normalizes: bool = True
    has_sigmoid: bool = False
    prompts: Mapping[str, str] | None = None
    lowers: bool = False

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return count(self.fields, "vocab_size")

    @property
    def width(self) -> int:
        """Numbers of a vector, or scores of a pair."""
        return self.num_labels or (self.layers[-1].num_outputs if self.layers else count(self.fields, "hidden_size"))


def read_encoder(root: Path) -> EncoderFolder:
    """Read the description of an encoder.

    Raises:
        NotFoundError: There is no ``config.json``.
        InvalidArgumentError: A file is not JSON, or asks for something that is not supported; the message names it.
    """
    modules = _modules(root)
    path = modules[0][1] if modules else root
    given = read_object(path / "config.json")
    if given is None:
        raise NotFoundError(f"no config.json in {path}; give the folder of a Hugging Face model")
    named = given.get("architectures")
    match = _ARCHITECTURE.fullmatch(str(named[0])) if isinstance(named, list) and len(named) == 1 else None
    if match is None:
        allowed = _ARCHITECTURE.pattern.replace(")(", "), then (")
        raise fault("architectures", f"a list with one name: {allowed}; decoders belong to the backend 'llm'", named)
    if given.get("quantization_config") is not None:
        raise fault("quantization_config", "absent: encoders are read in numbers; set parameter 'quantization'", "one")
    fields = Fields({name: value for name, value in given.items() if value is not None or name == "local_rope_theta"})
    folder = EncoderFolder(path, fields, match[1], 0, _max_len(path, fields, match[1]))
    if match[2] == "ForSequenceClassification":
        labels = fields.get("id2label")
        num_labels = len(labels) if isinstance(labels, dict) and labels else count(fields, "num_labels", 2)
        own = fields.get("sentence_transformers")
        named = (own.get("activation_fn") if isinstance(own, dict) else None) or fields.get(
            "sbert_ce_default_activation_function"
        )
        activation = str(named).rpartition(".")[2] if named else "Sigmoid" if num_labels == 1 else "Identity"
        if activation not in ("Sigmoid", "Identity"):
            raise fault("activation_fn", "Sigmoid or Identity", named)
        return replace(folder, num_labels=num_labels, has_sigmoid=activation == "Sigmoid")
    return _with_modules(folder, root, modules)


def _modules(root: Path) -> list[tuple[str, Path]]:
    """Kinds and folders of ``modules.json``; none without the file."""
    listed = read_json(root / "modules.json", list) or []
    found = []
    for one in listed:
        kind, place = (one.get("type"), one.get("path")) if isinstance(one, dict) else (None, None)
        if not isinstance(kind, str) or not isinstance(place, str) or PurePosixPath(place).name != place:
            raise InvalidArgumentError(
                f"{root / 'modules.json'}: each module needs a type, and a folder here, got {one}"
            )
        found.append((kind.rpartition(".")[2], root / place))
    if found and (found[0][0] != "Transformer" or "Pooling" not in (kind for kind, _ in found[1:2])):
        raise InvalidArgumentError(
            f"{root / 'modules.json'} must begin with Transformer and Pooling, got {[kind for kind, _ in found]}"
        )
    return found


def _with_modules(folder: EncoderFolder, root: Path, modules: list[tuple[str, Path]]) -> EncoderFolder:
    """``folder`` with what sentence-transformers says of it."""
    own = read_object(folder.path / "sentence_bert_config.json") or {}
    said = read_object(root / "config_sentence_transformers.json") or {}
    prompts = {name: text for name, text in (said.get("prompts") or {}).items() if isinstance(text, str)}
    if (default := said.get("default_prompt_name")) is not None:
        prompts[""] = prompts.get(default, "")
    folder = replace(folder, prompts=prompts, lowers=bool(own.get("do_lower_case", False)))
    if not modules:
        return folder
    layers, normalizes = [], False
    for kind, path in modules[2:]:
        if kind == "Dense" and not normalizes:
            layers.append(_dense(path))
        elif kind == "Normalize":
            normalizes = True
        elif kind != "Dropout":
            raise InvalidArgumentError(
                f"{root / 'modules.json'}: module {kind} is not supported there; allowed after "
                "Pooling are Dense, and Normalize at the end"
            )
    return replace(folder, pooling=_pooling(modules[1][1]), layers=tuple(layers), normalizes=normalizes)


def _pooling(path: Path) -> str:
    config = read_object(path / "config.json") or {}
    modes = [
        _POOLING_KEYS.get(name, name) for name, is_set in config.items() if name.startswith("pooling_mode_") and is_set
    ]
    if mode := config.get("pooling_mode"):
        modes = [{"lasttoken": "last_token"}.get(mode, mode)]
    if len(modes) != 1 or modes[0] not in POOLINGS or config.get("include_prompt", True) is not True:
        raise InvalidArgumentError(
            f"{path / 'config.json'} must choose one of {', '.join(POOLINGS)} with include_prompt, got {config}"
        )
    return str(modes[0])


def _dense(path: Path) -> Dense:
    config = read_object(path / "config.json") or {}
    activation = str(config.get("activation_function", "torch.nn.modules.activation.Tanh")).rpartition(".")[2]
    if activation not in _ACTIVATIONS:
        raise InvalidArgumentError(
            f"{path / 'config.json'}: activation_function must be one of {', '.join(_ACTIVATIONS)}, got {activation}"
        )
    return Dense(
        path, count(config, "in_features"), count(config, "out_features"), bool(config.get("bias", True)), activation
    )


def _max_len(path: Path, fields: Fields, family: str) -> int:
    limits = [count(fields, "max_position_embeddings")]
    if family not in ("Bert", "ModernBert"):
        limits[0] -= fields.get("pad_token_id", 1) + 1  # positions count from behind that of padding
    for name, key in (("sentence_bert_config.json", "max_seq_length"), ("tokenizer_config.json", "model_max_length")):
        value = (read_object(path / name) or {}).get(key)
        if type(value) is int and value > 0:
            limits.append(value)
    return min(limits)
