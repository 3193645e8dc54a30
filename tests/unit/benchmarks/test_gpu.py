"""The benchmark of GPUs, on the CPU."""

import pytest
from benchmarks import gpu

from weft.serving.config.placement import count_gpus


@pytest.mark.skipif(count_gpus() > 0, reason="needs a machine without a GPU")
def test_a_machine_without_a_gpu_is_told(capsys):
    """Nothing is measured, and nothing is written."""
    assert 0 == gpu.main([])
    assert "no GPU here: nothing was measured\n" == capsys.readouterr().out


def test_every_case_runs(capsys, monkeypatch):
    """Each case answers its batches; a small picture is enough to see that."""
    cases = [
        type(case)(case.name, case.backend, case.file, case.optimization, case.num_instances, dims)
        for case, dims in ((case, (3, 8, 8) if case.dims == gpu._PICTURE else case.dims) for case in gpu.CASES)
    ]
    monkeypatch.setattr(gpu, "_PICTURE", (3, 8, 8))
    monkeypatch.setattr(gpu, "CASES", cases)
    assert 0 == gpu.main(["--cpu", "--rounds", "1", "--batches", "1"])
    out = capsys.readouterr().out
    assert all(case.name in out for case in cases)
