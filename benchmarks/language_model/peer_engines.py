"""One language-model engine in a process of its own: ``python peer_engines.py ENGINE FOLDER``.

It loads the model of the folder on one thread and answers each line of its input, a JSON list of output lengths, with
a JSON object: ``cpu_s`` and ``wall_s`` of generating so many tokens for as many prompts of 16 tokens, greedily. An
engine that batches statically generates the longest length for all of them. Runs in the environment of the peers, so it
imports nothing but the engine.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

NUM_PROMPT_TOKENS = 16
_MAX_TOKENS = 512
_NUM_PLACES = 32


def prompts(count: int, vocab_size: int) -> list[list[int]]:
    """The same ones every time; no special token among them."""
    return np.random.default_rng(0).integers(3, vocab_size, (count, NUM_PROMPT_TOKENS)).tolist()  # type: ignore[no-any-return]


class Genai:
    """onnxruntime-genai, a folder that its builder has made."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        import onnxruntime_genai

        path = folder / "genai_config.json"
        config = json.loads(path.read_text())
        config["model"]["decoder"]["session_options"].update(intra_op_num_threads=1, inter_op_num_threads=1)
        path.write_text(json.dumps(config))
        self._library = onnxruntime_genai
        self._model = onnxruntime_genai.Model(str(folder))
        self._vocab_size = vocab_size

    def generate(self, lengths: list[int]) -> None:
        """As the module says."""
        num_tokens = NUM_PROMPT_TOKENS + max(lengths)
        parameters = self._library.GeneratorParams(self._model)
        parameters.set_search_options(
            max_length=num_tokens, min_length=num_tokens, batch_size=len(lengths), do_sample=False
        )
        generator = self._library.Generator(self._model, parameters)
        generator.append_tokens(np.array(prompts(len(lengths), self._vocab_size), np.int32))
        while not generator.is_done():
            generator.generate_next_token()


class CTranslate2:
    """CTranslate2, a folder that its converter has made."""

    def __init__(self, folder: Path, vocab_size: int, compute_type: str) -> None:
        import ctranslate2

        self._generator = ctranslate2.Generator(
            str(folder), device="cpu", compute_type=compute_type, intra_threads=1, inter_threads=1
        )
        self._words = json.loads((folder / "vocabulary.json").read_text())
        self._vocab_size = vocab_size

    def generate(self, lengths: list[int]) -> None:
        """As the module says."""
        texts = [[self._words[token] for token in prompt] for prompt in prompts(len(lengths), self._vocab_size)]
        num_tokens = max(lengths)
        self._generator.generate_batch(
            texts, max_length=num_tokens, min_length=num_tokens, sampling_topk=1, include_prompt_in_result=False
        )


class LlamaCpp:
    """llama.cpp, a GGUF file; greedy, continuous: a sequence that ends makes room for the next."""

    def __init__(self, path: Path, vocab_size: int) -> None:
        import llama_cpp

        self._library = llama_cpp
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx, parameters.n_batch, parameters.n_ubatch = _NUM_PLACES * 128, 512, 512
        parameters.n_seq_max, parameters.n_threads, parameters.n_threads_batch = _NUM_PLACES, 1, 1
        self._context = llama_cpp.llama_init_from_model(self._model, parameters)
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = llama_cpp.llama_batch_init(512, 0, 1)
        self._vocab_size = vocab_size

    def generate(self, lengths: list[int]) -> None:
        """As the module says."""
        waiting = list(zip(prompts(len(lengths), self._vocab_size), lengths, strict=True))[::-1]
        free = list(range(_NUM_PLACES))
        running: dict[int, list[int]] = {}  # by place: the last token, its position, tokens to come
        while waiting or running:
            rows: list[tuple[int, int, int, bool]] = [
                (token, position, place, True) for place, (token, position, _) in running.items()
            ]
            while waiting and free and len(rows) + NUM_PROMPT_TOKENS <= 512:
                prompt, length = waiting.pop()
                place = free.pop()
                rows += [(token, at, place, at == len(prompt) - 1) for at, token in enumerate(prompt)]
                running[place] = [0, len(prompt) - 1, length]
            self._decode(rows, running)
            for place in [place for place, state in running.items() if not state[2]]:
                del running[place]
                free.append(place)
                self._library.llama_memory_seq_rm(self._memory, place, -1, -1)

    def _decode(self, rows: list[tuple[int, int, int, bool]], running: dict[int, list[int]]) -> None:
        batch = self._batch
        batch.n_tokens = len(rows)
        for index, (token, position, place, is_last) in enumerate(rows):
            batch.token[index], batch.pos[index], batch.logits[index] = token, position, is_last
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, place
        if self._library.llama_decode(self._context, batch):
            raise RuntimeError("llama_decode failed")
        for index, (_, _, place, is_last) in enumerate(rows):
            if is_last:
                logits = self._library.llama_get_logits_ith(self._context, index)
                state = running[place]
                state[0] = int(np.ctypeslib.as_array(logits, (self._vocab_size,)).argmax())
                state[1], state[2] = state[1] + 1, state[2] - 1


class Transformers:
    """Continuous batching of transformers, float32."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM, GenerationConfig

        torch.set_num_threads(1)
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="paged|sdpa")
        config = GenerationConfig(
            max_new_tokens=_MAX_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0, num_blocks=512,
            max_batch_tokens=256,
        )  # fmt: skip
        self._manager = model.init_continuous_batching(generation_config=config)
        self._manager.start()
        self._vocab_size = vocab_size

    def generate(self, lengths: list[int]) -> None:
        """As the module says."""
        for prompt, length in zip(prompts(len(lengths), self._vocab_size), lengths, strict=True):
            self._manager.add_request(prompt, max_new_tokens=length)
        num_left = len(lengths)
        while num_left:
            result = self._manager.get_result(timeout=60)
            if result is None:
                raise TimeoutError("no answer in 60 s")
            num_left -= result.is_finished()


class Weft:
    """The engine of Weft."""

    def __init__(self, folder: Path, vocab_size: int, **settings: Any) -> None:
        import threading

        import torch

        from weft.llm.config import EngineConfig
        from weft.llm.engine import Engine
        from weft.llm.models.model import TransformerModel
        from weft.llm.models.registry import read_config
        from weft.llm.models.weights import load_folder
        from weft.llm.request import Delta, EngineRequest, SamplingParams
        from weft.llm.runner import ModelRunner

        torch.set_num_threads(1)
        config = read_config(folder)
        engine = EngineConfig(
            max_num_seqs=32, max_model_len=_MAX_TOKENS, enable_prefix_caching=False, **settings
        ).resolved(config)
        dtype = getattr(torch, engine.dtype)
        model = TransformerModel(
            config,
            load_folder(folder, config, dtype=dtype),
            dtype=dtype,
            max_model_len=engine.max_model_len,
            deterministic=engine.deterministic,
            num_bits=engine.num_bits,
        )
        self._engine = Engine(
            ModelRunner(model, engine), engine, model_config=config, after_deltas=lambda: None, on_lost=print
        )
        self._engine.start()
        self._vocab_size = vocab_size
        self._num_left = threading.Semaphore(0)

        def take(delta: Delta) -> None:
            if delta.is_last:
                self._num_left.release()

        def request(prompt: list[int], length: int) -> EngineRequest:
            params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
            return EngineRequest(np.array(prompt, np.int32), params, take)

        self._request = request

    def generate(self, lengths: list[int]) -> None:
        """As the module says."""
        for prompt, length in zip(prompts(len(lengths), self._vocab_size), lengths, strict=True):
            self._engine.submit(self._request(prompt, length))
        for _ in lengths:
            self._num_left.acquire()


ENGINES: dict[str, Any] = {
    "weft fp32": lambda folder, vocab: Weft(folder, vocab, dtype="float32"),
    "weft bf16": lambda folder, vocab: Weft(folder, vocab, dtype="bfloat16"),
    "weft int8": lambda folder, vocab: Weft(folder, vocab, dtype="float32", quantization="int8"),
    "weft int4": lambda folder, vocab: Weft(folder, vocab, dtype="float32", quantization="int4"),
    "weft fp32 deterministic": lambda folder, vocab: Weft(folder, vocab, dtype="float32", deterministic=True),
    "onnxruntime-genai fp32": Genai,
    "onnxruntime-genai int4": Genai,
    "ctranslate2 fp32": lambda folder, vocab: CTranslate2(folder, vocab, "float32"),
    "ctranslate2 int8": lambda folder, vocab: CTranslate2(folder, vocab, "int8"),
    "llama.cpp q8_0": LlamaCpp,
    "llama.cpp q4_k": LlamaCpp,
    "transformers fp32": Transformers,
}


def main() -> None:
    """Answer every line; ends with its input, at once, as engines may have threads that do not."""
    engine = ENGINES[sys.argv[1]](Path(sys.argv[2]), int(sys.argv[3]))
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    print(json.dumps({"ready": True}), file=answers)
    for line in sys.stdin:
        cpu_s, wall_s = time.process_time(), time.perf_counter()
        engine.generate(json.loads(line))
        figures = {"cpu_s": time.process_time() - cpu_s, "wall_s": time.perf_counter() - wall_s}
        print(json.dumps(figures), file=answers)
    os._exit(0)


if __name__ == "__main__":
    main()
