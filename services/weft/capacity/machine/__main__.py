"""``python -m weft.capacity.machine SECTION THREADS``: measure this machine and print the figures as JSON."""

import json
import sys
from importlib import import_module

from weft.capacity.machine.sections import SECTIONS

if __name__ == "__main__":
    section = SECTIONS[sys.argv[1]]
    measure = getattr(import_module(f"weft.capacity.machine.{section.module}"), section.measure)
    print(json.dumps(measure(int(sys.argv[2]))._asdict()))
