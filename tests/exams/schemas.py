"""MaskBench: JSON schemas with valid and invalid instances, on the path that structured output takes in the engine.

    python -m tests.exams.schemas DIR [--tokenizer FILE] [--every N] [--update-docs]

``DIR`` is a checkout of guidance-ai/jsonschemabench. Each schema is parsed and compiled as that of a request, and each
instance is followed token by token through masks of the vocabulary. Prints counts, reasons and times as JSON.
"""

import argparse
import json
import re
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np

from weft.backends.llm.text import TextCodec
from weft.backends.tokenizers import tokenizer_at
from weft.base.errors import WeftError
from weft.llm.grammar import GrammarCompiler, GrammarMatcher, GrammarTicket
from weft.llm.structured_outputs import GrammarSpec

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/structured-output.md"
_BEGIN, _END = "<!-- exam -->\n", "<!-- /exam -->\n"
#: Reasons that the page lists; the others are summed up.
_NUM_REASONS = 16


class Exam:
    """Counts of what became of schemas and instances, and CPU times in seconds."""

    def __init__(self, tokenizer: Path) -> None:
        codec = TextCodec(tokenizer_at(tokenizer), 1 << 20)
        self.encode = codec._tokenizer.encode
        vocab_size = codec._tokenizer.get_vocab_size()
        self.vocab_size, self.eos = vocab_size, 2
        self.compiler = GrammarCompiler(lambda: codec.token_table(vocab_size), [self.eos], timeout_s=60.0)
        self.mask = np.zeros((1, -(-vocab_size // 32)), np.int32)
        self.counts: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.compile_s: list[float] = []
        self.mask_s: list[float] = []

    def take(self, name: str, schema: Any, tests: list[dict[str, Any]]) -> None:
        """Judge one schema by its instances."""
        self.counts["schemas"] += 1
        try:
            self._compile(schema)
        except WeftError as error:
            self.counts["compile errors"] += 1
            self.reasons.update(reasons(error.message))
            return
        for index, test in enumerate(tests):
            kind = "valid" if test["valid"] else "invalid"
            self.counts[kind] += 1
            problem = self._follow(self._compile(schema).matchers[0], json.dumps(test["data"], ensure_ascii=False))
            if (problem == "") != test["valid"]:
                self.counts[f"{kind}, {'refused' if test['valid'] else 'accepted'}"] += 1
                self.wrong.append(f"{name}[{index}] {kind}: {problem or 'accepted'}")

    def _compile(self, schema: Any) -> GrammarTicket:
        ready = Event()
        ticket = self.compiler.submit(GrammarSpec.parse({"json": schema}), 1, ready.set)  # type: ignore[arg-type]
        if not ready.wait(60.0):
            raise ticket.timeout_error()
        self.compile_s += [seconds for seconds in [ticket.take_compile_s()] if seconds is not None]
        if ticket.error is not None:
            raise ticket.error
        return ticket

    def _follow(self, matcher: GrammarMatcher, text: str) -> str:
        """Why the text does not follow the grammar; "" if it does."""
        for token in [*self.encode(text, add_special_tokens=False).ids, self.eos]:
            start_s = time.thread_time()
            matcher.fill([], self.mask)
            self.mask_s.append(time.thread_time() - start_s)
            if matcher.error:
                return matcher.error
            if not self.mask[0, token // 32] >> (token % 32) & 1:
                return f"token {token} is not allowed"
            matcher.append(token)
        return ""

    def report(self) -> dict[str, Any]:
        """Everything, for JSON."""
        compile_ms, mask_us = np.array(self.compile_s) * 1e3, np.array(self.mask_s) * 1e6
        return {
            "vocabulary": self.vocab_size,
            **self.counts,
            "compile_ms": {f"p{p}": round(float(np.percentile(compile_ms, p)), 2) for p in (50, 95, 99, 100)},
            "mask_us": {f"p{p}": round(float(np.percentile(mask_us, p)), 1) for p in (50, 95, 99, 100)},
            "masks": len(mask_us),
            "reasons": dict(self.reasons.most_common()),
            "wrong": self.wrong,
        }


def reasons(message: str) -> Iterator[str]:
    """The reasons of an error, without what is special to the schema."""
    text = message.partition("cannot be a grammar: ")[2].rpartition("; change it")[0] or message
    keys = re.match(r"Unimplemented keys: \[(.*)\]", text)
    if keys:
        yield from (f"`{key}`" for key in re.findall(r'"([^"]+)"', keys[1]))
    elif text.startswith("Unknown format"):
        yield "`format` other than those above"
    else:
        lines = text.split("\n")
        line = lines[-1] if "regex parse" in lines[0] else lines[0]
        yield short(line)


def short(reason: str) -> str:
    """A reason without what is special to the schema."""
    if "not disjoint" in reason:
        return "`patternProperties` that overlap"
    if "lookaround" in reason or "look-around" in reason:
        return "look-around in a `pattern`"
    return re.sub(r"'[^']*'|\"[^\"]*\"|[a-z-]+:/\S+|\.\.\.|\d+", "...", reason)[:80].replace("|", "/")


def table(report: dict[str, Any]) -> str:
    """The part of the page that is made from a report."""
    times, masks = report["compile_ms"], report["mask_us"]
    rows = [
        ("schemas; refused with a reason", f"{report['schemas']:,}; {report['compile errors']:,}"),
        ("valid instances; refused", f"{report['valid']:,}; {report.get('valid, refused', 0)}"),
        ("invalid instances; accepted", f"{report['invalid']:,}; {report.get('invalid, accepted', 0)}"),
        ("ms to compile, p50, p95, p99", f"{times['p50']}, {times['p95']}, {times['p99']}"),
        (
            f"us for a mask of {report['vocabulary']:,} bits, p50, p95, p99",
            f"{masks['p50']}, {masks['p95']}, {masks['p99']}",
        ),
    ]
    known = list(report["reasons"].items())
    listed = [f"| {reason} | {count} |" for reason, count in known[:_NUM_REASONS]]
    rest = sum(count for _, count in known[_NUM_REASONS:])
    return "\n".join(
        [
            *("| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows), ""),
            *("| a schema is refused for | schemas |", "|---|---|", *listed, f"| other reasons | {rest} |", ""),
        ]
    )


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--tokenizer", type=Path, default=ROOT / "model_repository/model/writer/1/tokenizer.json")
    parser.add_argument("--every", type=int, default=1, help="take each N-th schema")
    parser.add_argument("--update-docs", action="store_true", help=f"write the table of {PAGE.name}")
    given = parser.parse_args()
    exam = Exam(given.tokenizer)
    for path in sorted((given.directory / "maskbench/data").glob("*.json"))[:: given.every]:
        case = json.loads(path.read_text(encoding="utf-8"))
        exam.take(path.stem, case["schema"], case["tests"])
    report = exam.report()
    print(json.dumps(report, indent=1, ensure_ascii=False))
    if given.update_docs:
        before, _, rest = PAGE.read_text().partition(_BEGIN)
        PAGE.write_text(before + _BEGIN + table(report) + _END + rest.partition(_END)[2])


if __name__ == "__main__":
    main()
