"""``python -m weft.gateway``."""

import sys

try:
    from weft.gateway.main import main
except ModuleNotFoundError as error:
    if error.name not in ("jinja2", "starlette", "uvicorn"):
        raise
    sys.exit(f"weft.gateway needs the package {error.name}; install weft-mesh[gateway]")

if __name__ == "__main__":
    sys.exit(main())
