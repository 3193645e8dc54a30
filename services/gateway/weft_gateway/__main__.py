"""``python -m weft_gateway``."""

import sys

try:
    from weft_gateway.main import main
except ModuleNotFoundError as error:
    if error.name not in ("jinja2", "starlette", "uvicorn"):
        raise
    sys.exit(f"weft_gateway needs the package {error.name}; install weft[gateway]")

if __name__ == "__main__":
    sys.exit(main())
