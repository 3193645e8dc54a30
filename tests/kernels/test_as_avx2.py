"""A CPU without AVX-512: products have kernels of their own there, and nothing is emulated."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from tests.as_avx2 import VARIABLES

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
#: Fails at a product of bfloat16 numbers by torch, which such a CPU emulates.
NO_EMULATION = """
import torch
from torch.utils._python_dispatch import TorchDispatchMode

class NoEmulation(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        name = function.overloadpacket.__name__
        is_product = name in ("mm", "addmm", "bmm", "baddbmm", "matmul", "linear", "convolution", "mkldnn_linear")
        of_bfloat16 = any(isinstance(one, torch.Tensor) and one.dtype == torch.bfloat16 for one in arguments)
        assert not (is_product and of_bfloat16), f"{name} of bfloat16 numbers is emulated on this CPU"
        return function(*arguments, **(keywords or {}))

mode = NoEmulation()
mode.__enter__()
"""
TRAINS = """
import numpy as np
from recipes.language_model import Llama, train
train(Llama(vocab_size=64), np.arange(4 * 512) % 64, num_steps=2)
"""
MULTIPLIES = """
from weft_kernels.linear import instruction_sets, products
from weft_kernels.linear.quantizers import quantize_linear
assert instruction_sets.NAME == "AVX2", instruction_sets.NAME
for dtype in (torch.float32, torch.bfloat16, torch.int8):
    assert products.has_panels(dtype), dtype
x, weight = torch.randn(7, 96), torch.randn(40, 96)
for dtype in (torch.float32, torch.bfloat16):
    products.linear(weight.to(dtype), dtype=dtype, deterministic=True)(x.to(dtype))
products.linear(weight.bfloat16(), dtype=torch.bfloat16)(x.bfloat16())
products.linear(weight.bfloat16(), dtype=torch.bfloat16, num_bits=8)(x.bfloat16())
products.linear(quantize_linear(weight, 4, 32), dtype=torch.bfloat16)(x.bfloat16())
"""
#: Heads and a draft model draft for a model of bfloat16 weights; in the engine's thread.
DRAFTS = """
import json, os, sys
from pathlib import Path
from safetensors.torch import save_file
from recipes.language_model import ROPE_THETA, SHAPE, Llama
from tests.unit.llm.engine_fixture import Answer, serve
from tests.unit.llm.speculation.heads import random_head
from weft.llm.models.model import TransformerModel
from weft.llm.models.registry import read_config
from weft.llm.models.weights import load_folder
from weft.llm.speculation.draft_model import DraftModelProposer
from weft.llm.speculation.heads import HeadProposer
from weft.llm.speculation.speculator import FixedDepth, Speculator
folder = Path(sys.argv[1])
weights = {name: weight.bfloat16() for name, weight in Llama(vocab_size=64).state_dict().items()}
save_file(weights, folder / "model.safetensors")
config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 64, **SHAPE, "hidden_act": "silu",
          "rope_theta": ROPE_THETA, "tie_word_embeddings": True, "dtype": "bfloat16", "eos_token_id": 0}
(folder / "config.json").write_text(json.dumps(config))
config = read_config(folder)
model = TransformerModel(config, load_folder(folder, config), dtype=torch.bfloat16)
heads = (HeadProposer(random_head(name, model), 64) for name in ("eagle3", "mtp"))
modes = []
def enter(plan):
    if not modes:
        modes.append(NoEmulation())
        modes[0].__enter__()
for proposer in (*heads, DraftModelProposer(model, 64)):
    modes.clear()
    speculator = Speculator("drafts", FixedDepth(2))
    answer = Answer([1, 2, 3], max_tokens=12)
    options = {"dtype": "bfloat16", "deterministic": False, "max_model_len": 128, "before_step": enter}
    serve([answer], model=model, speculator=speculator, proposer=proposer, **options)
    assert modes and speculator.num_drafts > 0 and len(answer.text) == 12, answer.text
os._exit(0)  # the modes end with the engines' threads, which may be while the interpreter ends, and abort it
"""
PRICES = """
from weft.capacity.machine.torch_times import measure_torch_times
shares = measure_torch_times(1).shares
assert shares["fp32"] == 1.0 and shares["bf16"] > 2, shares
"""
CATCHES = """
try:
    torch.ones(2, 2, dtype=torch.bfloat16) @ torch.ones(2, 2, dtype=torch.bfloat16)
except AssertionError:
    pass
else:
    raise SystemExit("a product of bfloat16 numbers was not noticed")
"""


COMPILES = """
import numpy as np
from numba import typeof
from weft_kernels.linear import instruction_sets, panel_kernel
rows, factors, panels, numbers = (np.empty(1, dtype) for dtype in (np.int8, np.float32, np.uint8, np.float32))
arguments = (
    rows.reshape(1, 1), factors.reshape(1, 1, 1), numbers.reshape(1, 1), np.empty((1, 1), np.int32),
    np.empty(2, np.int32), panels, 0, 1, *[numbers.reshape(1, 1)] * 3, numbers, 0, 1,
)
panel_kernel.multiply_codes.compile(tuple(map(typeof, arguments)))
(code,) = panel_kernel._add_panel.inspect_asm().values()
products = [line.split() for line in code.splitlines() if "vpdpbusd" in line]
assert instruction_sets.NAME == "AVX-VNNI", instruction_sets.NAME
assert products and all("%ymm" in line[-1] and line[0] == "{vex}" for line in products), products[:3]
"""
#: Runs the tests of codes on the row of AVX-VNNI, with the same instruction in the encoding of AVX-512.
RUNS = """
import sys
import pytest
from weft_kernels import jit
features = jit.features() | {"avxvnni"}
jit.features = lambda: features
from weft_kernels.linear import instruction_sets, panel_kernel
assert instruction_sets.NAME == "AVX-VNNI", instruction_sets.NAME
chosen = ["tests/kernels/test_products.py", "-k", "test_codes and (output or NF4)"]
status = pytest.main(["-q", "-p", "no:cacheprovider", *chosen])
products = [line.split() for code in panel_kernel._add_panel.inspect_asm().values() for line in code.splitlines()]
products = [words for words in products if "vpdpbusd" in words]
assert products and all("%ymm" in words[-1] for words in products), products[:3]
sys.exit(status)
"""


def _run(code: str, variables: Mapping[str, str], *arguments: str) -> None:
    path = os.pathsep.join([str(ROOT), str(ROOT / "model_repository"), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path} | variables
    command = [sys.executable, "-c", code, *arguments]
    run = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert 0 == run.returncode, run.stdout[-2000:] + run.stderr[-2000:]


def test_a_question_that_fails_is_no_answer(tmp_path: Path) -> None:
    """Where it cannot be told whether a run as on AVX2 is needed, nothing is run and the status is not 0."""
    (tmp_path / "torch.py").write_text("raise ImportError('torch is broken')")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "tests.as_avx2", "--if-needed", "echo", "ran"]
    environment = os.environ | {"PYTHONPATH": path}
    run = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (run.returncode, run.stdout) == (1, ""), run.stderr
    assert "torch is broken" in run.stderr


@pytest.mark.skipif(not torch.cpu._is_avx2_supported(), reason="this CPU has no AVX2")
def test_nothing_is_emulated() -> None:
    """No product of torch has numbers of bfloat16, neither in a sample's training nor in those of language models."""
    _run(NO_EMULATION + CATCHES + TRAINS + MULTIPLIES, VARIABLES)


@pytest.mark.skipif(not torch.cpu._is_avx2_supported(), reason="this CPU has no AVX2")
def test_drafts_are_not_emulated(tmp_path: Path) -> None:
    """Nor has one when heads for a model in bfloat16 are trained, or these or a draft model make drafts for it."""
    _run(NO_EMULATION + CATCHES + DRAFTS, VARIABLES, str(tmp_path))


@pytest.mark.skipif(not torch.cpu._is_avx2_supported(), reason="this CPU has no AVX2")
def test_the_plan_knows_what_torch_emulates() -> None:
    """Where torch emulates bfloat16, `weft plan` prices its products at more than twice those of float32."""
    _run("import torch" + PRICES, VARIABLES)


def test_a_cpu_with_avx_vnni_has_one_instruction_for_four_codes(tmp_path: Path) -> None:
    """Products of 8-bit codes are compiled to it, in vectors of 256 bits, as such a CPU encodes it."""
    features = f"{VARIABLES['NUMBA_CPU_FEATURES']},+avxvnni"
    cpu = {"NUMBA_CPU_NAME": "alderlake", "NUMBA_CPU_FEATURES": features, "NUMBA_CACHE_DIR": str(tmp_path)}
    _run(COMPILES, VARIABLES | cpu)


@pytest.mark.skipif(not torch.cpu._is_vnni_supported(), reason="this CPU has no AVX-512 VNNI")
def test_products_of_a_cpu_with_avx_vnni_are_right(tmp_path: Path) -> None:
    """With that instruction as AVX-512 encodes it for 256 bits, the row of AVX-VNNI passes the tests of codes."""
    features = f"{VARIABLES['NUMBA_CPU_FEATURES']},+avx512f,+avx512vl,+avx512vnni"
    cpu = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": features, "NUMBA_CACHE_DIR": str(tmp_path)}
    _run(RUNS, VARIABLES | cpu)
