"""``weft quantize``: what it writes is the rounded model, what it reports is so, and what it refuses leaves nothing."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from tests.unit.llm.quantized_folders import CONFIG, FORMATS, gptq, save_folder
from tokenizers import Tokenizer, models, pre_tokenizers

from weft.base.errors import AlreadyExistsError
from weft.cli.__main__ import main
from weft.llm.models.weights import load_folder
from weft.tools.quantize import quantize_folder as writing
from weft.tools.quantize.calibration import Predictions, quantize_gptq
from weft_kernels.linear.quantized import QuantizedWeight
from weft_kernels.linear.quantizers import quantize_linear, quantize_nf4

torch.set_num_threads(1)

_QKV = "model.layers.1.self_attn.qkv_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A random model with a tokenizer of words, and a text of 400 of them."""
    model = tmp_path / "model"
    save_folder(model, gptq(), None, is_plain=lambda module: True)
    words = {f"w{number}": number for number in range(CONFIG.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(model / "tokenizer.json"))
    random = np.random.default_rng(0)
    (model / "text.txt").write_text(" ".join(f"w{number}" for number in random.integers(0, 64, 400)))
    return model


def quantize(folder: Path, method: str, *more: str, data: str = "text.txt") -> int:
    """Exit status of ``weft quantize`` into ``folder / "../small"``."""
    output = ["--output", str(folder.parent / "small")]
    return main(["quantize", str(folder), *output, "--method", method, "--data", str(folder / data), *more])


@pytest.mark.parametrize("method", ["int8", "int4", "nf4"])
def test_the_folder_is_the_rounded_model(folder: Path, method: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What is loaded are weights rounded alone and the other tensors as they were; the report is that of stdout."""
    assert quantize(folder, method, "--json", "--max-loss", "50%") == 0
    report = json.loads(capsys.readouterr().out)
    small = folder.parent / "small"
    assert json.loads((small / "report.json").read_text()) == report
    whole, weights = load_folder(folder, CONFIG), load_folder(small, CONFIG)
    half = {"is_symmetric": method == "int8", "scales_dtype": torch.float16}
    for name, weight in weights.items():
        exact = whole[name]
        assert isinstance(exact, torch.Tensor)
        if not name.endswith("proj.weight"):
            assert torch.equal(exact, weight)  # type: ignore[arg-type]
            continue
        assert isinstance(weight, QuantizedWeight)
        rounded = {
            "int8": lambda exact=exact: quantize_linear(exact, 8, **half),
            "int4": lambda exact=exact: quantize_linear(exact, 4, 32, **half),
            "nf4": lambda exact=exact: quantize_nf4(exact),
        }[method]()
        assert torch.equal(rounded.dequantize(), weight.dequantize())
    assert (small / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    assert {"int8": 8.25, "int4": 4.625, "nf4": 4.5}[method] == pytest.approx(report["bits_per_weight"], abs=0.1)
    assert report["loss"] == pytest.approx(report["perplexity_after"] / report["perplexity_before"] - 1)
    assert 0 < report["weight_error"] < {"int8": 0.01, "int4": 0.09, "nf4": 0.1}[method]
    assert report["bytes_after"] == (small / "model.safetensors").stat().st_size < report["bytes_before"]
    assert report["num_held_out_tokens"] == 50


def test_calibration(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """GPTQ looks at rows that are not held out, and writes what is loaded; jsonl does as well as text."""
    rows = (folder / "text.txt").read_text().split()
    lines = [json.dumps({"text": " ".join(rows[start : start + 20])}) for start in range(0, 400, 20)]
    (folder / "text.jsonl").write_text("\n".join([*lines, "", json.dumps(" ".join(rows[:30]))]))
    assert quantize(folder, "gptq", "--max-loss", "0.5", "--group-size", "16", data="text.jsonl") == 0
    table = capsys.readouterr().out
    assert "gptq, groups of 16; measured on" in table
    assert "perplexity" in table
    report = json.loads((folder.parent / "small" / "report.json").read_text())
    assert report["num_calibration_tokens"] > report["num_held_out_tokens"] > 0
    weight = load_folder(folder.parent / "small", CONFIG)[_QKV]
    assert isinstance(weight, QuantizedWeight)
    assert (4, 16) == (weight.num_bits, weight.group_size)


def test_gptq_keeps_outputs() -> None:
    """Codes chosen by correlated inputs change outputs less than rounding; without correlation they are the same."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 64, generator=generator)
    inputs = torch.randn(400, 12, generator=generator) @ torch.randn(12, 64, generator=generator)
    inputs += 0.1 * torch.randn(400, 64, generator=generator)
    alone = quantize_linear(weight, 4, 16, is_symmetric=False)
    chosen = quantize_gptq(weight, inputs.t() @ inputs, alone)

    def error(rounded: QuantizedWeight) -> float:
        return float((inputs @ (rounded.dequantize() - weight).t()).norm())

    assert error(chosen) < 0.6 * error(alone)
    unrelated = quantize_gptq(weight, torch.eye(64), alone)
    assert torch.equal(alone.dequantize(), unrelated.dequantize())


def test_a_loss_above_the_limit_writes_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Above --max-loss the report is printed, the exit status is 1, and neither a folder nor a part of one is left."""
    perplexities = iter([10.0, 10.2, 10.0, 10.2, 10.0, float("nan")])
    tokens = torch.arange(4)
    monkeypatch.setattr(
        "weft.tools.quantize.quantize_folder.evaluate", lambda model, rows: Predictions(next(perplexities), tokens)
    )
    before = sorted(folder.parent.iterdir())
    assert quantize(folder, "int4", "--max-loss", "1.9%") == 1
    texts = capsys.readouterr()
    assert "the perplexity would rise by 2.00%, and --max-loss is 1.90%; nothing was written" in texts.err
    assert "perplexity                        10      10.2   +2.00%" in texts.out
    assert before == sorted(folder.parent.iterdir())
    assert quantize(folder, "int4", "--max-loss", "0.021") == 0
    (folder.parent / "small").rename(folder.parent / "other")
    assert quantize(folder, "int4") == 1


def test_faults(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What cannot be done is told with its cure, exits with 1, and leaves nothing."""

    def refuses(message: str, method: str = "int8", *more: str, data: str = "text.txt", source: Path = folder) -> None:
        assert quantize(source, method, *more, data=data) == 1
        assert message in capsys.readouterr().err
        assert not [path for path in folder.parent.iterdir() if "small" in path.name]

    (folder / "empty.txt").write_text("")
    (folder / "bad.jsonl").write_text('{"text": "w1 w2"}\n{"prompt": 1}')
    (folder / "torn.jsonl").write_text('{"text": ')
    refuses("must have at least 4 rows of 16 tokens, got 0 tokens", data="empty.txt")
    refuses("bad.jsonl, line 2 must be a text, or an object with 'text', got", data="bad.jsonl")
    refuses("torn.jsonl, line 1 is not JSON", data="torn.jsonl")
    refuses("no file", data="missing.txt")
    with (folder / "huge.txt").open("wb") as huge:
        huge.truncate(2**40)  # takes no space
    refuses("must have at most 67108864 bytes, got 1099511627776; give a part", data="huge.txt")
    refuses("--group-size must be even and divide the 64 inputs", "int4", "--group-size", "24")
    quantised = folder.parent / "quantised"
    save_folder(quantised, *FORMATS["awq"])
    refuses("is quantised already; take the folder of the model before it was", source=quantised)
    (folder / "tokenizer.json").unlink()
    refuses("no tokenizer in ")
    output = folder.parent / "small"
    output.mkdir()
    assert quantize(folder, "int8") == 1
    assert [] == list(output.iterdir())


def test_output_that_exists(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder that exists is left as it is; one whose parent does not is not made."""
    output = folder.parent / "small"
    output.mkdir()
    assert quantize(folder, "int8") == 1
    assert "exists; nothing was done" in capsys.readouterr().err
    assert [] == list(output.iterdir())
    arguments = ["--method", "int8", "--data", str(folder / "text.txt")]
    assert main(["quantize", str(folder), "--output", str(folder.parent / "a" / "b"), *arguments]) == 1
    assert "which --output should be in; make it" in capsys.readouterr().err


@pytest.mark.parametrize("error", [SafetensorError("No space left on device"), KeyboardInterrupt()])
def test_an_interrupted_write_leaves_nothing(
    folder: Path, error: BaseException, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither a full disk nor an interrupt, while files are copied or weights written, leaves a folder behind."""

    def fail(*args: object) -> None:
        raise error

    for module, name in ((writing, "save_file"), (shutil, "copyfile")):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, fail)
            if isinstance(error, KeyboardInterrupt) or name == "copyfile":
                with pytest.raises(type(error)):
                    quantize(folder, "int8")
            else:
                assert quantize(folder, "int8") == 1
                assert "No space left on device" in capsys.readouterr().err
        assert [folder] == list(folder.parent.iterdir())


def test_an_output_that_appears_meanwhile_is_kept(folder: Path) -> None:
    """Of two commands with one output the later one fails, and what the first has written stays."""
    output = folder.parent / "small"

    writer = writing.FolderWriter(output, folder)
    output.mkdir()
    (output / "first").touch()
    with pytest.raises(AlreadyExistsError, match="exists; nothing was done"), writer:
        writer.finish()
    assert ["first"] == [path.name for path in output.iterdir()]
    assert {folder, output} == set(folder.parent.iterdir())
