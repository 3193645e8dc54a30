"""Entry point: ``python -m weft_preprocess --repository DIR``."""

import sys

from weft_preprocess.transforms import BACKENDS
from weft_serving.main import main

if __name__ == "__main__":
    sys.exit(main("preprocess", BACKENDS))
