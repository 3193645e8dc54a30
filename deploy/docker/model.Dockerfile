# The batched engine. Build from the repository root.
# The default brings the CUDA build of torch, which also runs without a GPU, and a compiler; for a much smaller image
# without both:
#   docker build -f deploy/docker/model.Dockerfile --build-arg PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu -t weft-model .
FROM python:3.11-slim

ARG PIP_EXTRA_INDEX_URL=""
# What the model.py files of the repository import beside numpy, for example "scikit-learn".
ARG PYTHON_PACKAGES=""
# Kernels in the Triton language and torch.compile build their launchers on first use.
RUN case "$PIP_EXTRA_INDEX_URL" in \
      */cpu) ;; \
      *) apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/* ;; \
    esac
WORKDIR /src
COPY pyproject.toml README.md LICENSE NOTICE constraints.txt ./
COPY protos/weft_protos protos/weft_protos
COPY services/weft services/weft
COPY services/triton_python_backend_utils.py services/
COPY kernels/weft_kernels kernels/weft_kernels
RUN pip install --no-cache-dir --constraint constraints.txt ".[gpu,torch,grammar]" $PYTHON_PACKAGES

# The user has no home; where the root filesystem is read-only, mount something writable at /tmp.
ENV TRITON_CACHE_DIR=/tmp/triton TORCHINDUCTOR_CACHE_DIR=/tmp/inductor XDG_CACHE_HOME=/tmp/cache
USER 65534
WORKDIR /
EXPOSE 8021 8022
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s CMD ["python", "-m", "weft.v2.healthcheck", "127.0.0.1:8021"]
ENTRYPOINT ["python", "-m", "weft.services.model", "--host", "0.0.0.0", "--repository", "/models/model"]
