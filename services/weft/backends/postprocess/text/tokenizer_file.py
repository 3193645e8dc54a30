"""Loading of a transform's tokenizer."""

import os
from typing import Any

from weft.base.errors import InvalidArgumentError
from weft.serving.backends.base import ModelContext
from weft.serving.backends.loading import model_file, require


def read_tokenizer(model: ModelContext) -> Any:
    """Load the ``tokenizers.Tokenizer`` in the version folder: ``tokenizer.json``, or ``default_model_filename``.

    Raises:
        InvalidArgumentError: The file is not a tokenizer.
        NotFoundError: It does not exist.
        UnavailableError: The package is not installed.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # instance threads are the parallelism
    path = model_file(model, "tokenizer.json")
    tokenizers = require("tokenizers", "postprocess")
    try:
        return tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # tokenizers raises nothing more specific
        raise InvalidArgumentError(f"{path} is not a tokenizer: {error}") from error
