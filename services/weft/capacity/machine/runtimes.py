"""What a model service takes apart from its models: memory of each runtime, and time of a request.

Models made for that are served: of a few numbers, and language models of a few layers with random weights.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from weft.capacity.machine.model_service import Answered, ModelService, call_of, running_service, settled_rss_bytes
from weft.capacity.machine.onnx_times import best_run_s, make_session, several
from weft.capacity.machine.profile import EngineTimes, Runtimes

_CONFIG = """backend: "{backend}"
max_batch_size: 8
input [ {{ name: "x" data_type: TYPE_FP32 dims: [ {dims} ] }} ]
output [ {{ name: "x_out" data_type: TYPE_FP32 dims: [ {dims} ] }} ]
instance_group [ {{ count: 1 kind: KIND_CPU }} ]
parameters {{ key: "{threads}" value {{ string_value: "{num_threads}" }} }}
"""
_THREADS = {"onnxruntime": "intra_op_thread_count", "pytorch": "INTRA_OP_THREAD_COUNT"}
_LLM_CONFIG = """backend: "llm"
instance_group [ {{ count: 1 kind: KIND_CPU }} ]
parameters {{ key: "load_format" value {{ string_value: "dummy" }} }}
parameters {{ key: "num_blocks" value {{ string_value: "64" }} }}
parameters {{ key: "max_num_seqs" value {{ string_value: "16" }} }}
parameters {{ key: "num_threads" value {{ string_value: "{num_threads}" }} }}
"""
_LARGE = 1 << 18
_FEW_LAYERS, _MANY_LAYERS = 2, 10
_FEW_TOKENS, _MANY_TOKENS = 8, 72
_AT_ONCE = 8
#: Starts of each service: for seconds on end a shared machine may take half as long again for a request.
_NUM_STARTS = 3


def measure_runtimes(num_threads: int) -> Runtimes:
    """Start services of each backend in turn; takes about twenty seconds."""
    memory: dict[str, int] = {}
    with TemporaryDirectory() as folder, running_service(Path(folder)) as service:
        memory[""] = settled_rss_bytes(service)
    small = call_of("small", {"x": np.ones((1, 4), np.float32)})
    with TemporaryDirectory() as folder:
        _write(Path(folder) / "large", "onnxruntime", _LARGE, num_threads)
        with running_service(Path(folder), num_threads=num_threads) as service:
            large = service.answered(call_of("large", {"x": np.ones((1, _LARGE), np.float32)}))
    answers = dict.fromkeys(_THREADS, Answered(math.inf, math.inf))
    with TemporaryDirectory() as folder:
        for backend in _THREADS:
            _write(Path(folder) / backend / "small", backend, 4, num_threads)
        for backend in (*_THREADS,) * _NUM_STARTS:
            with running_service(Path(folder) / backend, num_threads=num_threads) as service:
                memory[backend] = settled_rss_bytes(service)
                answers[backend] = answers[backend].best(service.answered(small))
    run_s = {"onnxruntime": _least_run_s(num_threads), "pytorch": _least_program_s(num_threads)}
    return Runtimes(
        memory,
        {name: max(answered.wall_s - run_s[name], 1e-6) for name, answered in answers.items()},
        {name: max(answered.cpu_s - run_s[name], 1e-6) for name, answered in answers.items()},
        max((large.cpu_s - answers["onnxruntime"].cpu_s) / (2.0 * 4 * (_LARGE - 4)), 1e-12),
    )


def measure_engine(num_threads: int) -> EngineTimes:
    """Times of the engine, and memory of a service with one; takes about fifteen seconds."""
    with TemporaryDirectory() as folder:
        root = Path(folder)
        for name, num_layers in (("few", _FEW_LAYERS), ("many", _MANY_LAYERS)):
            _write_llm(root / name, num_layers, num_threads)
        with running_service(root, num_threads=num_threads) as service:
            few, few_short = _token_s(service, "few", 1)
            many, _ = _token_s(service, "many", 1)
            together, together_short = _token_s(service, "few", _AT_ONCE)
    with TemporaryDirectory() as folder:
        _write_llm(Path(folder) / "few", _FEW_LAYERS, num_threads)
        with running_service(Path(folder), num_threads=num_threads) as service:
            memory = settled_rss_bytes(service)
    request_s = max(few_short - _FEW_TOKENS * few, 0.0)
    layer_s = max((many - few) / (_MANY_LAYERS - _FEW_LAYERS), 1e-6)
    return EngineTimes(
        max(few - _FEW_LAYERS * layer_s, 1e-6),
        layer_s,
        max((together - few) / (_AT_ONCE - 1), 0.0),
        request_s,
        max((together_short - _FEW_TOKENS * together - request_s) / (_AT_ONCE - 1), 0.0),
        memory,
    )


def generation_call(name: str, prompt: np.ndarray[tuple[int], np.dtype[np.int32]], num_tokens: int) -> object:
    """A request for so many tokens after a prompt, whatever comes."""
    call = call_of(name, {"input_ids": prompt}, {"max_tokens": num_tokens, "temperature": "0"})
    call.parameters = {**call.parameters, "ignore_eos": True}
    return call


def _token_s(service: ModelService, name: str, num_at_once: int) -> tuple[float, float]:
    """CPU seconds of a step, and of a whole short request."""
    prompt = np.arange(1, 5, dtype=np.int32)
    short, long = (
        service.answered(generation_call(name, prompt, number), num_at_once=num_at_once).cpu_s  # type: ignore[arg-type]
        for number in (_FEW_TOKENS, _MANY_TOKENS)
    )
    return (long - short) / (_MANY_TOKENS - _FEW_TOKENS), short


def _least_run_s(num_threads: int) -> float:
    """Time of the smallest call of ONNX Runtime, which a request's time is given without."""
    return best_run_s(make_session(several((1, 4), 1), num_threads), (1, 4))


def _least_program_s(num_threads: int) -> float:
    """Time of the smallest program of torch, likewise."""
    from weft.capacity.machine.torch_times import measure_torch_times  # noqa: PLC0415  # torch, which takes seconds

    times = measure_torch_times(num_threads)
    return times.run_s + times.node_s


def _write(folder: Path, backend: str, size: int, num_threads: int) -> None:
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(
        _CONFIG.format(backend=backend, dims=size, threads=_THREADS[backend], num_threads=num_threads)
    )
    if backend == "onnxruntime":
        (folder / "1" / "model.onnx").write_bytes(several(("batch", size), 1))
        return
    import torch  # noqa: PLC0415  # the extra [model]

    class Negation(torch.nn.Module):  # type: ignore[misc]  # torch is not typed
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"x_out": -x}

    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(Negation(), (torch.ones(2, size),), dynamic_shapes={"x": {0: batch}})
    torch.export.save(program, folder / "1" / "model.pt2")


def _write_llm(folder: Path, num_layers: int, num_threads: int) -> None:
    config: Mapping[str, object] = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": num_layers, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32,
        "max_position_embeddings": 256, "dtype": "float32",
    }  # fmt: skip
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "config.json").write_text(json.dumps(config))
    (folder / "config.pbtxt").write_text(_LLM_CONFIG.format(num_threads=num_threads))
