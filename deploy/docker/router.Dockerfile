# The router walks graphs; it holds no model code, no torch and no weft.serving.
# Build from the repository root: docker build -f deploy/docker/router.Dockerfile -t weft-router .
FROM python:3.11-slim

WORKDIR /src
COPY pyproject.toml README.md LICENSE NOTICE constraints.txt ./
COPY protos/weft_protos protos/weft_protos
COPY services/weft services/weft
COPY services/triton_python_backend_utils.py services/
RUN pip install --no-cache-dir --constraint constraints.txt ".[mesh]"

USER 65534
WORKDIR /
EXPOSE 8001 8002
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s CMD ["python", "-m", "weft.v2.healthcheck", "127.0.0.1:8001"]
ENTRYPOINT ["python", "-m", "weft.services.router", "--host", "0.0.0.0", "--repository", "/models/graphs"]
