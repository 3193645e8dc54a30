"""``python -m benchmarks.language_model.peers``: Weft's engine beside others on one thread of this CPU, in one run.

Every engine has a process with the same model, and they take turns. The others are installed into an environment of
their own, ``.venv-peers``, at the first run; models are converted to their formats under ``benchmarks/results/peers``.
"""

import argparse
import contextlib
import json
import math
import os
import shutil
import subprocess
import sys
import time
import venv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks import machine
from benchmarks.language_model.peaks import operations_per_s
from benchmarks.language_model.peer_engines import ENGINES
from benchmarks.report import machine_lines, table, write_json
from weft.llm.models.registry import read_config

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = ROOT / ".venv-peers"
WORK = ROOT / "benchmarks" / "results" / "peers"
PACKAGES = ("onnxruntime-genai==0.18.0", "ctranslate2==4.8.5", "onnx==1.23.2", "onnx_ir==1.1.0", "psutil")
ROWS = (1, 8, 32)
#: Tokens of each row in a measurement of steps.
_NUM_TOKENS = 33
#: Requests, places and output lengths of the measurement of arrivals.
_NUM_REQUESTS, _NUM_SEATS, _MEAN_TOKENS, _MAX_TOKENS = 64, 32, 24, 72

#: Types of llama.cpp for its engines; built from source at the first run.
_GGUF_TYPES = {"llama.cpp q8_0": "Q8_0", "llama.cpp q4_k": "Q4_K_M"}
_GGUF_PACKAGES = ("llama-cpp-python==0.3.36", "gguf==0.19.0")
_BUILD_S = 600.0

#: More than 32 requests at once take minutes on a CPU: transformers 5.23 waits between its steps.
_WITHOUT_ARRIVALS = ("transformers fp32",)

#: What each engine is measured against: Weft's goal is to cost at most as much.
GOALS = {
    "weft fp32": "onnxruntime-genai fp32",
    "weft bf16": "onnxruntime-genai fp32",
    "weft int8": "ctranslate2 int8",
    "weft int4": "onnxruntime-genai int4",
    "weft fp32 deterministic": "onnxruntime-genai fp32",
}


class Model(NamedTuple):
    """A Hugging Face folder, and its folder in the format of each engine that has one.

    Of its parameters all but an embedding of its own are multiplied with each token, those of the LM head among them.
    """

    name: str
    folder: Path
    vocab_size: int
    num_parameters: int
    num_multiplied: int
    num_in_head: int

    def folder_of(self, engine: str) -> Path:
        """What the engine loads; converted at the first call."""
        if engine.startswith("onnxruntime-genai"):
            precision = engine.split()[1]
            options = ["-m", "onnxruntime_genai.models.builder", "-i", str(self.folder), "-p", precision, "-e", "cpu"]
            return self._converted(f"genai-{precision}", [*options, "-c", str(WORK / "cache"), "-o"])
        if engine.startswith("ctranslate2"):
            return self._converted(
                "ct2", ["-m", "ctranslate2.converters.transformers", "--model", str(self.folder), "--output_dir"]
            )
        if engine in _GGUF_TYPES:
            script = Path(__file__).with_name("gguf_folder.py")
            kind = _GGUF_TYPES[engine]
            return self._converted(kind, [str(script), str(self.folder)], kind)
        return self.folder

    def _converted(self, name: str, options: list[str], *last: str) -> Path:
        result = WORK / f"{self.name}-{name}"
        if not result.exists():
            fresh = result.with_name(f"{result.name}.new")
            shutil.rmtree(fresh, ignore_errors=True)
            fresh.unlink(missing_ok=True)
            subprocess.run([_python(), *options, str(fresh), *last], check=True, stdout=sys.stderr)
            fresh.rename(result)
        return result


def llama_134m() -> Model:
    """A Llama of 134 million seeded random parameters, untrained."""
    folder = WORK / "llama-134m"
    if not (folder / "tokenizer.json").exists():
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=32000, hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12,
            num_key_value_heads=12, max_position_embeddings=2048, tie_word_embeddings=False,
        )  # fmt: skip
        LlamaForCausalLM(config).save_pretrained(folder)
        words = Tokenizer(models.WordLevel({f"t{token}": token for token in range(32000)}, unk_token="t0"))  # noqa: S106
        special = {"bos_token": "t1", "eos_token": "t2", "unk_token": "t0"}
        PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder)
    return _model("llama-134m", folder)


def _model(name: str, folder: Path) -> Model:
    config = read_config(folder)
    num_parameters = sum(math.prod(part.shape) for parts in config.weight_parts().values() for part in parts)
    num_in_head = config.vocab_size * config.hidden_size
    looked_up = 0 if config.tie_word_embeddings else num_in_head
    return Model(name, folder, config.vocab_size, num_parameters, num_parameters - looked_up, num_in_head)


@dataclass(frozen=True, slots=True)
class Row:
    """Figures of one engine.

    Attributes:
        engine: Its name.
        steps_ms: CPU time of a decode step by the number of rows, in each round.
        tokens_per_cpu_s: Tokens asked for per CPU-second when requests of many lengths come, in each round.
    """

    engine: str
    steps_ms: dict[int, list[float]]
    tokens_per_cpu_s: list[float]

    def step_ms(self, num_rows: int) -> float:
        """Median of the rounds."""
        return median(self.steps_ms[num_rows])


class Engine:
    """A process of ``peer_engines``; ``measure`` returns CPU and wall time in seconds."""

    def __init__(self, name: str, model: Model) -> None:
        self.name = name
        script = Path(__file__).with_name("peer_engines.py")
        python = sys.executable if name.startswith("weft") else _python()
        command = [python, str(script), name, str(model.folder_of(name)), str(model.vocab_size)]
        one_thread = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env={**os.environ, "HOME": str(WORK), **one_thread},
        )  # fmt: skip
        assert self._process.stdin is not None and self._process.stdout is not None  # noqa: S101, PT018
        self._questions, self._answers = self._process.stdin, self._process.stdout
        self._answer()

    def measure(self, lengths: Sequence[int]) -> tuple[float, float]:
        """Generate so many tokens for as many prompts."""
        print(json.dumps(list(lengths)), file=self._questions, flush=True)
        figures = self._answer()
        return figures["cpu_s"], figures["wall_s"]

    def step_ms(self, num_rows: int) -> float:
        """CPU time of one decode step: what tokens after the first cost, and not the prompts; milliseconds."""
        start_s, _ = self.measure([1] * num_rows)
        whole_s, _ = self.measure([_NUM_TOKENS] * num_rows)
        return (whole_s - start_s) / (_NUM_TOKENS - 1) * 1e3

    def arrivals(self, lengths: Sequence[int]) -> float:
        """Tokens asked for per CPU-second; an engine that batches statically gets one batch after the other."""
        is_continuous = self.name.startswith(("weft", "llama.cpp"))
        size = len(lengths) if is_continuous else _NUM_SEATS
        return sum(lengths) / sum(self.measure(lengths[at : at + size])[0] for at in range(0, len(lengths), size))

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        line = self._answers.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended with status {self._process.wait()}; run it alone to see why")
        return json.loads(line)  # type: ignore[no-any-return]


@contextlib.contextmanager
def _running(names: Sequence[str], model: Model) -> Iterator[list[Engine]]:
    engines: list[Engine] = []
    try:
        for name in names:
            try:
                engine = Engine(name, model)
                engines.append(engine)
                engine.measure([2, 3])
            except (RuntimeError, subprocess.CalledProcessError) as error:
                if name.startswith("weft"):
                    raise
                print(f"without {name}: {error}", file=sys.stderr)
                engines = [engine for engine in engines if engine.name != name]
        yield engines
    finally:
        for engine in engines:
            engine.close()


def _python() -> str:
    """The interpreter of the peers; torch and transformers come from this environment."""
    python, stamp = ENVIRONMENT / "bin" / "python", ENVIRONMENT / ".installed"
    if not stamp.exists() or stamp.read_text().split() != list(PACKAGES):
        print(f"installing {', '.join(PACKAGES)} into {ENVIRONMENT.name}", file=sys.stderr)
        shutil.rmtree(ENVIRONMENT, ignore_errors=True)
        venv.create(ENVIRONMENT, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES], check=True, stdout=sys.stderr)
        (site,) = (ENVIRONMENT / "lib").glob("python*/site-packages")
        (site / "beside.pth").write_text(str(Path(torch.__file__).parents[1]))
        stamp.write_text("\n".join(PACKAGES))
    return str(python)


def _why_no_llama_cpp() -> str:
    """Empty if llama.cpp is installed, or was installed now; else why it cannot be, which is not tried again."""
    python, stamp = _python(), ENVIRONMENT / ".llama_cpp"
    if not stamp.exists():
        print(f"building {_GGUF_PACKAGES[0]}, {_BUILD_S / 60:.0f} minutes at most", file=sys.stderr)
        options = "-DGGML_NATIVE=ON -DGGML_OPENMP=OFF -DLLAMA_CURL=OFF -DLLAVA_BUILD=OFF"
        command = ["nice", python, "-m", "pip", "install", "--quiet", *_GGUF_PACKAGES]
        try:
            subprocess.run(
                command, check=True, stdout=sys.stderr, timeout=_BUILD_S, env={**os.environ, "CMAKE_ARGS": options}
            )
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            stamp.write_text(f"its build failed: {error}")
        else:
            stamp.write_text("")
    return stamp.read_text()


def _ceilings() -> dict[str, float]:
    """Memory bandwidth of one thread in bytes/s, and what instructions for products reach in operations/s."""
    torch.set_num_threads(1)
    large = torch.ones(100_000_000)
    names = {"fp32": "float32", "bf16": "bfloat16", "int8": "int8", "int4": "int4"}
    peaks = {kind: operations_per_s(name) for kind, name in names.items()}
    return {"bytes": large.nbytes / min(_cpu_s(large.sum) for _ in range(5))} | peaks


def _cpu_s(work: Any) -> float:
    start_s = time.thread_time()
    work()
    return time.thread_time() - start_s


def _steps(engines: Sequence[Engine], num_rounds: int) -> dict[str, dict[int, list[float]]]:
    found: dict[str, dict[int, list[float]]] = {engine.name: {rows: [] for rows in ROWS} for engine in engines}
    for rows in ROWS:
        for engine in engines:
            engine.step_ms(rows)  # warm
        for _ in range(num_rounds):
            for engine in engines:
                found[engine.name][rows].append(engine.step_ms(rows))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; 0 in any case."""
    parser = argparse.ArgumentParser(prog="benchmarks.language_model.peers", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="of each measurement; default: 3")
    parser.add_argument("--model", choices=("llama-134m", "writer"), default="llama-134m", help="default: llama-134m")
    parser.add_argument("--engines", default=",".join(ENGINES), metavar="NAMES", help="some of the engines")
    options = parser.parse_args(argv)
    WORK.mkdir(parents=True, exist_ok=True)
    writer = ROOT / "model_repository" / "model" / "writer" / "1"
    model = llama_134m() if options.model == "llama-134m" else _model("writer", writer)
    lengths = np.random.default_rng(1).exponential(_MEAN_TOKENS, _NUM_REQUESTS).astype(int).clip(1, _MAX_TOKENS)
    ceilings = _ceilings()
    names = options.engines.split(",")
    if any(name in _GGUF_TYPES for name in names) and (reason := _why_no_llama_cpp()):
        print(f"without llama.cpp: {reason}", file=sys.stderr)
        names = [name for name in names if name not in _GGUF_TYPES]
    with _running(names, model) as engines:
        steps = _steps(engines, options.rounds)
        rates: dict[str, list[float]] = {engine.name: [] for engine in engines}
        for _ in range(options.rounds):
            for engine in engines:
                if engine.name not in _WITHOUT_ARRIVALS:
                    rates[engine.name].append(engine.arrivals(lengths.tolist()))
    rows = {name: Row(name, steps[name], rates[name]) for name in steps}
    described = machine.describe() | {"model": f"{model.name}, {model.num_parameters / 1e6:.0f} M parameters"}
    print("\n".join(machine_lines(described)), "\n")
    print("CPU-ms of a decode step, median of the rounds; how many times as much as the engine named; tokens per")
    print("CPU-second when requests of many lengths come; what share of the machine the weights' products alone need\n")
    lines = [["engine", *(f"{count} rows" for count in ROWS), "over", "", "arrivals", "bandwidth, 1", "peak, 32"]]
    for row in rows.values():
        peer = rows.get(GOALS.get(row.engine, ""))
        over = "" if peer is None else " / ".join(f"{row.step_ms(count) / peer.step_ms(count):.2f}" for count in ROWS)
        figures = [*(f"{row.step_ms(count):.1f}" for count in ROWS), over, "" if peer is None else peer.engine]
        lines.append([row.engine, *figures, _median(row.tokens_per_cpu_s), *_shares(row, model, ceilings)])
    print(table(lines, left_columns={0, 5}))
    results = ROOT / "benchmarks" / "results"
    write_json(results, list(rows.values()), described | {"ceilings_per_s": ceilings}, prefix="peers-")
    return 0


def _median(values: Sequence[float]) -> str:
    return f"{median(values):.0f}" if values else ""


def _shares(row: Row, model: Model, ceilings: dict[str, float]) -> list[str]:
    """Of the memory bandwidth with 1 row, and of the peak rate with 32."""
    kind = row.engine.split()[1]
    if kind not in ceilings:
        return ["", ""]
    # 4 bits: two 16-bit numbers for a group of 32, and 8 bits for the LM head
    each = {"fp32": 4, "bf16": 2, "int8": 1, "int4": 0.625}[kind]
    num_bytes = (model.num_multiplied - model.num_in_head) * each + model.num_in_head * max(each, 1)
    bandwidth = num_bytes / (row.step_ms(1) / 1e3) / ceilings["bytes"]
    peak = 2 * model.num_multiplied * 32 / (row.step_ms(32) / 1e3) / ceilings[kind]
    return [f"{bandwidth:.0%}", f"{peak:.0%}"]


if __name__ == "__main__":
    sys.exit(main())
