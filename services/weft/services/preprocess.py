"""Entry point: ``python -m weft.services.preprocess --repository DIR``."""

import sys

from weft.backends.preprocess import BACKENDS
from weft.serving.main import main

if __name__ == "__main__":
    sys.exit(main("preprocess", BACKENDS))
