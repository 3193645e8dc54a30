"""``python -m benchmarks.capacity``: what ``weft plan`` predicts for this machine against what a model service takes.

Every sample model but the Python one, and a Llama of 134 million parameters, is served alone, with one thread and with
two, and asked for batches of several sizes. Predicted are the resident memory of the process and the time of a request:
of one thread the CPU time of the service, of two the time from request to answer. The machine is measured anew first,
with models that are none of these.
"""

import argparse
import json
import math
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from google.protobuf import text_format

from benchmarks import machine
from benchmarks.report import table
from weft.backends.llm.settings import read_settings
from weft.base.text.pbtxt import parse
from weft.capacity.costs.language_model import LanguageModel, read_language_model
from weft.capacity.estimates import FILENAMES, cost_model
from weft.capacity.machine.profile import ENGINE, LINEAR, ONNX, RUNTIMES, TORCH, MachineProfile
from weft.capacity.machine.runtimes import ModelService, call_of, generation_call, running_service
from weft.capacity.roofline import ThisMachine
from weft.capacity.subjects import Subject, find_subjects
from weft_protos.model_config_pb2 import ModelConfig, ModelInstanceGroup

ROOT = Path(__file__).resolve().parents[1]
#: Largest share by which a prediction may miss.
MAX_ERROR = 0.2
#: A model's own memory is judged from here on: that of a process differs by a few MiB from start to start.
_LEAST_OWN_BYTES = 32 << 20
_THREADS = {"onnxruntime": "intra_op_thread_count", "pytorch": "INTRA_OP_THREAD_COUNT", "llm": "num_threads"}
_DTYPES = {"FP32": np.float32, "INT64": np.int64, "INT32": np.int32}
_LLAMA = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 32000, "hidden_size": 768, "intermediate_size": 2048,
    "num_hidden_layers": 12, "num_attention_heads": 12, "num_key_value_heads": 12, "max_position_embeddings": 2048,
    "tie_word_embeddings": False, "dtype": "float32",
}  # fmt: skip
_LLAMA_CONFIG = 'backend: "llm"\nparameters { key: "load_format" value { string_value: "dummy" } }\n'
_INT8 = 'parameters { key: "quantization" value { string_value: "int8" } }\n'
#: Sequences at once, tokens of each prompt and answer.
_GENERATIONS = ((1, 64, 64), (8, 16, 64))
_MIB = 2**20


@dataclass(frozen=True)
class Compared:
    """One prediction.

    Attributes:
        model: Its name.
        num_threads: Of the runtime.
        what: ``"memory"``, ``"own memory"`` (without the service and its libraries) or ``"time"``.
        case: Batch and shape.
        predicted, measured: Bytes, or seconds.
    """

    model: str
    num_threads: int
    what: str
    case: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Share by which the prediction misses."""
        return self.predicted / self.measured - 1


def main(argv: Sequence[str] | None = None) -> int:
    """0 when every prediction is within ``MAX_ERROR``, 1 when one is not, or something failed."""
    parser = argparse.ArgumentParser(prog="benchmarks.capacity", description="Predicted against measured.")
    parser.add_argument("--repository", type=Path, default=ROOT / "model_repository", metavar="DIR")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="figures of this machine; default: measured anew")
    parser.add_argument("--only", default="", metavar="TEXT", help="models whose name has this text")
    parser.add_argument("--threads", type=int, action="append", default=[], metavar="N", help="default: 1 and 2")
    parser.add_argument("--json", action="store_true", help="print figures as JSON")
    options = parser.parse_args(argv)
    threads = options.threads or [1, 2][: machine.describe()["num_cores"]]  # type: ignore[misc]
    with TemporaryDirectory() as folder:
        profile = MachineProfile(
            options.profile or Path(folder) / "machine.json", lambda text: print(text, file=sys.stderr, flush=True)
        )
        compared = []
        for one in compare(options.repository, Path(folder), profile, threads, options.only):
            compared.append(one)
            print(f"{one.model} {one.num_threads} {one.what} {one.case} {one.error:+.0%}", file=sys.stderr, flush=True)
    if options.json:
        print(json.dumps({"machine": machine.describe(), "rows": [asdict(each) for each in compared]}))
    else:
        print(f"{machine.describe()['cpu']} ({machine.describe()['num_cores']} cores)")
        print(render(compared))
    missed = [each for each in compared if abs(each.error) > MAX_ERROR]
    print(f"{len(compared) - len(missed)} of {len(compared)} predictions within {MAX_ERROR:.0%}", file=sys.stderr)
    return 1 if missed or not compared else 0


def compare(
    repository: Path, folder: Path, profile: MachineProfile, threads: Sequence[int], only: str
) -> Iterator[Compared]:
    """Serve each model in turn and compare."""
    _write_llamas(folder / "llamas")
    samples = [*find_subjects(repository, []), *find_subjects(folder / "llamas", [])]
    for number in threads:  # what is needed is measured before, so that it does not lie between the models
        for section in (ONNX, TORCH, RUNTIMES, LINEAR, ENGINE):
            profile.section(section, number)
    for sample in samples:
        if sample.backend not in _THREADS or only not in sample.name:
            continue
        for number in threads:
            root = folder / f"{sample.name}-{number}"
            _write_alone(sample, root, number)
            subject = find_subjects(root, [sample.name])[0]
            with running_service(root, num_threads=number) as service:
                if subject.backend == "llm":
                    yield from _language(subject, service, profile, number)
                else:
                    yield from _batches(subject, service, profile, number)
            shutil.rmtree(root)


def _write_alone(sample: Subject, root: Path, num_threads: int) -> None:
    """A repository with one model of one instance with so many threads; its files are links."""
    own = sample.context.directory.parent
    target = root / sample.name
    (target / sample.context.directory.name).parent.mkdir(parents=True)
    (target / sample.context.directory.name).symlink_to(sample.context.directory.resolve())
    config, _ = parse((own / "config.pbtxt").read_bytes(), ModelConfig(), file="config.pbtxt")
    del config.model_warmup[:]
    del config.instance_group[:]
    config.instance_group.add(count=1, kind=ModelInstanceGroup.KIND_CPU)
    config.parameters[_THREADS[sample.backend]].string_value = str(num_threads)
    (target / "config.pbtxt").write_text(text_format.MessageToString(config))


def _batches(subject: Subject, service: ModelService, profile: MachineProfile, num_threads: int) -> Iterator[Compared]:
    signature = subject.context.signature
    file = subject.context.directory / (subject.filename or FILENAMES[subject.backend])
    model = cost_model(subject.backend, file, signature)
    assert model is not None  # noqa: S101
    device = ThisMachine(profile)
    runtime = device.runtime_bytes(subject.backend)
    runtimes = profile.section(RUNTIMES, num_threads)
    is_open = any(-1 in spec.dims for spec in signature.inputs)
    cases = [(1, 16), (1, 128), (4, 128), (32, 16)] if is_open else [(1, 0), (8, 0), (subject.max_batch_size, 0)]
    calls, costs, answers = {}, {}, {}
    peak_bytes = 0
    for rows, length in dict.fromkeys(cases):
        case = f"{rows} x {length}" if length else str(rows)
        shapes = {spec.name: tuple(length if d < 0 else d for d in spec.dims) for spec in signature.inputs}
        arrays = {s.name: np.ones((rows, *shapes[s.name]), _DTYPES[s.datatype]) for s in signature.inputs}
        calls[case], costs[case] = call_of(subject.name, arrays), model.batch(rows, shapes)
        answers[case] = service.answered(calls[case])
        peak_bytes = max(peak_bytes, costs[case].peak_bytes)
        own = model.weights.num_bytes + model.weights.packed_bytes + peak_bytes
        yield from _memory(subject.name, num_threads, case, own, runtime, service)
    path_s = runtimes.request_cpu_s if num_threads == 1 else runtimes.request_s
    for case, cost in costs.items():
        answered = answers[case].best(service.answered(calls[case]))  # the machine may have been slow for a moment
        predicted_s = path_s[subject.backend] + runtimes.byte_s * (cost.input_bytes + cost.output_bytes)
        predicted_s += device.batch(subject.backend, num_threads, cost).seconds
        measured_s = answered.cpu_s if num_threads == 1 else answered.wall_s
        yield Compared(subject.name, num_threads, "time", case, predicted_s, measured_s)


def _memory(
    name: str, num_threads: int, case: str, own_bytes: int, runtime_bytes: int, service: ModelService
) -> Iterator[Compared]:
    measured = service.rss_bytes()
    yield Compared(name, num_threads, "memory", case, runtime_bytes + own_bytes, measured)
    if own_bytes >= _LEAST_OWN_BYTES:
        yield Compared(name, num_threads, "own memory", case, own_bytes, max(measured - runtime_bytes, 1))


def _language(subject: Subject, service: ModelService, profile: MachineProfile, num_threads: int) -> Iterator[Compared]:
    settings = read_settings(subject.context, subject.instance(on_gpu=False))
    engine = settings.engine.resolved(_float32(subject.context.directory))
    model = read_language_model(subject.context.directory, engine, needs_files=settings.has_weights)
    device = ThisMachine(profile)
    times = profile.section(ENGINE, num_threads)
    own = model.weight_bytes + model.activation_bytes + model.kv_bytes(0, 0)
    for num_at_once, prompt, answer in _GENERATIONS:
        ids = np.arange(1, prompt + 1, dtype=np.int32)
        call: Any = generation_call(subject.name, ids, answer)
        answered = service.answered(call, num_at_once=num_at_once)
        predicted_s = times.request_s + (num_at_once - 1) * times.next_request_s
        predicted_s += _generation_s(model, device, num_at_once, prompt, answer)
        case = f"{num_at_once} x {prompt} + {answer}"
        measured_s = answered.cpu_s if num_threads == 1 else answered.wall_s
        yield Compared(subject.name, num_threads, "time", case, predicted_s, measured_s)
        yield from _memory(subject.name, num_threads, case, own, device.runtime_bytes("llm"), service)


def _generation_s(model: LanguageModel, device: ThisMachine, num_at_once: int, prompt: int, answer: int) -> float:
    """Prompts in steps that are as full as may be, then a step for each token."""
    num_tokens = num_at_once * prompt
    num_steps = math.ceil(num_tokens / model.engine.max_num_batched_tokens)
    prefill_s = num_steps * device.prefill(model, num_tokens // num_steps, prompt).seconds
    decode_s: float = sum(device.decode(model, num_at_once, prompt + done).seconds for done in range(1, answer))
    return float(prefill_s + decode_s)


def _float32(folder: Path) -> Any:
    from weft.llm.models.registry import read_config  # noqa: PLC0415

    return read_config(folder)


def _write_llamas(root: Path) -> None:
    """The Llama with random weights, as numbers and as 8-bit codes."""
    for name, more in (("llama-134m", ""), ("llama-134m-int8", _INT8)):
        (root / name / "1").mkdir(parents=True)
        (root / name / "1" / "config.json").write_text(json.dumps(_LLAMA))
        (root / name / "config.pbtxt").write_text(_LLAMA_CONFIG + more)


def render(compared: Sequence[Compared]) -> str:
    """A line for each prediction, and the largest error of each model."""
    lines = [["model", "threads", "what", "batch", "predicted", "measured", "error"]]
    for each in compared:
        unit, digits = (1e3, "ms") if each.what == "time" else (1 / _MIB, "MiB")
        lines.append(
            [
                each.model,
                str(each.num_threads),
                each.what,
                each.case,
                f"{each.predicted * unit:.3g} {digits}",
                f"{each.measured * unit:.3g} {digits}",
                f"{each.error:+.0%}{' *' if abs(each.error) > MAX_ERROR else ''}",
            ]
        )
    worst = [["model", "worst time", "worst memory"]]
    for name in dict.fromkeys(each.model for each in compared):
        own = [each for each in compared if each.model == name]
        times = [abs(each.error) for each in own if each.what == "time"]
        sizes = [abs(each.error) for each in own if each.what != "time"]
        worst.append([name, f"{max(times):.0%}", f"{max(sizes):.0%}"])
    return table(lines, left_columns=(0, 2, 3)) + "\n\n" + table(worst, left_columns=(0,))


if __name__ == "__main__":
    sys.exit(main())
