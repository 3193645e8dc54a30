"""A text to its sentence embedding: tokenizer, MiniLM in ONNX Runtime and pooling, of the sample repository's files.

The parameter WEIGHTS names another file of MiniLM.
"""

import json
from pathlib import Path

import numpy as np
import onnxruntime
import tokenizers
import triton_python_backend_utils as pb_utils

_SAMPLES = Path(__file__).resolve().parents[4] / "model_repository"
#: As the sample: texts of similar length share a run of at most so many tokens, padding included.
_MAX_TOKENS, _MAX_RUN_TOKENS = 256, 512


class TritonPythonModel:
    """EMBEDDING = the mean of the tokens' states, scaled to length 1."""

    def initialize(self, args):
        """Load tokenizer and weights."""
        weights = json.loads(args["model_config"])["parameters"].get("WEIGHTS")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(
            weights["string_value"] if weights else str(_SAMPLES / "model" / "minilm" / "1" / "model.onnx"),
            options,
            providers=["CPUExecutionProvider"],
        )
        self._tokenizer = tokenizers.Tokenizer.from_file(
            str(_SAMPLES / "preprocess" / "tokenize_minilm" / "1" / "tokenizer.json")
        )
        self._tokenizer.enable_truncation(_MAX_TOKENS)
        self._tokenizer.no_padding()

    def execute(self, requests):
        """One response for each request; their texts are encoded together."""
        texts = [pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy().ravel() for request in requests]
        rows = self._embed([text.decode() for part in texts for text in part])
        parts = np.split(rows, np.cumsum([len(part) for part in texts])[:-1])
        return [pb_utils.InferenceResponse([pb_utils.Tensor("EMBEDDING", part)]) for part in parts]

    def _embed(self, texts):
        encodings = self._tokenizer.encode_batch(texts, is_pretokenized=False)
        order = sorted(range(len(texts)), key=lambda number: len(encodings[number].ids))
        rows = np.empty((len(texts), 384), np.float32)
        start = 0
        while start < len(order):
            end = start + 1
            while end < len(order) and (end + 1 - start) * len(encodings[order[end]].ids) <= _MAX_RUN_TOKENS:
                end += 1
            rows[order[start:end]] = self._run([encodings[number] for number in order[start:end]])
            start = end
        return rows

    def _run(self, encodings):
        shape = (len(encodings), max(len(encoding.ids) for encoding in encodings))
        ids, mask, types = (np.zeros(shape, np.int64) for _ in range(3))
        for row, encoding in enumerate(encodings):
            length = len(encoding.ids)
            ids[row, :length], mask[row, :length], types[row, :length] = encoding.ids, 1, encoding.type_ids
        inputs = {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}
        (hidden,) = self._session.run(None, inputs)
        mean = np.einsum("nlh,nl->nh", hidden, mask.astype(np.float32)) / mask.sum(1, keepdims=True)
        return (mean / np.linalg.norm(mean, axis=1, keepdims=True)).astype(np.float32)
