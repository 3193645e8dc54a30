# OpenAI's HTTP interface in front of the router. No torch.
# Build from the repository root: docker build -f deploy/docker/gateway.Dockerfile -t weft-gateway .
FROM python:3.11-slim

WORKDIR /src
COPY pyproject.toml README.md LICENSE NOTICE constraints.txt ./
COPY protos/weft_protos protos/weft_protos
COPY services/weft services/weft
COPY services/triton_python_backend_utils.py services/
RUN pip install --no-cache-dir --constraint constraints.txt ".[gateway]"

USER 65534
WORKDIR /
EXPOSE 8000 8003
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["python", "-m", "weft.gateway", "--host", "0.0.0.0"]
