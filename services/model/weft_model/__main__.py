"""Entry point: ``python -m weft_model --repository DIR``."""

import sys

from weft_model.backends import BACKENDS
from weft_serving.main import main

if __name__ == "__main__":
    sys.exit(main("model", BACKENDS))
