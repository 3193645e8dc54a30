"""A language model between its tokenizer and its detokenizer: the graph `write`, streamed through the router."""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from queue import Queue
from typing import Any, NamedTuple

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from tritonclient import grpc as triton
from tritonclient.utils import InferenceServerException

from weft.base.processes.process import Endpoint
from weft.cli.__main__ import main
from weft.mesh.running import running_mesh

TIMEOUT_S = 60.0
END = "<|endoftext|>"
TEXT = "größe 東京 🙂🧵 naïve 👩‍👩‍👧. Stop here, or not\n"
MAX_TOKENS = 24

#: A language model that says its prompt again, an id in each response; with `ignore_eos` until nobody listens.
ECHO = """
import json
import pathlib

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            given = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
            options = json.loads(given["sampling_parameters"][0]) if "sampling_parameters" in given else {}
            is_endless, ids = bool(options.get("ignore_eos")), given["input_ids"][1:]
            step = 1 if "stream" in given and given["stream"][0] else len(ids)
            sender, number = request.get_response_sender(), 0
            while (number < len(ids) or is_endless) and not sender.is_cancelled():
                is_last = number + step >= len(ids) and not is_endless
                reason = "length" if is_last else "None"
                sender.send(self.response(ids[number : number + step], ids[:number], reason, len(ids)), flags=is_last)
                number += step
            if is_endless:
                left = pathlib.Path(pb_utils.get_model_dir()).parent / "left"
                left.write_text(str(number))  # a pipe: returns when somebody reads
                sender.send(flags=1)

    def response(self, ids, context, reason, num_ids):
        tensors = {
            "text_output": np.array(["not of the detokenizer"], np.object_),
            "output_ids": ids,
            "context_ids": context,
            "finish_reason": np.array([reason], np.object_),
            "num_previous_tokens": np.array([len(context)], np.uint32),
            "num_input_tokens": np.array([num_ids], np.uint32),
            "num_output_tokens": np.array([len(ids)], np.uint32),
        }
        return pb_utils.InferenceResponse([pb_utils.Tensor(*tensor) for tensor in tensors.items()])
"""


class Answer(NamedTuple):
    """What a stream gave: the text of each response, and the last one's other outputs."""

    texts: list[str]
    finish_reason: str
    ids: list[int]

    @property
    def text(self) -> str:
        """Of the whole answer."""
        return "".join(self.texts)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Every byte is a token: an emoji is four."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet, 1)} | {END: 0}, merges=[]))
    tokenizer.add_special_tokens([END])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{END} $A", special_tokens=[(END, 0)])
    return tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, repository: Path, tokenizer: Tokenizer) -> Path:
    """The committed graph, tokenizer and detokenizer about the model that says everything again."""
    root = tmp_path_factory.mktemp("repository")
    for path in (
        "graphs/write/1/graph.pbtxt",
        *(f"{model}/config.pbtxt" for model in ("preprocess/tokenize_writer", "postprocess/detokenize_writer")),
    ):
        (root / path).parent.mkdir(parents=True)
        shutil.copyfile(repository / path, root / path)
    for model in ("preprocess/tokenize_writer", "postprocess/detokenize_writer"):
        (root / model / "1").mkdir()
        tokenizer.save(str(root / model / "1" / "tokenizer.json"))
    version = root / "model" / "writer" / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(ECHO)
    shutil.copyfile(Path(__file__).parents[1] / "data" / "echo.pbtxt", version.parent / "config.pbtxt")
    os.mkfifo(version.parent / "left")
    return root


@pytest.fixture(scope="module")
def echo(folder: Path) -> Iterator[str]:
    """Address of the router over that model."""
    with running_mesh(folder, ["--in-process"]) as endpoints:
        yield endpoints["router"].grpc


def inputs(text: str, *, streams: bool, **sampling: Any) -> list[triton.InferInput]:
    """A prompt, and how it is to be answered."""
    tensors = [triton.InferInput("text_input", [1], "BYTES"), triton.InferInput("stream", [1], "BOOL")]
    tensors[0].set_data_from_numpy(np.array([text.encode()], np.object_))
    tensors[1].set_data_from_numpy(np.array([streams]))
    if sampling:
        tensors.append(triton.InferInput("sampling_parameters", [1], "BYTES"))
        tensors[-1].set_data_from_numpy(np.array([json.dumps(sampling).encode()], np.object_))
    return tensors


def ask(
    address: str, graph: str, text: str, *, outputs: tuple[str, ...] = (), streams: bool = True, **sampling: Any
) -> Answer:
    """All responses to one prompt. Raises the error that one of them is."""
    got: Queue[Any] = Queue()
    texts, ids, reasons = [], [], []
    with triton.InferenceServerClient(address) as client:
        client.start_stream(callback=lambda result, error: got.put(error or result))
        client.async_stream_infer(
            graph,
            inputs(text, streams=streams, **sampling),
            outputs=[triton.InferRequestedOutput(name) for name in outputs] or None,
            enable_empty_final_response=True,
        )
        while True:
            result = got.get(timeout=TIMEOUT_S)
            if isinstance(result, InferenceServerException):
                raise result
            if result.get_response().outputs:
                texts.append(result.as_numpy("text_output")[0].decode())
                reasons.append(result.as_numpy("finish_reason")[0].decode())
                if (new := result.as_numpy("output_ids")) is not None:
                    ids += new.tolist()
            if result.get_response().parameters["triton_final_response"].bool_param:
                return Answer(texts, reasons[-1], ids)


def test_the_text_of_a_stream_is_that_of_its_ids(echo: str, tokenizer: Tokenizer) -> None:
    """A response for each byte; characters come whole, and together they are the text, as in one response."""
    got = ask(echo, "write", TEXT)
    assert len(TEXT.encode()) == len(got.texts)
    assert (TEXT, "length") == (got.text, got.finish_reason)
    assert set(TEXT) | {""} == set(got.texts)
    assert Answer([TEXT], "length", []) == ask(echo, "write", TEXT, streams=False)


def test_the_text_ends_before_a_stop_string(echo: str) -> None:
    """What may become one waits, until it is one or is not."""
    got = ask(echo, "write", TEXT, stop=["Stop there", "Stop here"])
    assert TEXT[: TEXT.index("Stop here")] == got.text
    assert "Stop here" == ask(echo, "write", "Stop here", stop=["Stop here!"]).text


def test_streams_side_by_side_keep_apart(echo: str) -> None:
    """Each answer is that of its own prompt, although the same detokenizer serves all."""
    got: dict[str, Queue[Any]] = {f"{number}🙂" * 9: Queue() for number in range(8)}
    with triton.InferenceServerClient(echo) as client:
        client.start_stream(callback=lambda result, error: got[result.get_response().id].put(error or result))
        for text in got:
            client.async_stream_infer("write", inputs(text, streams=True), request_id=text)
        for text, queue in got.items():
            texts = [queue.get(timeout=TIMEOUT_S).as_numpy("text_output")[0].decode() for _ in text.encode()]
            assert text == "".join(texts)


def test_a_client_that_leaves_ends_the_answer(echo: str, folder: Path) -> None:
    """The model hears of it, and the next answer is not mixed up with what was left."""
    got: Queue[Any] = Queue()
    with triton.InferenceServerClient(echo) as client:
        client.start_stream(callback=lambda result, error: got.put(error or result))
        client.async_stream_infer("write", inputs("🙂", streams=True, ignore_eos=True))
        assert b"" == got.get(timeout=TIMEOUT_S).as_numpy("text_output")[0]  # in the middle of a character
        client.stop_stream(cancel_requests=True)
        assert int((folder / "model" / "writer" / "left").read_text()) > 0
    assert TEXT == ask(echo, "write", TEXT).text


def test_what_cannot_be_read_is_refused(echo: str) -> None:
    """A prompt without room for an answer, and parameters of a text that ids do not tell."""
    for text, sampling, message in (
        ("a" * 511, {}, "input 'text_input' row 0 has 512 tokens; at most 511 are allowed"),
        ("a", {"n": 2}, "'n' must be 1 where the text is made of token ids alone, got 2"),
    ):
        with pytest.raises(InferenceServerException) as error:
            ask(echo, "write", text, **sampling)
        assert message in error.value.message()


def test_the_command_line_shows_the_text_as_it_comes(echo: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`weft infer` fills the input that must be given, asks for a stream, and tells how it ended."""
    assert 0 == main(["infer", "write", "--text", "größe 🙂", "--url", echo])
    text, *outputs, summary = capsys.readouterr().out.splitlines()
    assert "größe 🙂" == text
    assert 'finish_reason      BYTES[1]  ["length"]' in outputs
    assert summary.startswith(f"write: {len('größe 🙂'.encode())} responses in ")
    options = ["--input", "stream=false", "--output", "text_output"]
    assert 0 == main(["infer", "write", "--text", "größe 🙂", "--url", echo, *options])
    text, summary = capsys.readouterr().out.splitlines()
    assert "größe 🙂" == text
    assert summary.startswith("write: 1 response in ")


def test_the_sample_writes(mesh: Mapping[str, Endpoint], repository: Path) -> None:
    """Through the graph the trained model's text is its own, and that of its ids, streamed or not."""
    tokenizer = Tokenizer.from_file(str(repository / "model/writer/1/tokenizer.json"))
    outputs = ("text_output", "finish_reason", "output_ids")
    router, prompt = mesh["router"].grpc, "Return the"
    for sampling in ({"temperature": 0.0}, {"temperature": 1.0, "seed": 7}, {"seed": 1, "stop": [" the", "e"]}):
        sampling["max_tokens"] = MAX_TOKENS
        own = ask(router, "writer", prompt, outputs=outputs, **sampling)
        assert "stop" in sampling or tokenizer.decode(own.ids) == own.text
        assert own.text
        for streams in (True, False):
            got = ask(router, "write", prompt, streams=streams, **sampling)
            assert (own.text, own.finish_reason) == (got.text, got.finish_reason)
