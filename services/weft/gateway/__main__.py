"""``python -m weft.gateway``."""

import sys

from weft.gateway.main import main

if __name__ == "__main__":
    sys.exit(main())
