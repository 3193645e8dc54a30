"""Whatever stands in a configuration, an expression or a picture: it is read, or refused with a plain error.

Graph files have the same test beside the compiler (tests/unit/language/test_noise.py).
"""

import contextlib
import re
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from google.protobuf import text_format
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fuzz.messages import any_message, pictures
from tests.fuzz.test_rpcs import FUZZ, NUM_INPUTS

from weft.backends import BACKENDS
from weft.backends.preprocess.image import FORMATS, ImageDecoder
from weft.base.errors import InternalError, InvalidArgumentError, WeftError
from weft.base.tensors import encode
from weft.language.request_scope import RequestScope
from weft.language.types.compile_condition import ConditionError, VisibleBindings, compile_condition
from weft.language.types.conditions import WHEN
from weft.language.types.expression import read_expression
from weft.language.types.signatures import TensorType
from weft.serving.config import define_model
from weft_protos.model_config_pb2 import ModelConfig

ROOT = Path(__file__).parents[2]
CONFIGS = [file.read_text() for file in sorted(ROOT.glob("model_repository/*/*/config.pbtxt"))]
_PIECE = re.compile(r"\"[^\"]*\"|\w+|\s+|.")
WORDS = sorted(
    {piece for text in CONFIGS for piece in _PIECE.findall(text)} | {f.name for f in ModelConfig.DESCRIPTOR.fields}
)
MANY = settings(FUZZ, max_examples=NUM_INPUTS * 20)


def define(text: str) -> None:
    """The model that a configuration describes is defined, or refused by an error of ours with a text."""
    with TemporaryDirectory() as folder:
        model = Path(folder) / "m"
        (model / "1").mkdir(parents=True)
        (model / "config.pbtxt").write_text(text, errors="surrogatepass")
        (model / "1/model.py").write_text("class TritonPythonModel:\n    pass\n")
        refusal = WeftError("it is not refused")
        try:
            define_model(model, [1], BACKENDS, num_gpus=0)
        except WeftError as error:
            refusal = error
        assert refusal.message
        assert not isinstance(refusal, InternalError)


@MANY
@given(st.data())
def test_a_changed_configuration(data: st.DataObject) -> None:
    """With words of it replaced, removed or doubled."""
    pieces = _PIECE.findall(data.draw(st.sampled_from(CONFIGS)))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(pieces) - 1))
        pieces[at] = data.draw(st.sampled_from(["", pieces[at] * 2, data.draw(st.sampled_from(WORDS))]))
    define("".join(pieces))


@settings(FUZZ, max_examples=NUM_INPUTS)  # a second for one on a busy machine
@given(any_message(ModelConfig.DESCRIPTOR))
def test_any_configuration(config: ModelConfig) -> None:
    """With any field set to anything."""
    config.name, config.backend = "m", "python"
    define(text_format.MessageToString(config))


TOKENS = (
    "inputs.X", "inputs.NAME", "inputs", "outputs.Y", "X", "text(", "size(", "max(", "argmax(", "mean(", "has(", "get(",
    "parameters", "headers", "request.priority", ".tier", "['a']", "[0]", "[", "]", "(", ")", "{", "}", ",", ":", "?",
    "&&", "||", "!", "==", "!=", "<", ">=", "+", "-", "*", "/", "%", "in", "0", "1", "-1", "9223372036854775808",
    "1e400", "0.5", "1u", "'de'", "\"\\x\"", "b'a'", "r'\\'", "true", "null", ".matches('(a+)+$')", ".map(p, p)",
    ".exists(p, p > 0)", "timestamp('x')", "duration('1s')", "//", "\n", "\0", "\ud800", "名",
)  # fmt: skip
VISIBLE = VisibleBindings(
    {
        "X": TensorType("FP32", (4,), is_batched=True, is_optional=False, origin="the test"),
        "NAME": TensorType("BYTES", (1,), is_batched=True, is_optional=True, origin="the test"),
    },
    {"X": 0, "NAME": 1},
)


@settings(FUZZ, max_examples=NUM_INPUTS * 50)
@given(st.lists(st.sampled_from(TOKENS), max_size=12).map(" ".join) | st.text(max_size=30))
def test_any_expression(source: str) -> None:
    """Any words of the language, and any text: compiled, or refused; evaluated, or the request is at fault."""
    try:
        condition = compile_condition(read_expression(source), WHEN, {"inputs": VISIBLE}, node="n")
    except ConditionError:
        return
    with contextlib.suppress(InvalidArgumentError):
        condition.evaluate([encode(np.zeros((1, 4), np.float32)), None], RequestScope({}, {}, "", 0, None))


DECODER = ImageDecoder(FORMATS, max_encoded_bytes=1 << 20, max_pixels=1 << 20, applies_orientation=True)
BEGINNINGS = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"RIFF\0\0\0\0WEBP", b"BM", b"GIF89a")


@settings(FUZZ, max_examples=NUM_INPUTS * 100)
@given(pictures() | st.tuples(st.sampled_from(BEGINNINGS), st.binary(max_size=300)).map(b"".join))
def test_any_picture(data: bytes) -> None:
    """Changed, cut and random bytes are a picture or INVALID_ARGUMENT."""
    with contextlib.suppress(InvalidArgumentError):
        DECODER.decode(data, "RGB")
