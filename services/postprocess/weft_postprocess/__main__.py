"""Entry point: ``python -m weft_postprocess --repository DIR``."""

import sys

from weft_postprocess.transforms import BACKENDS
from weft_serving.main import main

if __name__ == "__main__":
    sys.exit(main("postprocess", BACKENDS))
