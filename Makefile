# `make run`, `make test`, `make lint`, `make bench`: each does its own set-up in .venv, once. Needs gcc, cmake, Python >= 3.11.
PYTHON ?= python3
MODEL  ?= smollm2
SECONDS ?= 600
ROUNDS ?= 200
WHEEL_PYTHONS ?= $(PYTHON)
TRY_PYTHONS ?=
CASES ?= 20000
TEXTS ?= 5000
PICTURES ?= build/page
# Of the machine that a bundle is for. A shim of pyenv on the path may refuse to run.
CUDA_PYTHON ?= $(shell for python in python3.12 $$HOME/.pyenv/versions/3.12*/bin/python; do \
	$$python -m venv --help >/dev/null 2>&1 && echo $$python && break; done)
PROMPT ?= How does a water wheel turn falling water into useful work?

BIN := .venv/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check
# Without build isolation cmake finds its last build again, and only what changed in csrc/ is compiled.
INSTALL := $(PIP) --no-build-isolation --check-build-dependencies --editable
CXX_FILES := $(wildcard csrc/*.cpp csrc/*.h)

# Kernels for this machine (and portable ones); `make HEADRACE_ISAS=all`: for every processor.
export HEADRACE_ISAS ?= native
export CMAKE_BUILD_PARALLEL_LEVEL ?= $(shell nproc 2>/dev/null || echo 2)

.PHONY: help run test test-api test-arm test-agents test-clients test-vllm-http test-dashboard test-cuda test-page test-ray test-tokenizers test-triton soak soak-kv soak-server soak-route soak-ranks soak-loads soak-learning cli fuzz gguf sanitize mutate lint format \
	bench bench-cuda cuda-bundle micro docs wheel clean

help:
	@echo 'make run     a real model answers a prompt (MODEL=$(MODEL), PROMPT="...")'
	@echo 'make test    all tests'
	@echo 'make test-api CASES=$(CASES) requests made of /openapi.json, by every field of every route; SEED=1: others'
	@echo 'make test-arm the kernels compiled for aarch64, under qemu: Debian, with g++-aarch64-linux-gnu and qemu-user'
	@echo 'make test-agents the loop of an agent with Qwen2.5-Coder-0.5B-Instruct, which calls tools by itself: QWEN=FILE'
	@echo 'make test-clients clients of others against running servers: docs/internals/clients.md; with npm also those of Node'
	@echo "make test-vllm-http vLLM's own HTTP tests, downloaded: FILES=WORDS picks files"
	@echo 'make test-dashboard each query of deploy/grafana.json against a running Prometheus: Debian'"'"'s package `prometheus`'
	@echo 'make test-cuda the tests of the GPU backend on a GPU, and what it promises, tried in real dimensions: benchmarks/cuda/checks.py'
	@echo 'make test-page the page of the server in headless Chromium, with pictures in $(PICTURES)'
	@echo 'make test-ray replicas on Ray, and what deploy/ has: needs the extra test-ray, 800 MB in .venv'
	@echo 'make test-tokenizers the token ids of each kind of tokenizer against those of transformers and sentencepiece, on TEXTS=$(TEXTS) texts (QWEN=FILE, MINILM=FOLDER)'
	@echo 'make test-triton the long form of the tests of the GPU backend, without a GPU, and all of its kernels compiled for an H100'
	@echo 'make soak    2,000 rounds of interrupts, closes, forks, failures'
	@echo 'make soak-kv 2,000 processes that are killed while they write a folder of KV, and 2,000 engines'
	@echo 'make soak-route two workers that die, each with nginx before it; `make soak-ranks`: 2,000 requests to experts on ranks'
	@echo 'make soak-loads 20 starts of the server whose load takes 90 s, ten side by side: four minutes'
	@echo 'make soak-learning an hour with a drafter that learns, whose training is killed'
	@echo 'make soak-server the server under load and faults, in an hour; `python benchmarks/soak SCENARIO`: one of them'
	@echo 'make fuzz    hostile files, templates, batches and native calls, for SECONDS=$(SECONDS)'
	@echo 'make gguf    GGUF files of all families by llama.cpp: the same tensors, and the logits that it computes (LLAMA_PYTHON=...)'
	@echo 'make cli     the command line under all conditions of its table, and with signals at ROUNDS=$(ROUNDS) random moments'
	@echo 'make sanitize native tests under three sanitizers; SHORT=1: fewer'
	@echo 'make lint    ruff, mypy, clang-format; `make format` repairs what can be repaired'
	@echo 'make bench   cold start, a paired run against llama.cpp, and what serving many requests costs'
	@echo 'make bench-cuda what the GPU backend makes of a GPU, each figure beside what it should reach'
	@echo 'make cuda-bundle one folder that a GPU machine without a package index needs, with a native module for $(CUDA_PYTHON): build/cuda-bundle'
	@echo 'make micro   kernels against the bandwidth and arithmetic of this machine'
	@echo 'make mutate  deliberate faults that no test notices, in hours (MODULE=planner/roofline: in one file; MODULE=planner: in one part)'
	@echo 'make docs    the documentation site, in site/'
	@echo 'make wheel   wheels for Python 3.11 and newer in dist/, tried in bare environments (WHEEL_PYTHONS, TRY_PYTHONS)'
	@echo 'make clean   remove what the above made'

run: .venv/.core
	@$(BIN)/headrace run '$(MODEL)' '$(subst ','\'',$(PROMPT))' </dev/null

# A test next to these could disturb them: they compare times, count memory, or end processes and threads. All others run two at a time.
ALONE := $(addprefix tests/,benchmarks measure native remote scaleout soak test_async_llm.py test_benchmarks.py test_lifecycle.py test_llm.py)

test: .venv/.test
	$(BIN)/python -m pytest -n 2 --dist worksteal $(addprefix --ignore=,$(ALONE))
	$(BIN)/python -m pytest $(ALONE)

test-api: .venv/.test
	HEADRACE_API_CASES=$(CASES) HEADRACE_API_SEED=$(or $(SEED),0) $(BIN)/python -m pytest -s tests/server/test_openapi.py

test-arm: .venv/.test
	$(BIN)/python -m tests.arm $(TESTS)

test-agents: .venv/.test
	HEADRACE_QWEN=$(QWEN) $(BIN)/python -m pytest tests/server/test_agent_loop.py

# Each client has an environment of its own below .clients, made once.
test-clients: .venv/.test
	$(BIN)/python -m tests.clients

# In `.clients` too; `FILES="tokenize anthropic"`: the files with these words in their paths.
test-vllm-http: .venv/.test
	$(BIN)/python -m tests.clients.vllm_http $(FILES)

# Needs Prometheus: HEADRACE_PROMETHEUS names another than that of the path.
test-dashboard: .venv/.test
	$(BIN)/python -m pytest tests/server/check_dashboard.py

# Needs a browser: Debian's package is `chromium`; HEADRACE_BROWSER names another.
test-page: .venv/.test
	HEADRACE_PICTURES=$(PICTURES) $(BIN)/python -m pytest tests/server/check_web_page.py

# Tests that interpret kernels ten times as long, and all programs of tests/backend/cuda/compiling.py.
test-triton: .venv/.test
	HEADRACE_TRITON_EXAMPLES=10 $(BIN)/python -m pytest tests/backend/cuda tests/benchmarks/test_cuda_benchmark.py

# On a GPU machine. Each of the two takes less than ten minutes with 16 cores.
test-cuda: .venv/.cuda
	TRITON_INTERPRET=0 $(BIN)/python -m pytest -n 8 --dist worksteal -rs tests/backend/cuda
	$(BIN)/python benchmarks/cuda/checks.py

test-ray: .venv/.ray
	$(BIN)/python -m pytest tests/scaleout/check_deploy.py tests/scaleout/check_ray.py

soak: export SOAK_ROUNDS ?= 2000
# Each new thread may begin an area of its own in glibc's heap: what is resident would be a matter of chance. And pytest would keep what is
# logged of steps that fail, with the engines that they belonged to.
soak: export MALLOC_ARENA_MAX = 1
soak: .venv/.test
	$(BIN)/python -m pytest -p no:logging tests/soak

soak-kv: .venv/.test
	$(BIN)/python -m tests.kv.kills "$$(mktemp -d)" 2000

soak-server: .venv/.test
	$(BIN)/python benchmarks/soak

soak-route: .venv/.test
	$(BIN)/python benchmarks/soak proxied_route

soak-ranks: .venv/.test
	$(BIN)/python benchmarks/soak ranks_experts

soak-loads: .venv/.test
	$(BIN)/python benchmarks/soak long_loads

soak-learning: .venv/.test
	$(BIN)/python benchmarks/soak learning

fuzz: .venv/.test
	$(BIN)/python -m tests.fuzz --seconds $(SECONDS)

# LLAMA_PYTHON: an interpreter that has llama-cpp-python, which else is compiled into .bench, in many minutes, for `make bench` as well.
test-tokenizers: .venv/.test
	$(BIN)/python -m tests.tokenizer_parity --texts $(TEXTS) $(if $(QWEN),--qwen $(QWEN)) $(if $(MINILM),--minilm $(MINILM))

gguf: .venv/.test
	PYTHONPATH=benchmarks TQDM_DISABLE=1 $(BIN)/python -m tests.llama_cpp $(if $(LLAMA_PYTHON),--python '$(LLAMA_PYTHON)')
	$(BIN)/python -m tests.test_families_page

cli: .venv/.test
	HEADRACE_CLI_ROUNDS=$(ROUNDS) $(BIN)/python -m pytest tests/cli/test_invocations.py

sanitize: .venv/.test
	$(BIN)/python -m tests.native.sanitize $(if $(SHORT),--short)

lint: .venv/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@$(BIN)/python -m nanobind.stubgen -q -m headrace._native -o headrace/_native.pyi # so that mypy knows the C++ side
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(CXX_FILES)

format: .venv/.lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_FILES)

bench: .venv/.core
	$(BIN)/python benchmarks/start.py
	$(BIN)/python benchmarks/peers.py --engines llama.cpp --workloads decode,prefill
	$(BIN)/python benchmarks/serving

bench-cuda: .venv/.cuda
	$(BIN)/python benchmarks/cuda

# Wheels of what torch's machines lack, Headrace with its native module for the other Python among them, and tests and benchmarks.
CUDA_WHEELS := execnet hypothesis iniconfig jinja2 llguidance markdown-it-py markupsafe mdurl numpy packaging platformdirs pluggy pygments pytest pytest-xdist rich \
	sortedcontainers tokenizers
cuda-bundle: build/cuda-venv/.made
	@rm -rf build/cuda-bundle
	@mkdir -p build/cuda-bundle
	@build/cuda-venv/bin/python -m pip wheel -q --no-build-isolation --no-deps --wheel-dir build/cuda-bundle/wheels . $(CUDA_WHEELS)
	@cp -r tests benchmarks pyproject.toml build/cuda-bundle
	@find build/cuda-bundle -name __pycache__ -prune -exec rm -r {} +
	@du -sh build/cuda-bundle

# It stays, as the native module would be compiled anew in another.
build/cuda-venv/.made:
	@test -n '$(CUDA_PYTHON)' || { echo 'no Python 3.12 runs here: install one with its venv module (apt-get install python3.12-venv, pyenv install 3.12), or name that of the GPU machine: make cuda-bundle CUDA_PYTHON=PATH'; exit 1; }
	@echo '[set-up] virtual environment of $(CUDA_PYTHON) in build/cuda-venv'
	@$(CUDA_PYTHON) -m venv build/cuda-venv
	@build/cuda-venv/bin/python -m pip install -qq --disable-pip-version-check scikit-build-core nanobind
	@touch $@

docs: .venv/.test
	$(BIN)/python -m zensical build --strict

# A release builds them in manylinux images, which run on older systems: .github/workflows/wheels.yml.
wheel:
	$(PYTHON) -m tests.native.wheel $(addprefix --python ,$(WHEEL_PYTHONS)) $(addprefix --try ,$(TRY_PYTHONS))

micro: .venv/.core
	$(BIN)/python benchmarks/micro

mutate: .venv/.mutate
	nice -n 15 $(BIN)/python tests/mutate.py '$(MODULE)' $(TESTS)

clean:
	rm -rf .venv .bench .clients .fuzz build dist site

# Set-up steps, each with a stamp: a second call finds the stamp newer than its causes and does nothing.
.venv/.venv:
	@echo '[set-up] virtual environment in .venv'
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Headrace needs Python 3.11 or newer, and this is " + sys.version)'
	@$(PYTHON) -m venv .venv
	@$(PIP) --upgrade pip
	@touch $@

.venv/.core: .venv/.venv pyproject.toml CMakeLists.txt $(CXX_FILES)
	@echo '[set-up] building and installing Headrace'
	@$(PIP) --upgrade scikit-build-core nanobind
	@$(INSTALL) .
	@touch $@

.venv/.test: pyproject.toml | .venv/.core
	@echo '[set-up] test dependencies'
	@$(PIP) torch==2.13.0 # by itself and first, so that nothing pulls a larger build of it
	@$(INSTALL) '.[oracle,test]'
	@touch $@

.venv/.cuda: pyproject.toml | .venv/.core
	@echo '[set-up] torch, Triton, and what the tests of the GPU backend need'
	@$(INSTALL) '.[test-cuda]'
	@touch $@

.venv/.ray: pyproject.toml | .venv/.test
	@echo '[set-up] Ray, and what its tests need'
	@$(INSTALL) '.[test-ray]'
	@touch $@

.venv/.lint: pyproject.toml | .venv/.core
	@echo '[set-up] lint dependencies'
	@$(INSTALL) '.[lint,otel,route]'
	@touch $@

.venv/.mutate: pyproject.toml | .venv/.test
	@echo '[set-up] mutation tool'
	@$(INSTALL) '.[mutate]'
	@touch $@
