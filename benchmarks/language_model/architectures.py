"""``python -m benchmarks.language_model.architectures``: what decoding costs, beside a Llama of the same size.

Writes the table of architectures in ``docs/language-models.md``. Its other columns are what the code says, and a test
holds them. With names, only these are measured; the others keep their figures.
"""

import json
import math
import re
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from weft.backends.llm.loading import HOST_PROPOSERS, load_engine
from weft.backends.llm.settings import Settings
from weft.llm.config import _CHOICES, EngineConfig, TransformerConfig
from weft.llm.engine import Engine
from weft.llm.models.llama import Llama
from weft.llm.models.registry import ARCHITECTURES, config_from_json
from weft.llm.request import Delta, EngineRequest, SamplingParams

PAGE = Path(__file__).resolve().parents[2] / "docs/language-models.md"
_TABLE = re.compile(r"(<!-- architectures -->\n)([^<]*)(<!-- end -->)")
_HEAD = ("architecture in `config.json`", "runs by", "formats", "speculators", "decode")
#: Of those that transformers runs, unless they have got a module since.
_FOREIGN = ("CohereForCausalLM", "GPTNeoXForCausalLM", "OlmoForCausalLM", "Starcoder2ForCausalLM")
#: 55 million parameters; of experts each token has 2 of 8. A class takes of these what it has.
_SHAPE: dict[str, Any] = {
    **{"vocab_size": 8192, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4, "head_dim": 64},
    **{"num_attention_heads": 16, "num_key_value_heads": 8, "max_position_embeddings": 512},
}
_MORE: dict[str, Any] = {
    **{"num_local_experts": 8, "num_experts": 8, "num_experts_per_tok": 2, "experts_per_token": 2},
    **{"moe_intermediate_size": 1408, "shared_expert_intermediate_size": 1408},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
_NUM_SEQS, _NUM_PROMPT, _NUM_NEW, _NUM_TURNS = 8, 16, 24, 6


class Row(NamedTuple):
    """A row of the table, but for the cost."""

    name: str
    runs_by: str
    formats: str
    speculators: str


def rows() -> list[Row]:
    """What the code says of each architecture."""
    names = [name for name in _CHOICES["speculation"] if name != "none"]
    found = []
    for each in ARCHITECTURES:
        own = [name for name in names if name != "mtp" or getattr(each, "mtp_head", None) is not None]
        formats = "all" if each.gguf.architecture else "all but GGUF"
        found.append(Row(f"`{each.architecture}`", "own module", formats, ", ".join(own)))
    on_host = [name for name in names if name in HOST_PROPOSERS or name == "draft"]
    own_names = {each.architecture for each in ARCHITECTURES}
    for name in _FOREIGN:
        if name not in own_names:
            found.append(Row(f"`{name}`", "transformers", "numbers", ", ".join(on_host)))
    return found


def costs_of(page: str) -> dict[str, str]:
    """The last column of the table of the page, by the first."""
    found = _TABLE.search(page)
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in (found[2] if found else "").splitlines()]
    return {line[0]: line[-1] for line in cells if len(line) == len(_HEAD)}


def with_table(page: str, costs: Mapping[str, str]) -> str:
    """The page with the table of today's rows; one without a cost has a dash."""
    lines = [_HEAD, ("---",) * len(_HEAD), *((*row, costs.get(row.name, "-")) for row in rows())]
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return _TABLE.sub(lambda found: found[1] + table + found[3], page)


def relative_cost(name: str) -> float:
    """CPU time of decoding, beside that of a Llama whose products have as many weights for each token.

    Of what transformers runs it has the widths, since the code counts its weights as those of a Llama.
    """
    fields = _small_config(name)
    config = config_from_json(fields)
    with tempfile.TemporaryDirectory() as folder:
        pair = [_engine(Path(folder) / "own", fields), _engine(Path(folder) / "llama", _llama_of(config))]
        # The fastest of several turns counts, of the prompts alone too: other programs of the machine only slow down.
        times = {(engine, count): math.inf for engine in pair for count in (1, 1 + _NUM_NEW)}
        for turn in range(_NUM_TURNS):
            for (engine, count), least_s in times.items():
                times[engine, count] = min(least_s, _cpu_s(engine, count, turn))
        for engine in pair:
            engine.stop(1.0)
    own_s, llama_s = (times[engine, 1 + _NUM_NEW] - times[engine, 1] for engine in pair)
    return own_s / llama_s


def _small_config(name: str) -> dict[str, Any]:
    import transformers  # noqa: PLC0415  # takes a second
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # noqa: PLC0415

    kinds = [kind for kind, found in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if found == name]
    fields = _SHAPE  # of a model that transformers does not have
    if kinds:
        made = transformers.CONFIG_MAPPING[kinds[0]]
        known = made().to_dict().keys() | made.attribute_map.keys()
        fields = made(**{field: value for field, value in (_SHAPE | _MORE).items() if field in known}).to_dict()
    return json.loads(json.dumps(fields | {"architectures": [name], "dtype": "float32"}, default=str))  # type: ignore[no-any-return]


def _llama_of(config: TransformerConfig) -> dict[str, Any]:
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": 512,
        "intermediate_size": 1,
    }
    of_one = Llama.from_json(fields).num_multiplied
    width = 3 * config.hidden_size * config.num_layers
    rounded = 32 * max(1, round((config.num_multiplied - of_one) / width / 32))
    return fields | {"intermediate_size": rounded, "dtype": "float32"}


def _engine(folder: Path, fields: Mapping[str, Any]) -> Engine:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(fields))
    config = EngineConfig(max_num_seqs=_NUM_SEQS, dtype="float32", num_blocks=200, enable_prefix_caching=False)
    settings = Settings(config, max_text_bytes=1, has_weights=False)
    engine = load_engine(folder, settings, after_deltas=lambda: None, on_lost=lambda error: None)
    engine.start()
    return engine


def _cpu_s(engine: Engine, num_tokens: int, seed: int) -> float:
    """CPU time of the process for answers of so many tokens."""
    drawn, done = np.random.default_rng(seed), threading.Semaphore(0)

    def sink(delta: Delta) -> None:
        if delta.error is not None or delta.finish_reason:
            done.release()

    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    start_s = time.process_time()
    for _ in range(_NUM_SEQS):
        engine.submit(EngineRequest(drawn.integers(3, 8192, _NUM_PROMPT).astype(np.int32), params, sink))
    for _ in range(_NUM_SEQS):
        done.acquire()
    return time.process_time() - start_s


def main(argv: Sequence[str]) -> int:
    """Measure, and write the table; 2 for an unknown name."""
    page = PAGE.read_text(encoding="utf-8")
    known = [row.name.strip("`") for row in rows()]
    if unknown := [name for name in argv if name not in known]:
        print(f"no architecture {', '.join(unknown)}; there are {', '.join(known)}", file=sys.stderr)
        return 2
    costs = costs_of(page)
    for name in argv or known:
        costs[f"`{name}`"] = f"{relative_cost(name):.2f}"
        print(name, costs[f"`{name}`"], flush=True)
        PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), costs), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
