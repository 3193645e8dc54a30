# Transforms after a model. No torch.
# Build from the repository root: docker build -f deploy/docker/postprocess.Dockerfile -t weft-postprocess .
FROM python:3.11-slim

WORKDIR /src
COPY pyproject.toml README.md LICENSE NOTICE constraints.txt ./
COPY protos/weft_protos protos/weft_protos
COPY services/weft services/weft
COPY services/triton_python_backend_utils.py services/
RUN pip install --no-cache-dir --constraint constraints.txt ".[postprocess]"

USER 65534
WORKDIR /
EXPOSE 8031 8032
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s CMD ["python", "-m", "weft.v2.healthcheck", "127.0.0.1:8031"]
ENTRYPOINT ["python", "-m", "weft.services.postprocess", "--host", "0.0.0.0", "--repository", "/models/postprocess"]
