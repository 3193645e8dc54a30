"""The examples of docs/extending.md run as they stand there."""

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from weft.base.core import CallContext, InferCall
from weft.base.errors import InvalidArgumentError, WeftError
from weft.base.tensors import Array, decode, encode
from weft.serving.backends.base import Backend
from weft.serving.core import ServingCore

PAGE = (Path(__file__).parents[3] / "docs/extending.md").read_text()


def blocks(section: str, language: str) -> list[str]:
    """Code of one section of the page."""
    text = PAGE.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    assert text, section
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def module(code: str, name: str) -> ModuleType:
    """The code as a module that can be imported from nowhere."""
    made = ModuleType(name)
    exec(compile(code, f"docs/extending.md: {name}", "exec"), made.__dict__)
    return made


async def infer(root: Path, backends: Mapping[str, type[Backend]], inputs: Array) -> Array:
    """Output Y of the one model of a repository for X."""
    core = ServingCore(root, backends, num_gpus=0)
    await core.start()
    try:
        result = await core.infer(InferCall("m", inputs={"X": encode(inputs)}), CallContext())
    finally:
        await core.close(grace_s=5)
    return decode(result.outputs["Y"])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Folder of the model ``m``, with an empty version."""
    (tmp_path / "m" / "1").mkdir(parents=True)
    return tmp_path / "m"


def test_a_transform(folder: Path) -> None:
    """The transform computes, reads its parameter, and refuses the row that has no logarithm."""
    (code,), (config,) = blocks("A transform", "python"), blocks("A transform", "pbtxt")
    (folder / "config.pbtxt").write_text(config)
    backends = {"log": module(code, "log").LogBackend}
    given = np.array([[0, 1], [2, 3]], np.float32)
    assert np.allclose(np.log(given + 1), asyncio.run(infer(folder.parent, backends, given)))
    with pytest.raises(InvalidArgumentError, match=r"input 'X' row 1: -1.0 at \[1\]; send larger numbers"):
        asyncio.run(infer(folder.parent, backends, np.array([[0, 1], [2, -2]], np.float32)))


def test_a_backend(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The backend loads its weights and computes; without them the model is not served, and the log has the cure."""
    (code,), (config,) = blocks("A backend", "python"), blocks("A backend", "pbtxt")
    (folder / "config.pbtxt").write_text(config)
    backends = {"npz_linear": module(code, "npz_linear").NpzLinearBackend}
    given = np.array([[1, 2, 3]], np.float32)
    with pytest.raises(WeftError, match="no available versions"):
        asyncio.run(infer(folder.parent, backends, given))
    assert "save it with numpy.savez" in caplog.text
    weight, bias = np.arange(6, dtype=np.float32).reshape(3, 2), np.array([1, -1], np.float32)
    np.savez(folder / "1" / "weights.npz", weight=weight, bias=bias)
    assert np.allclose(given @ weight + bias, asyncio.run(infer(folder.parent, backends, given)))


def test_an_llm_architecture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The class reads a folder of transformers, and its logits are those of transformers, in chunks too."""
    import torch
    import transformers

    from weft.llm.models import registry
    from weft.llm.models.model import TransformerModel
    from weft.llm.models.weights import load_folder

    (code,) = blocks("An LLM architecture", "python")
    monkeypatch.setattr(registry, "ARCHITECTURES", [*registry.ARCHITECTURES, module(code, "phi3").Phi3])
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "pad_token_id": 0}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 9, "attn_implementation": "eager"}
    theirs = transformers.Phi3ForCausalLM(transformers.Phi3Config(**shape, **heads)).eval()
    for parameter in theirs.parameters():
        parameter.data.mul_(6.0 if parameter.dim() == 2 else 1.0)  # so that a wrong mask or rotation shows
    theirs.save_pretrained(tmp_path)
    text, block_size = torch.randint(0, 64, (30,)), 32
    with torch.no_grad():
        expected = theirs(text.unsqueeze(0)).logits[0]
    config = registry.read_config(tmp_path)
    model = TransformerModel(config, load_folder(tmp_path, config), max_model_len=64)
    kv, logits, first = model.new_kv(2, block_size), [], 0
    for chunk in text.split([13, 1, 16]):
        end = first + len(chunk)
        table, ends = torch.ones(1, 1, dtype=torch.int32), torch.tensor([end], dtype=torch.int32)
        start = torch.tensor([0, len(chunk)], dtype=torch.int32)
        places = torch.arange(first, end)
        hidden = model.forward(chunk, places.int(), kv, table, start, ends, block_size + places, len(chunk), end)
        logits.append(model.logits(hidden))
        first = end
    torch.testing.assert_close(torch.cat(logits), expected, atol=1e-4, rtol=1e-5)


COMPARE = """
import torch, reference, triton_kernel
for shape in [(1, 1), (3, 33), (2, 1025)]:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    formula = x.double().clamp(min=0) ** 2
    for module in (reference, triton_kernel):
        assert (module.relu_squared(x) - formula).abs().max() < 1e-4
try:
    triton_kernel.relu_squared(torch.zeros(4))
except ValueError as error:
    print(error)
"""


def test_a_kernel(tmp_path: Path) -> None:
    """Reference and kernel agree with the formula over odd sizes, and the launcher refuses what it cannot take."""
    reference, kernel, dispatch = blocks("A kernel", "python")
    (tmp_path / "reference.py").write_text(reference)
    (tmp_path / "triton_kernel.py").write_text(kernel)
    result = subprocess.run(
        [sys.executable, "-c", COMPARE],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "x must be 2-D and contiguous, got shape (4,); call .contiguous() first\n" == result.stdout, result.stderr
    assert '_pick("relu_squared", "relu_squared", x)' in dispatch
