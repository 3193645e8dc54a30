"""Reads the folder of an encoder: of transformers, or of sentence-transformers. Imports no torch."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

from weft.base.errors import InvalidArgumentError, NotFoundError
from weft.llm.models.fields import Fields, choice, count, fault, flag, token_ids
from weft.llm.weights.parts import read_json, read_object

#: Poolings, by their names in sentence-transformers since and before version 5.3.
_POOLINGS = {"mean": "mean_tokens", "cls": "cls_token", "max": "max_tokens", "lasttoken": "lasttoken"}
_ARCHITECTURE = re.compile(
    r"(Bert|Roberta|XLMRoberta|Camembert|ModernBert)(Model|ForMaskedLM|ForSequenceClassification)"
)
#: Tables grow with positions, and a file may claim any number.
_MAX_POSITIONS = 1 << 20
_ACTIVATIONS = ("Identity", "Tanh", "GELU", "ReLU", "Sigmoid")


@dataclass(frozen=True)
class EncoderFolder:
    """An encoder as its folder describes it.

    Attributes:
        path: Of ``config.json``, weights and ``tokenizer.json``.
        family: The part of its class's name before ``Model``.
        max_len: Most tokens of a text or pair.
        num_labels: Scores of a pair of texts; 0: it makes vectors.
        has_sigmoid: Scores are from 0 to 1.
        pooling: ``mean``, ``cls``, ``max`` or ``lasttoken``.
        layers: Folders and configurations of the products behind the pooling.
        normalizes: Vectors are scaled to length 1.
        prompts: What goes before a text, by name; that of the name "" by default.
        lowers: Texts are made lower case first.
    """

    path: Path
    fields: Fields
    family: str
    max_len: int
    num_labels: int = 0
    has_sigmoid: bool = False
    pooling: str = "mean"
    layers: tuple[tuple[Path, Mapping[str, Any]], ...] = ()
    normalizes: bool = True
    prompts: Mapping[str, str] = field(default_factory=dict)
    lowers: bool = False

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return count(self.fields, "vocab_size")

    @property
    def width(self) -> int:
        """Numbers of a vector, or scores of a pair."""
        own = count(self.fields, "hidden_size")
        return self.num_labels or (self.layers[-1][1]["out_features"] if self.layers else own)


def read_encoder(root: Path) -> EncoderFolder:
    """Read the description of an encoder.

    Raises:
        NotFoundError: There is no ``config.json``.
        InvalidArgumentError: A file is not JSON, or asks for something that is not supported; the message names it.
    """
    modules = _modules(root / "modules.json")
    path = modules[0][1] if modules else root
    given = read_object(path / "config.json")
    if given is None:
        raise NotFoundError(f"no config.json in {path}; give the folder of a Hugging Face model")
    named = given.get("architectures")
    match = _ARCHITECTURE.fullmatch(str(named[0])) if isinstance(named, list) and len(named) == 1 else None
    if match is None:
        raise fault("architectures", f"a list with one name, {_ARCHITECTURE.pattern}, for an encoder", named)
    if given.get("quantization_config") is not None:
        raise fault("quantization_config", "absent: encoders are read in numbers; set parameter 'quantization'", "one")
    fields = Fields({name: value for name, value in given.items() if value is not None or name == "local_rope_theta"})
    folder = EncoderFolder(path, fields, match[1], _max_len(path, fields, match[1]))
    if match[2] != "ForSequenceClassification":
        return _with_modules(_with_prompts(folder, root), root, modules[1:])
    labels, own = fields.get("id2label"), fields.get("sentence_transformers")
    num_labels = len(labels) if isinstance(labels, dict) and labels else count(fields, "num_labels", 2)
    chosen = own.get("activation_fn") if isinstance(own, dict) else None
    chosen = chosen or fields.get("sbert_ce_default_activation_function")
    activation = _class(chosen, "activation_fn", ("Sigmoid", "Identity"), "Sigmoid" if num_labels == 1 else "Identity")
    return replace(folder, num_labels=num_labels, has_sigmoid=activation == "Sigmoid")


def pad_token(fields: Fields) -> int:
    """The id of the padding token, behind which RoBERTa's positions begin."""
    return next(iter(token_ids("pad_token_id", fields.get("pad_token_id", 1))), 1)


def _class(path: object, field_name: str, allowed: Collection[str], default: str) -> str:
    """The class of torch at a path of Python's, one of some; with a path of None ``default``."""
    name = default if path is None else str(path).rpartition(".")[2]
    return choice({field_name: name}, field_name, allowed, default)


def _max_len(path: Path, fields: Fields, family: str) -> int:
    first = 0 if family in ("Bert", "ModernBert") else pad_token(fields) + 1
    limits = [count(fields, "max_position_embeddings") - first]
    if not 0 < limits[0] <= _MAX_POSITIONS:
        raise fault("max_position_embeddings", f"above {first}, and at most {_MAX_POSITIONS}", limits[0] + first)
    files = (("sentence_bert_config.json", "max_seq_length"), ("tokenizer_config.json", "model_max_length"))
    given = [(read_object(path / name) or {}).get(key) for name, key in files]
    return min(limits + [value for value in given if type(value) is int and value > 0][:1])


def _modules(path: Path) -> list[tuple[str, Path]]:
    """Kinds and folders of the modules in ``modules.json``; none without the file."""
    found = []
    for one in read_json(path, list) or []:
        kind, place = (one.get("type"), one.get("path")) if isinstance(one, dict) else (None, None)
        if not isinstance(kind, str) or not isinstance(place, str) or PurePosixPath(place).name != place:
            raise InvalidArgumentError(f"{path}: each module needs a type, and a folder here, got {one}")
        found.append((kind.rpartition(".")[2], path.parent / place))
    kinds = [kind for kind, _ in found]
    if found and kinds[:2] != ["Transformer", "Pooling"]:
        raise InvalidArgumentError(f"{path} must begin with Transformer and Pooling, got {kinds}")
    return found


def _with_prompts(folder: EncoderFolder, root: Path) -> EncoderFolder:
    said = read_object(root / "config_sentence_transformers.json") or {}
    given = said.get("prompts")
    prompts = {str(name): str(text) for name, text in given.items()} if isinstance(given, dict) else {}
    prompts[""] = prompts.get(str(said.get("default_prompt_name")), "")
    lowers = (read_object(folder.path / "sentence_bert_config.json") or {}).get("do_lower_case", False)
    return replace(folder, prompts=prompts, lowers=bool(lowers))


def _with_modules(folder: EncoderFolder, root: Path, modules: list[tuple[str, Path]]) -> EncoderFolder:
    if not modules:
        return folder
    layers: list[tuple[Path, Mapping[str, Any]]] = []
    kinds = [kind for kind, _ in modules[1:] if kind != "Dropout"]
    for kind, path in modules[1:]:
        if kind not in ("Dense", "Normalize", "Dropout") or "Normalize" in kinds[:-1]:
            allowed = "any number of Dense, then Normalize or nothing"
            raise InvalidArgumentError(f"{root / 'modules.json'}: after Pooling {allowed} may come, got {kinds}")
        if kind == "Dense":
            config = read_object(path / "config.json") or {}
            activation = _class(config.get("activation_function"), "activation_function", _ACTIVATIONS, "Tanh")
            width = layers[-1][1]["out_features"] if layers else count(folder.fields, "hidden_size")
            if count(config, "in_features") != width:
                raise fault("in_features", f"{width}", config["in_features"])
            sizes = {name: count(config, name) for name in ("in_features", "out_features")}
            layers.append((path, {**sizes, "bias": flag(config, "bias", True), "activation": activation}))
    return replace(folder, pooling=_pooling(modules[0][1]), layers=tuple(layers), normalizes="Normalize" in kinds)


def _pooling(path: Path) -> str:
    config = read_object(path / "config.json") or {}
    old = {f"pooling_mode_{key}": name for name, key in _POOLINGS.items()}
    modes = [old.get(name, name) for name, is_set in config.items() if name.startswith("pooling_mode_") and is_set]
    modes += [str(config["pooling_mode"])] if "pooling_mode" in config else []
    if len(modes) != 1 or modes[0] not in _POOLINGS or config.get("include_prompt", True) is not True:
        allowed = f"choose one of {', '.join(_POOLINGS)}, and not exclude prompts"
        raise InvalidArgumentError(f"{path / 'config.json'} must {allowed}, got {config}")
    return str(modes[0])
