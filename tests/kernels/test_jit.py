"""Compilation of CPU kernels: without numba, without a place for its cache, in files that are shared, while serving."""

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("numba", reason="numba is not installed")

import numba.core.caching

from weft_kernels import jit, jit_cache
from weft_kernels.attention import cpu_kernel, reference
from weft_kernels.vector_code import FLOAT32

_MULTIPLY_AND_ATTEND = """
import torch
from weft_kernels.attention import reference
from weft_kernels.linear import products
torch.set_num_threads(1)
weight, x = torch.randn(70, 64), torch.randn(3, 64)
for num_bits, atol in ((0, 1e-4), (8, 0.6)):
    torch.testing.assert_close(x @ weight.t(), products.linear(weight, num_bits=num_bits)(x), atol=atol, rtol=0.01)
q, one = torch.ones(1, 1, 8, dtype=torch.float16), torch.ones(1, dtype=torch.int32)
limits = {"max_q_len": 1, "max_ctx_len": 1}
kv, q_start = torch.ones(2, 2, 4, 1, 8, dtype=torch.float16), torch.tensor([0, 1], dtype=torch.int32)
assert torch.equal(q, reference.paged_attention(q, kv, one.view(1, 1), q_start, one, scale=1.0, **limits))
print([products.has_panels(dtype) for dtype in (torch.float32, torch.bfloat16, torch.int8)])
"""


def test_without_numba_the_log_says_what_is_slower(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    """A numba that cannot be imported is no error; the reason is logged once."""

    def fail(name: str) -> None:
        raise ImportError("Numba needs NumPy 2.5 or less")

    monkeypatch.setattr(jit.importlib, "import_module", fail)
    with caplog.at_level(logging.WARNING, "weft.kernels"):
        assert not jit.is_available.__wrapped__()
    assert "Numba needs NumPy 2.5 or less" in caplog.text


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}, ""),
        ({"NUMBA_DISABLE_JIT": "1"}, "unset NUMBA_DISABLE_JIT"),
    ],
)
def test_other_processors(environment: dict[str, str], words: str) -> None:
    """Code for a processor without AVX-512 and float16, as for every machine of a cluster, and without any, is right.

    LLVM would end the process at the first instruction that the processor lacks.
    """
    run = subprocess.run(
        [sys.executable, "-c", _MULTIPLY_AND_ATTEND],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (0, "[False, False, False]\n") == (run.returncode, run.stdout), run.stderr
    assert words in run.stderr


def test_a_kernel_is_compiled_where_nothing_can_be_kept(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """With neither directory of the cache writable, compiled code lives as long as the process, says the log once."""
    monkeypatch.setattr(numba.core.caching.CacheImpl, "_locator_classes", [])
    jit._say_that_nothing_is_kept.cache_clear()
    with caplog.at_level(logging.INFO, "weft.kernels"):
        double, triple = jit.jit(lambda x: 2 * x), jit.jit(lambda x: 3 * x)
    assert (42, 63) == (double(21), triple(21))
    assert 1 == caplog.text.count("NUMBA_CACHE_DIR names a directory that is writable")


@pytest.mark.parametrize("has_both", [False, True])
def test_serving_compiles_nothing(has_both):
    """What was prepared as a model loads serves every step: batches, prompts, windows; soft caps and sinks too."""
    options = {"soft_cap": 2.0, "sinks": torch.ones(8)} if has_both else {}
    reference.prepare(8, 2, 80, torch.float32, torch.float32, has_cap=has_both, has_sinks=has_both)
    kernel = cpu_kernel._kernel(80, 4, FLOAT32, FLOAT32, has_both, has_both)
    before = list(kernel.signatures)
    assert 1 == len(before)
    kv_layer = torch.zeros(9, 2, 16, 2, 80)
    for q_lens, window in (((1,), 0), ((1, 5, 40), 7)):
        q_start = torch.tensor([0, *q_lens]).cumsum(0).to(torch.int32)
        ctx_len = torch.tensor(q_lens, dtype=torch.int32)
        tables = torch.ones(len(q_lens), 3, dtype=torch.int32)
        q = torch.randn(sum(q_lens), 8, 80)
        limits = {"max_q_len": max(q_lens), "max_ctx_len": max(q_lens)}
        options |= {"scale": 0.1, "window": window, **limits}
        out = reference.paged_attention(q, kv_layer, tables, q_start, ctx_len, **options)
        assert torch.equal(torch.zeros_like(q), out)
    assert before == kernel.signatures


def _files(monkeypatch: pytest.MonkeyPatch, directory: Path) -> Any:
    """Those of a function, in the directory."""
    import numba

    monkeypatch.setattr(numba.config, "CACHE_DIR", str(directory))
    return jit.jit(lambda x: 3 * x)._cache._cache_file  # type: ignore[attr-defined]


def test_processes_that_compile_at_once_do_not_exchange_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of two kernels that are written while neither process sees the other's, each is read as what it is."""
    own, other = (_files(monkeypatch, tmp_path) for _ in range(2))
    write = type(own)._save_data

    def after_the_other(files: Any, name: str, data: Any) -> None:
        if files is own:
            monkeypatch.setattr(type(own), "_load_index", lambda _: {}, raising=False)
            other.save(("float64", "a processor without AVX-512"), "theirs")
            monkeypatch.undo()
        write(files, name, data)

    with monkeypatch.context() as patch:
        patch.setattr(type(own), "_save_data", after_the_other)
        own.save(("float64", "a processor with AVX-512"), "ours")
    assert own.load(("float64", "a processor without AVX-512")) in ("theirs", None)
    assert "ours" == own.load(("float64", "a processor with AVX-512"))
    assert own.load(("float32", "a processor with AVX-512")) is None


def test_damaged_and_unwritable_files_are_no_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What cannot be read is compiled again, with a word in the log; so is what no disk has room for."""
    files = _files(monkeypatch, tmp_path)
    files.save("key", "code")
    for path in tmp_path.rglob("*.nb?"):
        path.write_bytes(path.read_bytes()[:-3])
    with caplog.at_level(logging.WARNING, "weft.kernels"):
        assert files.load("key") is None
        assert "a kernel is compiled again" in caplog.text

        def fail(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(type(files), "_save_data", fail)
        files.save("key", "code")
    assert "cannot be kept" in caplog.text
    assert "No space left on device" in caplog.text


def test_a_kernel_is_kept_for_the_next_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A second compilation of one function reads what the first one wrote, in one file for each type."""
    import numba

    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))

    def compiled() -> Any:
        return jit.jit(lambda x: 2 * x)

    first, second = compiled(), compiled()
    assert (42, 5.0) == (first(21), first(2.5))
    assert 2 == len(list(tmp_path.rglob("*.nbc")))
    assert 42 == second(21)
    assert (1, 0) == (sum(second.stats.cache_hits.values()), sum(second.stats.cache_misses.values()))
    assert issubclass(type(first._cache), jit_cache.KernelCache)
