"""Entry point: ``python -m weft.services.postprocess --repository DIR``."""

import sys

from weft.backends.postprocess import BACKENDS
from weft.serving.main import main

if __name__ == "__main__":
    sys.exit(main("postprocess", BACKENDS))
