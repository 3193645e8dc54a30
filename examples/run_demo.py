"""``make demo``: start the sample mesh, run the client in a process of its own, stop the mesh; 0 is success."""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from weft_mesh.preflight import MeshError
from weft_mesh.running import running_mesh

ROOT = Path(__file__).resolve().parents[1]
_CLIENT_TIMEOUT_S = 120.0


def main() -> int:
    """The client's exit status; 1 if the mesh did not come up. The services' log is shown when something failed."""
    with tempfile.TemporaryFile("w+") as log:
        status = 1
        try:
            print("Starting preprocess, model, postprocess and router ...", flush=True)
            start_s = time.perf_counter()
            with running_mesh(ROOT / "model_repository", log=log) as endpoints:
                print(
                    f"SERVING after {time.perf_counter() - start_s:.1f} s; the router is {endpoints['router'].grpc}",
                    flush=True,
                )
                command = [sys.executable, str(ROOT / "examples" / "demo.py"), endpoints["router"].grpc]
                status = subprocess.run(command, check=False, timeout=_CLIENT_TIMEOUT_S).returncode
        except MeshError as error:
            print(f"demo: {error}", file=sys.stderr)
        except subprocess.TimeoutExpired:
            print(f"demo: the client did not end within {_CLIENT_TIMEOUT_S:g} s", file=sys.stderr)
        if status != 0:
            log.seek(0)
            sys.stderr.write(log.read())
        else:
            print("The mesh is stopped.")
    return status


if __name__ == "__main__":
    sys.exit(main())
