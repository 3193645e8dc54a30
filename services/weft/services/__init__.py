"""The four services; each module is the main of one: ``python -m weft.services.model``."""

import gc
import sys

if sys.argv[0] == "-m":  # Python looks for the service to run: collections are a tenth of the time of its imports
    gc.set_threshold(100_000)
