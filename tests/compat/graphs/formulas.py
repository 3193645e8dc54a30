"""What the models of the samples compute, as the last column of ``models.txt`` names it."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from weft.base.signature import TensorSpec
from weft.base.tensors import NUMPY_BY_DATATYPE

Arrays = Mapping[str, np.ndarray]


class Given(dict[str, np.ndarray]):
    """Inputs of a model call, and its parameters."""

    def __init__(self, inputs: Arrays, parameters: Mapping[str, Any]) -> None:
        super().__init__(inputs)
        self.parameters = parameters

    @property
    def first(self) -> np.ndarray:
        """The first input."""
        return next(iter(self.values()))


Formula = Callable[[Given], Any]
_TERM = re.compile(r"([+-] )?(?:(-?[\d.]+) \* )?([A-Za-z_]\w*|[\d.]+)(?: / ([\d.]+))?(?: |$)")


def formula(text: str, outputs: Sequence[TensorSpec]) -> Formula:
    """The function that a model's line asks for: ``OUT = 2 * A + B; ...``, or a name of ``_NAMED`` with arguments."""
    if " = " in text:
        return _linear(text, outputs)
    name, _, argument = text.partition(" ")
    found = _NAMED[name]
    first = outputs[0].name

    def answer(x: Given) -> Any:
        got = found(x, argument) if argument else found(x)
        return got if not isinstance(got, np.ndarray) else {first: got}

    return answer


def _linear(text: str, outputs: Sequence[TensorSpec]) -> Formula:
    """Sums of inputs with factors, in the datatype of the output; without the outputs whose inputs are absent."""
    forms: dict[str, list[tuple[float, str]]] = {}
    for form in text.split("; "):
        name, _, terms = form.partition(" = ")
        forms[name] = [_term(found) for found in _TERM.finditer(terms)]
    datatypes = {spec.name: spec.datatype for spec in outputs}

    def answer(x: Given) -> Arrays:
        there = {name: terms for name, terms in forms.items() if all(term in ("", *x) for _, term in terms)}
        return {name: _as(_total(terms, x), datatypes[name]) for name, terms in there.items()}

    return answer


def _term(found: re.Match[str]) -> tuple[float, str]:
    """Factor and name of an input; a constant has none."""
    sign, factor, what, divisor = found.groups()
    number = float(factor or 1) / float(divisor or 1) * (-1 if sign == "- " else 1)
    return (number * float(what), "") if what[0].isdigit() else (number, what)


def _total(terms: Sequence[tuple[float, str]], x: Given) -> np.ndarray:
    if len(terms) == 1 and terms[0][0] == 1 and terms[0][1]:
        return x[terms[0][1]]
    total: Any = np.zeros((len(x.first), 1)) if all(not name for _, name in terms) else np.float64(0)
    for factor, name in terms:
        total = total + factor * (x[name].astype(np.float64) if name else 1.0)
    return np.asarray(total)


def _as(array: np.ndarray, datatype: str) -> np.ndarray:
    if datatype == "BYTES" and array.dtype != object:
        return np.vectorize(lambda number: str(int(number)).encode(), otypes=[object])(array)
    return array.astype(NUMPY_BY_DATATYPE[datatype])


def floats(*values: Any) -> np.ndarray:
    """An FP32 tensor."""
    return np.array(values, np.float32)


def integers(*values: Any) -> np.ndarray:
    """An INT32 tensor."""
    return np.array(values, np.int32)


def texts(*values: Any) -> np.ndarray:
    """A BYTES tensor; nested lists make further dimensions."""
    return np.vectorize(lambda text: text.encode(), otypes=[object])(np.array(values, object))


def _each(change: Callable[[str], str]) -> Callable[[Given], np.ndarray]:
    return lambda x: texts(*([change(text.decode())] for text in x.first[:, 0]))


def _classes(x: Given) -> Any:
    """Each class is its number times the sum of the picture."""
    scores = x.first.sum((1, 2, 3))[:, None] * np.arange(10, dtype=np.float32)
    names = dict.fromkeys(("OUT", "output", "probs"), scores)
    return names | {"class": scores.argmax(1).astype(np.int32)[:, None]}


def _crop(x: Given) -> np.ndarray:
    """As many crops as the first number of the picture says; the n-th of them is all n."""
    count = int(x["in_3"][0, 0, 0, 0])
    return np.ones((count, 1, 2, 3), np.float32) * np.arange(count, dtype=np.float32)[:, None, None, None]


def _lookup(x: Given) -> np.ndarray:
    """Of each sample the sum of its keys, and that halved."""
    parts = np.split(x["KEYS"], np.cumsum(x["COUNTS"])[:-1])
    return np.array([[part.sum(), part.sum() / 2] for part in parts], np.float32).ravel()


def _tokenize(x: Given) -> Arrays:
    """Bytes as tokens; what must not be said only where something is given."""
    ids = np.array([list(x["QUERY"][0, 0])], np.int32)
    bad = [word[0] for word in x["BAD_WORDS"][0]] if "BAD_WORDS" in x else [0]
    found = {"IDS": ids, "NUM_IDS": integers([ids.shape[1]]), "BAD_IDS": np.array([bad], np.int32)}
    return found | ({"LENGTH": x["LENGTH"]} if "LENGTH" in x else {})


def _tokens(x: Given) -> list[int]:
    """The prompt backwards, cut at its length; a temperature lifts each letter, words that are bad are left out."""
    ids = x["ids"][0, : int(x["num_ids"][0, 0])][::-1][: int(x["length"][0, 0])]
    lifted = ids + int(x.get("temperature", [[0]])[0][0])
    return [int(token) for token in lifted if token not in x["bad_ids"][0]]


def _said(tokens: list[int]) -> Arrays:
    ids = np.array([[tokens]], np.int32).reshape(1, 1, -1)
    return {"output_ids": ids, "num_output": integers([len(tokens)]), "cum_log_probs": floats([-len(tokens)])}


def _unet(x: Given) -> Arrays:
    """A hundredth of what is left between the noise and the text goes away in each round."""
    number = x.get("round", integers([0]))
    return {"cleaner": x["latents"] + (x["text"] - x["latents"]) / 100, "next": number + 1}


def _chat(x: Given) -> Iterator[Arrays]:
    for index in range(int(x["length"][0, 0])):
        yield {"output_ids": x["ids"][:, index : index + 1] + x["table"].astype(np.int32)}


def _repeat(x: Given) -> Iterator[Arrays]:
    assert x["IN"].shape == x["DELAY"].shape
    for index, number in enumerate(x["IN"]):
        yield {"OUT": integers(number), "IDX": np.array([index], np.uint32)}


def _zeros(x: Given) -> Arrays:
    return {f"{name}_OUT": x.get(name, np.zeros((len(x.first), 1), np.float32)) for name in "AB"}


def _probs(x: Given, number: str) -> np.ndarray:
    """The features and their sum, times a number."""
    return (np.concatenate([x.first, x.first.sum(1, keepdims=True)], 1) * float(number)).astype(np.float32)


def _merge(x: Given, factors: str) -> np.ndarray:
    """The sum of what is stacked along axis 1, each with its factor."""
    return np.tensordot(x.first, np.array(factors.split(), np.float32), (1, 0)).astype(np.float32)


def _words(x: Given, known: str) -> np.ndarray:
    """Texts looked up; what is not known is `other`."""
    return _each(lambda text: json.loads(known).get(text, "other"))(x)


def _passes(x: Given, argument: str) -> Arrays:
    """A tensor, where it is this number."""
    name, number = argument.split()
    return {name: x[name]} if x[name][0, 0] == int(number) else {}


def _count(x: Given) -> Arrays:
    """One more; and go on below 10."""
    return {"number": x["number"] + 1, "continue" if x["number"][0, 0] < 9 else "stop": texts([""])}


def _outlier(x: Given) -> Arrays:
    total = x.first.sum(1, keepdims=True)
    return {"is_outlier": (total > 20).astype(np.int64), "distance": total}


def _row(x: Given, name: str) -> np.ndarray:
    return x[name][0, 0]


_NAMED: Mapping[str, Callable[..., Any]] = {
    "nothing": lambda x: {},
    # Texts, and numbers as such.
    "words": _words,
    "says": lambda x, text: texts(*[[text]] * len(x.first)),
    "ends": lambda x, end: _each(lambda text: text + end)(x),
    "begins": lambda x, start: _each(lambda text: f"{start} {text}")(x),
    "lower": _each(str.lower),
    "reversed": _each(lambda text: text[::-1]),
    "split": _each(lambda text: "|".join(text.split())),
    "count_words": lambda x: floats(*([text.count(b"|") + 1] for text in x.first[:, 0])),
    "label": lambda x: texts(*(["abc"[i]] for i in x.first.argmax(1))),
    "total_as_text": lambda x: texts([str(x.first.sum())]),
    "tell": lambda x: {"key": texts(*x.parameters), "value": texts(*map(str, x.parameters.values()))},
    # Numbers.
    "total": lambda x, number: (x.first.sum(1, keepdims=True) * int(number)).astype(np.int32),
    "probs": _probs,
    "merge": _merge,
    "above": lambda x, number: x.first > float(number),
    "below": lambda x, number: {"OK": x.first} if x.first.sum() < float(number) else {},
    "outlier": _outlier,
    "route": lambda x: x.first[:1, :1].astype(np.int32),
    "hop": lambda x: {"Y": x["X"], "NEXT": ~x["ON_DEVICE"]},
    "deep": lambda x: x.first.reshape(2, 8),
    "zeros": _zeros,
    "conditional": lambda x: {"RIGHT": x["B"]} if x["CHOICE"][0, 0] else {"LEFT": x["A"]},
    "passes": _passes,
    "count": _count,
    # Pictures.
    "pool": lambda x: np.repeat(x.first.sum((2, 3)), 10, 1)[:, :, None, None],
    "lengths": lambda x: np.ones((1, 3, 4, 4), np.float32) * len(_row(x, "RAW")),
    "means": lambda x: np.ones((1, 3, 4, 4), np.float32) * x.first.astype(np.float32).mean(1)[:, None, None, None],
    "classes": _classes,
    "decode": lambda x: np.ones((1, 2, 2, 3), np.float32) * x.first[0, 0],
    "detect": lambda x: {
        "net/scores/Sigmoid:0": np.ones((1, 1, 1, 1), np.float32),
        "net/boxes_3:0": np.ones((1, 1, 1, 5), np.float32),
    },
    "crop": _crop,
    "recognize": lambda x: np.repeat(np.eye(5, dtype=np.float32)[x.first[:, 0, 0, 0].astype(int)][:, None], 4, axis=1),
    "spell": lambda x: texts(*(["".join("-abcd"[i] for i in row.argmax(1))] for row in x.first)),
    "vit": lambda x: {"last_hidden_state": x.first[:, 0], "1519": np.repeat(x.first[:, :1, 0, 0], 8, 1)},
    "lookup": _lookup,
    "pairs": lambda x: x.first.reshape(-1, 2).sum(1),
    "backwards": lambda x, suffix: {f"{name}{suffix}": array[..., ::-1] for name, array in x.items()},
    "before": lambda x: {
        "original": np.ones((1, 2, 3, 3), np.uint8) * x.first[0, 0],
        "preprocessed": x.first[:, :2].astype(np.float32),
    },
    "after": lambda x: (x["picture"] * (x["probabilities"][0, 1] > 0.5)).astype(np.uint8),
    # Language models and what is around them.
    "tokenize": _tokenize,
    "encoder": lambda x: floats([x["ids"].sum(), x["bad_ids"].sum()]),
    "see": lambda x: {"TABLE": x["IMAGE"][:, 0], "SIZE": integers([x["IMAGE"].shape[2]])} if x else {},
    "seeing": lambda x: {
        "text": texts([f"{len(x['ids'][0])} letters, {_row(x, 'size') if 'size' in x else 'no'} lines"]),
        "index": integers([0]),
    },
    "generate": lambda x: _said(_tokens(x)),
    "generate_by_token": lambda x: (_said([token]) for token in _tokens(x)),
    "detokenize": lambda x: {
        "TEXT": texts(["".join(map(chr, _row(x, "TOKENS")))]),
        "OUT_LOG_PROBS": x["LOG_PROBS"],
    },
    "text_encoder": lambda x: floats([1, -1]),
    "noise": lambda x: {"latents": floats([0, 0]), "round": integers([0])},
    "unet": _unet,
    "vae": lambda x: np.full((1, 4, 4, 3), round(255 * float(x.first[0, 0])), np.uint8),
    "vision_encoder": lambda x: np.ones((1, 1), np.float16),
    "settings": lambda x: x.get("max_tokens", integers([3])),
    "chat": _chat,
    "letter": lambda x: texts([chr(_row(x, "ids"))]),
    # Streams.
    "repeat": _repeat,
    "square": lambda x: [{"OUT": x["IN"]}] * int(x["IN"][0]),
    "stream": lambda x: [dict(x)] * int(x["TIMES"][0]),
    "producer": lambda x: [{"OUT": floats(0.5)}] * int(x["IN"][0]),
}
