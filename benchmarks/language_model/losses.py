"""``python -m benchmarks.language_model.losses``: what fewer bits cost the sample model ``writer``, beside float32.

Perplexity and likeliest next tokens on the texts that it was not trained on, the latter at every position of the text,
and the error of its weights beside that which normal weights have. Codes are multiplied as this machine serves them: a
CPU with the instructions for it rounds activations to 8 bits as well.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from tokenizers import Tokenizer

from benchmarks import machine
from benchmarks.report import machine_lines, table, write_json
from weft.llm.models.model import TransformerModel
from weft.llm.models.registry import read_config
from weft.llm.models.weights import load_folder
from weft.llm.weights.parts import LM_HEAD, is_matrix
from weft.tools.quantize.calibration import Predictions, evaluate
from weft.tools.quantize.quantize_folder import quantize_folder
from weft_kernels.linear.quantized import QuantizedWeight
from weft_kernels.linear.quantizers import quantize_linear, quantize_nf4

ROOT = Path(__file__).resolve().parents[2]
_ROW_TOKENS = 512

_Quantizer = Callable[[torch.Tensor], QuantizedWeight]
#: Each kind of weights, and its error on normal weights in groups of that size, in per cent.
_WEIGHTS: dict[str, tuple[_Quantizer, float]] = {
    "int8, scale by output": (lambda weight: quantize_linear(weight, 8), 0.87),
    "int4, groups of 32": (lambda weight: quantize_linear(weight, 4, 32, is_symmetric=False), 7.8),
    "int4, groups of 64": (lambda weight: quantize_linear(weight, 4, 64, is_symmetric=False), 9.1),
    "nf4, groups of 64": (quantize_nf4, 9.2),
}


@dataclass(frozen=True)
class Loss:
    """One line of the table.

    Attributes:
        kind: What has fewer bits.
        perplexity: Of the held-out text.
        perplexity_change: Against float32, as a share.
        agreement: Share of positions with the same likeliest token as float32.
        weight_error: Frobenius norm of the errors of all matrices, relative to that of the matrices; None: no error.
        weight_error_bound: A tenth above that of normal weights; None where it is not set.
    """

    kind: str
    perplexity: float
    perplexity_change: float
    agreement: float
    weight_error: float | None = None
    weight_error_bound: float | None = None


def measure(folder: Path, rows: Sequence[torch.Tensor], calibration: Path | None = None) -> list[Loss]:
    """A line for each kind, float32 first.

    Args:
        folder: The model, not quantised.
        rows: Token ids of held-out text.
        calibration: Text that GPTQ may look at; None: without GPTQ.
    """
    config = read_config(folder)
    whole = evaluate(TransformerModel(config, load_folder(folder, config, dtype=torch.float32)), rows)
    losses = [Loss("float32", whole.perplexity, 0.0, 1.0)]

    def add(kind: str, predictions: Predictions, error: float | None = None, bound: float | None = None) -> None:
        change = predictions.perplexity / whole.perplexity - 1
        losses.append(Loss(kind, predictions.perplexity, change, whole.agreement(predictions), error, bound))

    for kind, (quantize, percent) in _WEIGHTS.items():
        weights = load_folder(folder, config, dtype=torch.float32)
        squares = torch.zeros(2, dtype=torch.float64)
        for name, weight in weights.items():
            if is_matrix(name) and name != LM_HEAD and isinstance(weight, torch.Tensor):
                weights[name] = codes = quantize(weight)
                squares += torch.stack([part.double().square().sum() for part in (codes.dequantize() - weight, weight)])
        error = float((squares[0] / squares[1]).sqrt())
        add(kind, evaluate(TransformerModel(config, weights), rows), error, 0.011 * percent)
    if calibration is not None:
        with TemporaryDirectory() as place:
            output = Path(place) / "gptq"
            report = quantize_folder(folder, calibration, output, method="gptq", max_loss=1.0)
            chosen = read_config(output)
            model = TransformerModel(chosen, load_folder(output, chosen, dtype=torch.float32))
            add("gptq, groups of 32", evaluate(model, rows), report.weight_error)
    model = TransformerModel(config, load_folder(folder, config, dtype=torch.float32))
    add("KV cache int8", evaluate(model, rows, torch.int8))
    return losses


def render(losses: Sequence[Loss]) -> str:
    """The table."""
    lines = [["weights or cache", "perplexity", "change", "same token", "error of weights", "at most"]]
    for loss in losses:
        error, bound = (
            "" if value is None else f"{value:.2%}" for value in (loss.weight_error, loss.weight_error_bound)
        )
        lines.append(
            [
                loss.kind,
                f"{loss.perplexity:.3f}",
                f"{loss.perplexity_change:+.2%}",
                f"{loss.agreement:.1%}",
                error,
                bound,
            ]
        )
    return table(lines, left_columns=(0,))


def held_out_rows(folder: Path, texts: Sequence[str]) -> list[torch.Tensor]:
    """Token ids of the texts one after another, in rows of 512."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = torch.tensor([token for encoding in tokenizer.encode_batch_fast(list(texts)) for token in encoding.ids])
    return [row for row in ids.split(_ROW_TOKENS) if len(row) > 1]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write; 0, or 1 where an error of weights is above its bound."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.language_model.losses", description=__doc__)
    parser.add_argument("--no-gptq", action="store_true", help="leave out GPTQ, which takes most of the time")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="write the figures there too, as JSON")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    sys.path.append(str(ROOT / "model_repository"))  # the recipes are no package of their own
    from recipes.corpus import python_documentation  # noqa: PLC0415

    folder = ROOT / "model_repository" / "model" / "writer" / "1"
    corpus = python_documentation()
    with TemporaryDirectory() as place:
        calibration = Path(place) / "training.txt"
        calibration.write_text("\n\n".join(corpus.training[:200]))
        losses = measure(folder, held_out_rows(folder, corpus.held_out), None if options.no_gptq else calibration)
    print(render(losses))
    described = machine.describe()
    print("\n".join(machine_lines(described)))
    if options.output is not None:
        print(write_json(options.output, losses, described, prefix="losses-"))
    bounds = [(loss.weight_error, loss.weight_error_bound) for loss in losses]
    return int(any(error is not None and bound is not None and error > bound for error, bound in bounds))


if __name__ == "__main__":
    sys.exit(main())
