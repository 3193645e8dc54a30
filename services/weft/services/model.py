"""Entry point: ``python -m weft.services.model --repository DIR``."""

import sys

from weft.backends import BACKENDS
from weft.serving.main import main

if __name__ == "__main__":
    sys.exit(main("model", BACKENDS))
