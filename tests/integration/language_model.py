"""A model service with tiny random language models, and clients for it."""

import json
import os
import queue
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tests.processes import Running, running
from tritonclient import grpc as triton
from tritonclient.utils import InferenceServerException

TIMEOUT_S = 30.0
#: A step that computes the beginning of a text that begins with this token fails.
POISON_ID = 7
#: Longest text of the models, in tokens.
MAX_LEN = 2048
VOCAB_SIZE = 384

_TEXTS = [
    "the quick brown fox jumps over the lazy dog",
    "zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich",
]


def write_folder(folder: Path) -> None:
    """A Hugging Face folder: a random model in float32 and a byte-level tokenizer."""
    import tokenizers  # these are large, and the service of this file does without
    import torch
    import transformers

    torch.set_num_threads(1)
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_LEN,
        bos_token_id=0,
        eos_token_id=1,
        initializer_range=0.3,
        dtype="float32",
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    pre = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre, tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=["<s>", "</s>"], initial_alphabet=pre.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(_TEXTS * 10, trainer)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(str(folder / "tokenizer.json"))


def write_model(root: Path, name: str, folder: Path, text: str = "", **parameters: object) -> None:
    """A model of the repository with the files of a Hugging Face folder."""
    (root / name).mkdir()
    (root / name / "1").symlink_to(folder, target_is_directory=True)
    spelled = "".join(
        f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n' for key, value in parameters.items()
    )
    (root / name / "config.pbtxt").write_text(f'backend: "llm"\n{text}\n{spelled}')


class Service(Running):
    """A running model service."""

    def figure(self, name: str, model: str, **labels: str) -> float:
        """One sample of a model, or of its only instance."""
        wanted = {"model": model, **labels}
        found = [
            value
            for key, value in self.scrape().items()
            if key.startswith(name + "{") and all(f'{label}="{text}"' in key for label, text in wanted.items())
        ]
        assert 1 == len(found), (name, wanted, found)
        return found[0]


@contextmanager
def running_service(repository: Path, *arguments: str) -> Iterator[Service]:
    """A model service over the repository; unless it was killed it has ended by itself when the block is left."""
    explicit = ("--model-control-mode", "explicit", "--load-model", "*")
    path = {"PYTHONPATH": os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH"))))}
    arguments = ("--repository", str(repository), *explicit, *arguments)
    with running(__name__, *arguments, environment=path) as process:
        service = Service(process.process, {"grpc": process.grpc, "metrics": process.metrics})
        yield service
        process.was_killed = service.was_killed


def inputs_of(prompt: "str | bytes | Sequence[int] | None", **given: Any) -> list[triton.InferInput]:
    """Inputs of a request: the prompt as text or ids, ``sampling`` as a dict or as JSON, and flags by name."""
    arrays: dict[str, Any] = {}
    if isinstance(prompt, str | bytes):
        arrays["text_input"] = np.array([prompt.encode() if isinstance(prompt, str) else prompt], np.object_)
    elif prompt is not None:
        arrays["input_ids"] = np.array(prompt, np.int32)
    sampling = given.pop("sampling", {})
    text = sampling if isinstance(sampling, str | bytes) else json.dumps({"temperature": 0, "max_tokens": 8} | sampling)
    arrays["sampling_parameters"] = np.array([text.encode() if isinstance(text, str) else text], np.object_)
    arrays |= {name: np.array([flag]) for name, flag in given.items()}
    inputs = []
    for name, array in arrays.items():
        datatype = {"O": "BYTES", "b": "BOOL", "i": "INT32"}[array.dtype.kind]
        inputs.append(triton.InferInput(name, list(array.shape), datatype))
        inputs[-1].set_data_from_numpy(array)
    return inputs


def outputs_of(names: Sequence[str]) -> "list[triton.InferRequestedOutput] | None":
    """Requested outputs; None for none."""
    return [triton.InferRequestedOutput(name) for name in names] or None


class Answer(NamedTuple):
    """One response.

    Attributes:
        request_id: Whose.
        outputs: Arrays by name; of texts, lists of str.
        is_final: None follows.
        error: Why the request ended without more; "" where it did not.
    """

    request_id: str
    outputs: Mapping[str, Any]
    is_final: bool
    error: str = ""

    @property
    def text(self) -> str:
        """Of the first choice."""
        return str(self.outputs["text_output"][0])


def answer_of(result: Any) -> Answer:
    """What a result of tritonclient says."""
    response = result.get_response()
    outputs = {}
    for output in response.outputs:
        array = result.as_numpy(output.name)
        outputs[output.name] = [text.decode() for text in array] if array.dtype == np.object_ else array
    parameters = response.parameters
    is_final = "triton_final_response" not in parameters or parameters["triton_final_response"].bool_param
    return Answer(response.id, outputs, is_final)


def ask(service: Service, model: str, prompt: Any, outputs: Sequence[str] = (), **options: Any) -> Answer:
    """The answer to a unary call; ``client_timeout`` and ``parameters`` are those of tritonclient."""
    call = {key: options.pop(key) for key in ("client_timeout", "parameters", "priority") if key in options}
    with triton.InferenceServerClient(service.grpc) as client:
        return answer_of(client.infer(model, inputs_of(prompt, **options), outputs=outputs_of(outputs), **call))


class Stream:
    """A tritonclient stream; ``take`` gives what its callback got, in order."""

    def __init__(self, service: Service, **options: Any) -> None:
        self.client = triton.InferenceServerClient(service.grpc)
        self._got: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self.client.start_stream(callback=self._called, **options)

    def send(self, model: str, prompt: Any, request_id: str = "", outputs: Sequence[str] = (), **options: Any) -> None:
        """A request; ``priority``, ``timeout`` and ``parameters`` are those of tritonclient."""
        call = {key: options.pop(key) for key in ("priority", "timeout", "parameters") if key in options}
        self.client.async_stream_infer(
            model,
            inputs_of(prompt, **{"stream": True, **options}),
            outputs=outputs_of(outputs),
            request_id=request_id,
            **call,
        )

    def take(self) -> Answer:
        """The next response."""
        return self._got.get(timeout=TIMEOUT_S)

    def rest(self) -> list[Answer]:
        """Responses until one is final."""
        answers = [self.take()]
        while not answers[-1].is_final:
            answers.append(self.take())
        return answers

    def close(self, *, cancels: bool = False) -> None:
        """The stream has ended; with ``cancels`` its requests are cancelled."""
        self.client.stop_stream(cancel_requests=cancels)
        self.client.close()

    def _called(self, result: Any, error: InferenceServerException | None) -> None:
        self._got.put(Answer("", {}, True, str(error)) if error is not None else answer_of(result))


def _serve() -> None:
    """The model service, but that poisoned steps fail."""
    from weft.backends import BACKENDS
    from weft.llm import runner
    from weft.serving.main import main

    run = runner.ModelRunner.run

    def run_or_fail(self: runner.ModelRunner, plan: Any) -> Any:
        if ((plan.token_ids == POISON_ID) & (plan.positions == 0)).any():
            raise RuntimeError("poisoned")
        return run(self, plan)

    runner.ModelRunner.run = run_or_fail  # type: ignore[method-assign]
    sys.exit(main("model", BACKENDS))


if __name__ == "__main__":
    _serve()
