"""lm-evaluation-harness: log likelihoods through a gateway against those of transformers with the same weights.

    python -m tests.exams.likelihoods --venv VENV [--folder FOLDER]

``VENV`` is an environment with ``lm-eval[api,hf]``, in which this file runs as the harness's client. ``FOLDER`` is that
of a language model; by default the sample's. Tasks are local: questions with choices, and texts whose perplexity is
measured. Ends with 1, and what differs, if a log likelihood differs by more than 1e-3, or a figure of a task.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "model_repository/model/writer/1"
MODEL = "examined"
MOST = 1e-3
TEXTS = [
    "Return the number of items in the list.",
    "The method is called with the arguments of the function, and what it returns is what the caller gets.",
    "zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich \U0001f680",
    "a",
    "If the file does not exist, an error is raised. " * 40,
]
QUESTIONS = [
    {"query": "Return the", "choices": [" number", " value", " zebra", " 1"], "gold": 1},
    {"query": "The function raises", "choices": [" an exception", " a list", " potatoes"], "gold": 0},
    {"query": "Ü", "choices": ["ber", "bung", "\n"], "gold": 0},
]
TASKS = {
    "choices": {
        "output_type": "multiple_choice", "doc_to_text": "query", "doc_to_choice": "choices", "doc_to_target": "gold",
        "target_delimiter": "", "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "perplexity": {
        "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "text",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "byte_perplexity"}],
    },
}  # fmt: skip


def examine(url: str, folder: str) -> int:
    """Compare, as a client; the harness is imported here, where it is installed."""
    from lm_eval import simple_evaluate
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    same: dict[str, Any] = {"max_length": 512, "add_bos_token": False}
    theirs = HFLM(pretrained=folder, device="cpu", dtype="float32", batch_size=4, **same)
    ours = LocalCompletionsAPI(
        model=MODEL, base_url=f"{url}/v1/completions", tokenizer=folder, tokenizer_backend="huggingface",
        num_concurrent=4, batch_size=3, **same,
    )  # fmt: skip
    questions = [(one["query"], choice) for one in QUESTIONS for choice in one["choices"]]
    questions += [("", text) for text in TEXTS[:4]] + [(TEXTS[4], TEXTS[0])]
    asked = [Instance("loglikelihood", {}, pair, index) for index, pair in enumerate(questions)]
    rolling = [Instance("loglikelihood_rolling", {}, (text,), index) for index, text in enumerate(TEXTS)]
    expected, expected_rolling = theirs.loglikelihood(asked), theirs.loglikelihood_rolling(rolling)
    got, got_rolling = ours.loglikelihood(asked), ours.loglikelihood_rolling(rolling)
    errors = [abs(one[0] - other[0]) for one, other in zip(expected, got, strict=True)]
    errors += [abs(one - other) for one, other in zip(expected_rolling, got_rolling, strict=True)]
    is_same = [one[1] for one in expected] == [one[1] for one in got]
    print(f"{len(errors)} log likelihoods, largest difference {max(errors):.2e}; greedy where the other is: {is_same}")
    wrong = ["log likelihoods"] * (max(errors) > MOST or not is_same)
    with tempfile.TemporaryDirectory() as data:
        tasks = [
            _task(Path(data), name, rows)
            for name, rows in (("choices", QUESTIONS), ("perplexity", [{"text": text} for text in TEXTS]))
        ]
        figures = [simple_evaluate(model, tasks=tasks)["results"] for model in (theirs, ours)]
    for task in TASKS:
        one, other = (
            {name: value for name, value in each[task].items() if isinstance(value, float)} for each in figures
        )
        print(f"{task}: transformers {one}, here {other}")
        wrong += [task] * any(abs(one[name] - other[name]) > MOST * max(abs(one[name]), 1.0) for name in one)
    print("differ:", *wrong) if wrong else print("equal")
    return int(bool(wrong))


def _task(folder: Path, name: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    file = folder / f"{name}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(file)}}, "test_split": "test"}
    return {"task": name, **data, **TASKS[name]}


def main() -> int:
    """Serve the folder, and examine it in the harness's environment."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", type=Path, help="environment with lm-eval")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--url", help="of a gateway that serves it; by default one is started")
    given = parser.parse_args()
    if given.url:
        return examine(given.url, str(given.folder))
    with tempfile.TemporaryDirectory() as root:
        (Path(root) / MODEL).mkdir(parents=True)
        (Path(root) / MODEL / "1").symlink_to(given.folder.resolve())
        (Path(root) / MODEL / "config.pbtxt").write_text(
            'backend: "llm"\nparameters { key: "dtype" value { string_value: "float32" } }\n'
        )
        ports = ["--router-port", "0", "--http-port", "0"]
        command = [sys.executable, "-m", "weft.cli", "up", "--json", "--repository", root, *ports]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as mesh:
            try:
                assert mesh.stdout is not None
                address = json.loads(mesh.stdout.readline())["gateway"]["http"]
                client = [given.venv / "bin/python", __file__, "--url", f"http://{address}", "--folder", given.folder]
                return subprocess.run(client, check=False, env=os.environ | {"TQDM_DISABLE": "1"}).returncode
            finally:
                mesh.terminate()
                mesh.wait(30)


if __name__ == "__main__":
    sys.exit(main())
