# A machine with Python 3.10 or newer and make is enough: every target sets up what it needs.
#
#   make demo [ENGINE=transformers|vllm|sglang]   a window on a real rollout, and a table of what it captured
#   make test                                     every test, also on the real engines (first time: minutes, gigabytes)
#   make test-quick                               the tests that need no engine and no environment of their own
#   make test-gpu [GPU_PYTHON=python3]            the tests that need a CUDA GPU, with the torch that GPU_PYTHON has
#   make test-torch TORCH=2.14.1                  the tests of the device profilers on another release of torch
#   make test-pythons                             the tests that need no torch, on every Python of this machine
#   make docs                                     the documentation as a site, in build/site; a broken link fails
#   make lint | format | docs-check | generate | bench | build | clean
#
# PYTHON, TORCH_SPEC and PIP_ARGS say which Python, which torch and which pip arguments the environments are made with;
# JOBS, how many tests run at once (2).

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= $(firstword $(shell command -v python3.11) $(shell command -v python3))
ENGINE ?= transformers
PYTEST_ARGS ?=
JOBS ?= 2

NEWEST_VLLM := vllm-0.32.0
OLDER_VLLM := vllm-0.28.0 vllm-0.30.0
SGLANG := sglang-0.5.23
OLDER_SGLANG := sglang-0.5.12
VERL := verl-0.9.1
VERL_ON_SGLANG := verl-0.9.1-sglang
TRL := trl-1.16.0

# Where the tests of an engine stand. The markers say which engine a test runs, and so in which environment it runs.
ENGINE_TESTS := tests/real tests/faults tests/unit/counters
# SGLang is imported before anything that imports transformers: its stand-ins for Triton want it so
SGLANG_TESTS := tests/real/sglang tests/real/test_end_to_end.py tests/real/test_shape.py tests/faults/test_scheduler.py tests/faults/test_engines.py tests/unit/counters
NO_ENGINE := not engine_vllm and not engine_sglang and not engine_verl and not engine_trl and not long

# whose every branch has to be tested: they can be, with nothing but numbers
PURE := verl_profiler_conf.core.window verl_profiler_conf.core.gate verl_profiler_conf.core.iterations

MAKE_ENV := $(PYTHON) tests/envs/make_env.py
RUN := .venv/bin/python -m

.PHONY: help env env-engines demo test test-vllm test-sglang test-verl test-verl-by-hand test-trl test-gpu test-torch test-pythons \
	test-long test-faults test-main test-quick lint format docs docs-check generate generate-check bench build clean

help:
	@sed -n 's/^# \{0,1\}//p' Makefile | sed -n '1,/^JOBS, /p'

env:
	@$(MAKE_ENV) main

env-engines: env
	@$(MAKE_ENV) $(NEWEST_VLLM) $(OLDER_VLLM) $(SGLANG) $(OLDER_SGLANG) $(VERL) $(TRL)

DEMO_ENV_transformers := main
DEMO_ENV_vllm := $(NEWEST_VLLM)
DEMO_ENV_sglang := $(SGLANG)
DEMO_BIN_transformers := .venv/bin
DEMO_BIN_vllm := .venvs/vllm/bin
DEMO_BIN_sglang := .venvs/sglang/bin
DEMO_BIN := $(or $(DEMO_BIN_$(ENGINE)),$(error ENGINE=$(ENGINE): transformers, vllm or sglang))

demo:
	@$(MAKE_ENV) $(DEMO_ENV_$(ENGINE))
	@run=outputs/demo/$(ENGINE)-$$(date +%Y%m%d-%H%M%S); \
	set -x; \
	$(DEMO_BIN)/python examples/rollout.py engine=$(ENGINE) +profiler=torch_window \
		profiler.profile_token_start=20 profiler.profile_token_end=80 hydra.run.dir=$$run; \
	$(DEMO_BIN)/verl-profiler report $$run

# All suites run, whichever of them fails: JOBS of them side by side, each shown when it is done, and the main one
# last. The suite of every Python runs beside the trainings of verl, which leave a core to it.
SUITES := test-vllm test-sglang test-verl test-trl test-pythons
test: env-engines
	@failed=; \
	$(MAKE) --no-print-directory -k -j$(JOBS) --output-sync=target $(SUITES) || failed=" of the engines or of a Python"; \
	$(MAKE) --no-print-directory test-main || failed="$$failed main"; \
	[ -z "$$failed" ] || { echo "failed:$$failed" >&2; exit 1; }

test-vllm: env
	@$(MAKE_ENV) $(NEWEST_VLLM) $(OLDER_VLLM)
	.venvs/$(NEWEST_VLLM)/bin/python -m pytest $(ENGINE_TESTS) -m "engine_vllm and not faults" $(PYTEST_ARGS)
	@for version in $(OLDER_VLLM); do \
		(set -x; .venvs/$$version/bin/python -m pytest $(ENGINE_TESTS) -m "engine_vllm and every_version" $(PYTEST_ARGS)); \
	done

test-sglang: env
	@$(MAKE_ENV) $(SGLANG) $(OLDER_SGLANG)
	.venvs/$(SGLANG)/bin/python -m pytest $(SGLANG_TESTS) -m "engine_sglang and not faults" $(PYTEST_ARGS)
	@for version in $(OLDER_SGLANG); do \
		(set -x; .venvs/$$version/bin/python -m pytest $(SGLANG_TESTS) -m "engine_sglang and every_version" $(PYTEST_ARGS)); \
	done

test-verl: env
	@$(MAKE_ENV) $(VERL)
	.venvs/$(VERL)/bin/python -m pytest tests/real/verl -m "engine_verl and not by_hand" $(PYTEST_ARGS)

test-trl: env
	@$(MAKE_ENV) $(TRL)
	.venvs/$(TRL)/bin/python -m pytest tests/real/transformers/test_trainers.py -m engine_trl $(PYTEST_ARGS)

# a real training for each of them, minutes; for whoever changes what they are about
test-verl-by-hand: env
	@$(MAKE_ENV) $(VERL) $(VERL_ON_SGLANG)
	.venvs/$(VERL)/bin/python -m pytest tests/real/verl -m "engine_verl and by_hand" $(PYTEST_ARGS)
	.venvs/$(VERL_ON_SGLANG)/bin/python -m pytest tests/real/verl -m "engine_verl and by_hand" $(PYTEST_ARGS)

# the device profilers on another release of torch; what it shows belongs into RELEASES of capture/backends/unlocked.py
test-torch: env
	@[ -n "$(TORCH)" ] || { echo "which release? make test-torch TORCH=2.14.1" >&2; exit 2; }
	@$(MAKE_ENV) torch-$(TORCH)
	.venvs/torch-$(TORCH)/bin/python -m pytest tests/unit/capture tests/real/transformers -m "not long" $(PYTEST_ARGS)

# Nothing is installed: GPU_PYTHON has torch (2.11 or newer, built for CUDA), transformers, pytest and this package's needs.
GPU_PYTHON ?= $(PYTHON)
test-gpu:
	PYTHONPATH=$(CURDIR):$(CURDIR)/tests/support $(GPU_PYTHON) -m pytest -c tests/gpu/pytest.ini tests/gpu -rs -s $(PYTEST_ARGS)

test-pythons:
	$(PYTHON) tests/envs/every_python.py --jobs $(JOBS) tests/unit \
		-m "$(NO_ENGINE) and not slow and not packaging and not one_python" $(PYTEST_ARGS)

test-main: env
	@$(MAKE_ENV) others
	OTHERS_PYTHON=$(CURDIR)/.venvs/others/bin/python $(RUN) pytest tests -m "$(NO_ENGINE)" -n $(JOBS) --dist worksteal $(PURE:%=--cov=%) --cov-branch --cov-fail-under=100 $(PYTEST_ARGS)

# what goes wrong within a window, on each engine: some ten minutes
test-faults: env
	@$(MAKE_ENV) $(NEWEST_VLLM) $(SGLANG)
	$(RUN) pytest tests/faults -m "$(NO_ENGINE)" $(PYTEST_ARGS)
	.venvs/$(NEWEST_VLLM)/bin/python -m pytest tests/faults -m engine_vllm $(PYTEST_ARGS)
	.venvs/$(SGLANG)/bin/python -m pytest tests/faults/test_scheduler.py tests/faults/test_engines.py -m engine_sglang $(PYTEST_ARGS)

# the property tests with many times as many examples: 100,000 of each kind of hostile input
test-long: env
	$(RUN) pytest tests -m long $(PYTEST_ARGS)

test-quick: env
	$(RUN) pytest tests -m "$(NO_ENGINE) and not slow and not packaging" $(PYTEST_ARGS)

lint: env
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy
	.venv/bin/lint-imports --no-cache

format: env
	$(RUN) ruff check --fix .
	$(RUN) ruff format .

# nothing is loaded from the network, neither now nor when the pages are read
docs: env
	NO_MKDOCS_2_WARNING=1 $(RUN) mkdocs build --strict

docs-check: env
	$(RUN) pytest -q tests/test_docs.py

# The references in docs/ as well, and its pictures.
# The second spec is of verl's own config with the preset: it needs verl's config files, and nothing else of verl
define generate
.venv/bin/verl-profiler generate $(1)
@configs=$$(.venv/bin/python tests/support/verl_configs.py); (set -x; \
	PYTHONPATH=$$configs .venv/bin/verl-profiler generate $(1) verl_profiler_conf/tools/generate/verl.yaml)
.venv/bin/python docs/make_configuration.py $(1)
.venv/bin/python docs/make_reference.py $(1)
.venv/bin/python docs/pictures/draw.py $(1)
endef

generate: env
	$(call generate)

generate-check: env
	$(call generate,--check)

bench: env-engines
	@for script in benchmarks/*.py; do (set -x; .venv/bin/python $$script); done

build: env
	@rm -rf build dist
	$(RUN) build --no-isolation --outdir dist .

clean:
	rm -rf build dist outputs multirun htmlcov *.egg-info .venv .venvs .coverage* .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
