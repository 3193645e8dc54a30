"""``python -m benchmarks.rank_roofline``: what links between devices make of a language model on several ranks.

By the formulas of ``weft plan`` (weft/capacity/ranks.py) and published figures of devices and links, whose sources are
in ``known.toml`` and ``links.toml``: nothing is run. A token is a decode step of ``--sequences`` sequences of 2,048
tokens; a prompt has 8,192 tokens, computed 2,048 at a time. Weights and caches are bfloat16.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence

from benchmarks.report import table
from weft.base.errors import InvalidArgumentError
from weft.capacity.costs.language_model import LanguageModel
from weft.capacity.devices import find_device
from weft.capacity.ranks import RankTarget, find_link
from weft.capacity.roofline import DeviceTarget
from weft.llm.config import EngineConfig
from weft.llm.models.model_config import TransformerConfig
from weft.llm.parallel.topology import ParallelSizes

#: Llama 3: vocabulary, width, feed-forward, layers, heads, heads of keys, head width, context.
SHAPES = {
    "8B": TransformerConfig(128_256, 4096, 14_336, 32, 32, 8, 128, 131_072, dtype="bfloat16"),
    "70B": TransformerConfig(128_256, 8192, 28_672, 80, 64, 8, 128, 131_072, dtype="bfloat16"),
}
SIZES = (
    ParallelSizes(),
    *(ParallelSizes(tensor=size) for size in (2, 4, 8)),
    *(ParallelSizes(pipeline=size) for size in (2, 4)),
    *(ParallelSizes(context=size) for size in (2, 4)),
)
LINKS = ("nvlink4", "pcie5", "ethernet-400g", "ethernet-100g")
CONTEXT, PROMPT, CHUNK = 2048, 8192, 2048


def rows(shape: str, device: str, num_sequences: int, links: Sequence[str] = LINKS) -> Iterator[list[str]]:
    """A line for each way to divide the model; times in milliseconds, and the part of them that is exchange."""
    engine = EngineConfig(dtype="bfloat16", device="cuda", max_num_seqs=max(num_sequences, 1))
    model = LanguageModel(SHAPES[shape], engine)
    target = DeviceTarget(find_device(device))
    for sizes in SIZES:
        try:
            parts = model.parts(sizes)
        except InvalidArgumentError:
            continue
        most_bytes = max(part.weight_bytes for part in parts)
        fits = most_bytes + target.runtime_bytes("llm") < target.spec.memory_bytes
        cells = [_name(sizes), f"{most_bytes / 1e9:.0f}" if fits else f"{most_bytes / 1e9:.0f} (does not fit)"]
        for name in links:
            place = RankTarget(target, parts, find_link(name))
            step, exchange_s = place.decode(num_sequences, CONTEXT)
            chunks = [place.prefill(CHUNK, end) for end in range(CHUNK, PROMPT + 1, CHUNK)]
            prompt_s, sent_s = sum(timing.seconds for timing, _ in chunks), sum(part for _, part in chunks)
            cells.append(_cell(step.seconds, exchange_s))
            cells.append(_cell(prompt_s, sent_s))
        yield cells


def _name(sizes: ParallelSizes) -> str:
    return next((f"{name} {size}" for name, size in sizes._asdict().items() if size > 1), "one device")


def _cell(seconds: float, exchange_s: float) -> str:
    return f"{seconds * 1e3:.3g}" + (f" ({exchange_s / seconds:.0%})" if exchange_s else "")


def main(argv: Sequence[str] | None = None) -> int:
    """0 when the tables are printed."""
    parser = argparse.ArgumentParser(prog="benchmarks.rank_roofline", description="Ranks and links, by formulas.")
    parser.add_argument("--sequences", type=int, default=16, metavar="N", help="default: %(default)s")
    parser.add_argument("--devices", nargs="+", default=["H100", "H200"], metavar="NAME")
    options = parser.parse_args(argv)
    header = ["", "GB a rank", *(f"{what}, {link}" for link in LINKS for what in ("token", "prompt"))]
    for device in options.devices:
        for shape in SHAPES:
            print(f"\n{shape}, {device}, {options.sequences} sequences; ms, and the part that is exchange")
            print(table([header, *rows(shape, device, options.sequences)], left_columns=(0,)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
