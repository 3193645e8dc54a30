"""Compiled code on disk, of processes and processors that share a directory."""

import logging
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numba", reason="numba is not installed")

from weft_kernels import jit, jit_cache


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
