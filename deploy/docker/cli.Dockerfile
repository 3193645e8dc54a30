# The `weft` command: check and infer as it stands. For `weft up` in one container, install the services' extras too:
#   docker build -f deploy/docker/cli.Dockerfile --build-arg EXTRAS="[all]" -t weft .
# Build from the repository root.
FROM python:3.11-slim

ARG EXTRAS="[mesh]"
WORKDIR /src
COPY pyproject.toml README.md LICENSE NOTICE constraints.txt ./
COPY protos/weft_protos protos/weft_protos
COPY services/weft services/weft
COPY services/triton_python_backend_utils.py services/
COPY kernels/weft_kernels kernels/weft_kernels
RUN pip install --no-cache-dir --constraint constraints.txt ".$EXTRAS"

USER 65534
WORKDIR /work
ENTRYPOINT ["weft"]
