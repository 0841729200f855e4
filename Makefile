# What one does with a checkout. `make` lists it. Needs Python 3.11 or newer, and Java 17 with Maven for Kafka.

SHELL := /bin/bash
comma := ,
.DEFAULT_GOAL := help
.PHONY: help setup demo demo-recording demo-kafka test test-services test-llamacpp test-vllm test-clients test-models test-containers test-long test-real lint format bench bench-vllm bench-throughput soak kafka docs docs-test dashboards lock audit wheel sbom pin-images clean

VENV := .venv
PYTHON := $(VENV)/bin/python
STAMP := $(VENV)/.installed
# vLLM has ranges of its own for what we share with it, so it lives beside .venv.
VLLM_VENV := .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.installed
VLLM_PYTHON := $(VLLM_VENV)/bin/python
AUDIT_LIMIT_S ?= 120
AUDIT_SERVICE ?= osv
KAFKA_PORT ?= 9092
KAFKA_DATA ?= runs/kafka
PYTEST_ARGS ?=
DEMO_ARGS ?=
RECORDING_SCREEN ?= 112x40
SOAK_ARGS ?=
# Drift needs prompts of two tasks.
SOAK_PARTS ?= faults,orders,broker-down,fuzz,throughput$(if $(wildcard ../shared/data/code.jsonl),$(comma)drift)
BENCH_ARGS ?= --num-prompts 3 --max-new-tokens 64
BENCH_METHODS ?= plain,omnidraft,omnidraft-reproducible,omnidraft+traces,hf-generate,hf-uad,hf-tli,llamacpp,llamacpp+omnidraft
BENCH_VLLM_ARGS ?= --num-prompts 4 --max-new-tokens 128
BENCH_THROUGHPUT_ARGS ?= --quantize int8
PROMPTS ?= $(wildcard $(patsubst %,../shared/data/%.jsonl,gsm8k code instruct xsum))

# What hangs in native code, where pytest cannot interrupt it, ends the run after so long; it takes a quarter of that.
TEST_LIMIT_S ?= 2400
TEST_LIMIT := timeout --foreground --signal=INT --kill-after=60 $(TEST_LIMIT_S)
# One numeric thread per test process; what measures speed sets its own.
TEST_ENV := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false RAY_USAGE_STATS_ENABLED=0 MLFLOW_DISABLE_TELEMETRY=true
PYTEST := $(TEST_ENV) $(TEST_LIMIT) $(PYTHON) -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# Python keeps bytecode in our own folders, even on a machine that says otherwise: else every process compiles torch and
# transformers anew, which takes it ten seconds.
unexport PYTHONDONTWRITEBYTECODE

# uv does not read pip's settings: hand over what the machine has set for pip.
ifneq ($(PIP_CERT),)
export SSL_CERT_FILE ?= $(PIP_CERT)
endif
ifneq ($(PIP_INDEX_URL),)
export UV_DEFAULT_INDEX ?= $(PIP_INDEX_URL)
endif

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' Makefile

setup: $(STAMP) ## Build .venv from requirements.lock; nothing to do when it is up to date

$(STAMP): requirements.lock pyproject.toml
	@set -e; \
	for python in python3.11 python3; do \
	  if "$$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then found=$$python; break; fi; \
	done; \
	if [ -z "$${found:-}" ]; then \
	  echo "make setup: needs Python 3.11 or newer with its venv module (Debian: apt-get install python3.11-venv)" >&2; exit 2; \
	fi; \
	test -x $(PYTHON) || "$$found" -m venv $(VENV)
	$(PYTHON) -m pip install --quiet --disable-pip-version-check uv
	$(PYTHON) -m uv pip install --quiet --python $(PYTHON) --require-hashes -r requirements.lock
	$(PYTHON) -m uv pip install --quiet --python $(PYTHON) --no-deps --editable .
	@touch $@

demo: setup ## Watch a real drafter learn and get faster (downloads 1.2 GB the first time)
	$(VENV)/bin/omnidraft demo $(DEMO_ARGS)

demo-recording: setup ## Run the demo in this terminal, and draw that as a picture that moves: runs/demo.svg
	@test -t 0 || { echo "make demo-recording: records a terminal, and this is none (script -qec 'make demo-recording' /dev/null)" >&2; exit 2; }
	@mkdir -p runs
	$(PYTHON) -m uv tool run --from 'termtosvg>=1.1$(comma)<2' termtosvg runs/demo.svg --command '$(VENV)/bin/omnidraft demo $(DEMO_ARGS)' \
	  --screen-geometry $(RECORDING_SCREEN) --min-frame-duration 1000 --max-frame-duration 150 --loop-delay 8000

demo-kafka: setup ## The same over a Kafka broker that is started for it
	$(PYTHON) deploy/kafka/local_broker.py --port $(KAFKA_PORT) --data $(KAFKA_DATA) --background
	@trap 'kill $$(cat $(KAFKA_DATA)/broker.pid)' EXIT; set -x; \
	$(VENV)/bin/omnidraft demo --log kafka://127.0.0.1:$(KAFKA_PORT) $(DEMO_ARGS)

test: setup ## Unit and contract tests on tiny models, under five minutes on two cores
	$(PYTEST) tests/contract tests/unit $(PYTEST_ARGS)

test-services: setup ## Services as processes on tiny models: integration, attacks, outages, end to end
	$(PYTEST) tests/e2e tests/attack tests/integration $(PYTEST_ARGS)

test-llamacpp: setup ## The tests that need llama.cpp, which is built into the user's cache the first time (minutes)
	bindings=$$($(PYTHON) -m pipelines.lib.llama_bindings) && \
	$(TEST_ENV) PYTHONPATH="$$bindings" $(PYTHON) -m pytest -m 'real or not real' $(PYTEST_ARGS) \
	  tests/contract/test_target.py tests/unit/models/llamacpp tests/integration/test_llamacpp.py tests/real/test_llamacpp_real.py

test-vllm: $(VLLM_STAMP) ## The proposer inside vLLM's real engine on a tiny model, in .venv-vllm (2 GB the first time)
	$(TEST_ENV) $(VLLM_PYTHON) -m pytest -m vllm --timeout 1200 $(PYTEST_ARGS) tests/vllm

$(VLLM_STAMP): deploy/vllm/requirements-cpu.txt deploy/vllm/overrides-cpu.txt pyproject.toml | setup
	test -x $(VLLM_PYTHON) || $(PYTHON) -m uv venv --quiet --python $(PYTHON) $(VLLM_VENV)
	$(PYTHON) -m uv pip install --quiet --python $(VLLM_PYTHON) --override deploy/vllm/overrides-cpu.txt \
	  -r deploy/vllm/requirements-cpu.txt --editable '.[kafka,mlflow]'
	@touch $@

test-clients: setup ## Real clients, each in an environment of its own in the user's cache, against a real server (needs Node)
	$(PYTHON) -m pytest -m clients $(PYTEST_ARGS) tests/clients

test-models: setup ## Every decoder family of transformers as a tiny model, half an hour; writes docs/models.md
	$(TEST_ENV) $(PYTHON) -m pytest -m models -n 2 $(PYTEST_ARGS) tests/models
	$(PYTHON) -m tests.models.page

test-containers: setup ## The image built and docker-compose.yml run, ten minutes; needs an engine with Compose (DOCKER: its client)
	$(PYTHON) -m pytest -m containers -x -s $(PYTEST_ARGS) tests/containers

test-long: setup ## What `make test` leaves out: small soaks, PostgreSQL, TLS, the wheel, Kubernetes, exports, benchmarks' own tests
	$(TEST_ENV) $(PYTHON) -m pytest -m long $(PYTEST_ARGS)

test-real: setup ## The tests that load real models
	TOKENIZERS_PARALLELISM=false $(PYTHON) -m pytest -m real --timeout 900 $(PYTEST_ARGS)

lint: setup ## Style, format and types
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy

format: setup ## Rewrite the code the way `make lint` wants it
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

bench: setup ## Measure one model pair on this machine into runs/benchmarks.md (PROMPTS, BENCH_METHODS, BENCH_ARGS)
	$(PYTHON) -m pipelines.bench $(foreach file,$(PROMPTS),--prompts $(file)) --methods $(BENCH_METHODS) \
	  --json runs/benchmarks.json --markdown runs/benchmarks.md $(BENCH_ARGS)

bench-vllm: $(VLLM_STAMP) ## Measure vLLM alone, with its own drafting and with ours (PROMPTS, JSON, BENCH_VLLM_ARGS)
	$(PYTHON) -m pipelines.bench_vllm --venv $(VLLM_VENV) $(foreach file,$(PROMPTS),--prompts $(file)) \
	  --json $(or $(JSON),runs/bench-vllm.json) $(BENCH_VLLM_ARGS)

bench-throughput: $(VLLM_STAMP) ## Measure our server, llama.cpp's and vLLM's under many clients (PROMPTS, JSON, BENCH_THROUGHPUT_ARGS)
	$(PYTHON) -m pipelines.bench.throughput --vllm-venv $(VLLM_VENV) $(foreach file,$(firstword $(PROMPTS)),--prompts $(file)) \
	  --json $(or $(JSON),runs/throughput.json) $(BENCH_THROUGHPUT_ARGS)

soak: setup ## Faults, outages, load and drift, for an hour and a quarter, into runs/soak/report.json (SOAK_PARTS, SOAK_ARGS)
	$(PYTHON) -m tests.soak --parts $(SOAK_PARTS) $(SOAK_ARGS)

kafka: setup ## Run a Kafka broker in the foreground, without Docker
	$(PYTHON) deploy/kafka/local_broker.py --port $(KAFKA_PORT) --data $(KAFKA_DATA)

docs: setup ## The API reference from the docstrings, into site/
	$(PYTHON) -m pdoc --docformat google --no-show-source --output-directory site omnidraft '!omnidraft.hosts.vllm'

docs-test: setup ## Run the commands of README and docs as a new user would (DOCS: names of pages; all without)
	PYTHONPATH=. $(PYTHON) -m tests.run_docs $(DOCS)

dashboards: setup ## Write the Grafana dashboards, and the table of metrics in docs/operate.md
	$(PYTHON) deploy/grafana/make_dashboards.py
	$(PYTHON) deploy/prometheus/metrics_table.py

lock: setup ## Resolve pyproject.toml into requirements.lock again, with the hashes that `make setup` wants
	$(PYTHON) -m uv pip compile pyproject.toml --universal --python-version 3.11 --extra dev --generate-hashes \
	  --no-header --no-annotate --no-emit-index-url --quiet --upgrade -o requirements.lock

audit: setup ## Look for known vulnerabilities in requirements.lock (AUDIT_SERVICE: osv or pypi; AUDIT_LIMIT_S)
	@told=$$(mktemp) && trap 'rm -f "$$told"' EXIT; \
	timeout --kill-after=10 $(AUDIT_LIMIT_S) $(PYTHON) -m uv tool run pip-audit --requirement requirements.lock \
	  --require-hashes --disable-pip --progress-spinner off --vulnerability-service $(AUDIT_SERVICE) --timeout 10 \
	  2> "$$told"; rc=$$?; tail -n 3 "$$told" >&2; \
	if [ $$rc -ge 124 ] || grep --quiet '^Traceback' "$$told"; then \
	  echo "make audit: nothing is known: $(AUDIT_SERVICE)'s advisories could not be asked within $(AUDIT_LIMIT_S) s" >&2; exit 2; \
	fi; exit $$rc

wheel: setup ## The package with compiled kernels, and its source, into dist/
	OMNIDRAFT_REQUIRE_COMPILER=1 $(PYTHON) -m uv build --quiet --out-dir dist

sbom: setup ## The software bill of materials of requirements.lock, in CycloneDX's format, into dist/sbom.json
	@mkdir -p dist
	$(PYTHON) -m uv tool run --from cyclonedx-bom cyclonedx-py requirements --pyproject pyproject.toml \
	  --output-reproducible --output-format JSON --output-file dist/sbom.json requirements.lock

pin-images: setup ## Write the digests that image tags have now into docker-compose.yml and deploy/kubernetes
	$(PYTHON) deploy/pin_images.py

clean: ## Remove what can be built again; runs/ and pulled models stay
	rm -rf $(VENV) $(VLLM_VENV) dist build site .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
