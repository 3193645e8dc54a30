"""The tokenizer of a transform that makes text."""

import os
from typing import Any

from weft_common.errors import InvalidArgumentError
from weft_serving.backends.base import ModelContext
from weft_serving.backends.loading import model_file, require


def read_tokenizer(model: ModelContext) -> Any:
    """The ``tokenizers.Tokenizer`` in the version folder: ``tokenizer.json``, or ``default_model_filename``.

    Raises:
        InvalidArgumentError: The file is no tokenizer.
        NotFoundError: It is not there.
        UnavailableError: The package is not installed.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # instance threads are the parallelism
    path = model_file(model, "tokenizer.json")
    tokenizers = require("tokenizers", "postprocess")
    try:
        return tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # tokenizers raises nothing more special
        raise InvalidArgumentError(f"{path} is not a tokenizer: {error}") from error
