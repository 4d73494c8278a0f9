# The two commands a newcomer needs: `make demo` and `make test`. Everything else builds on them.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   := .venv
BIN    := $(VENV)/bin
# One OpenMP thread per process keeps tests repeatable and stops idle threads from spinning against each other.
TEST_ENV := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 \
            DO_NOT_TRACK=1 PREFECT_SERVER_ANALYTICS_ENABLED=false

.PHONY: help demo demo-retail ui test test-slow test-sdks mutants chaos bench check format clean

help:
	@echo "make demo       run a whole gated comparison on this machine (small real model, no account, no GPU)"
	@echo "make ui         open the run form: Prefect's page, a worker and the embedded service"
	@echo "make demo-retail  the same for conversations: GRPO against SDPO in a small shop"
	@echo "make test       run the tests"
	@echo "make test-slow  run the longer tests"
	@echo "make test-sdks  run the service-facing tests with the oldest and the newest tinker SDK"
	@echo "make chaos      kill runs and their service at random moments; compare with undisturbed runs"
	@echo "make mutants    try wrong versions of the validators and list which test catches each"
	@echo "make bench      run the speed and memory comparisons (on a quiet machine)"
	@echo "make check      run ruff, mypy and import-linter"
	@echo "make format     format the code"
	@echo "make clean      remove the virtual environment and caches (runs/ is kept)"

$(BIN)/python:
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "gated-rl needs Python 3.11 or newer; $(PYTHON) is older. Set PYTHON=/path/to/python3.11"; exit 2; }
	@echo "Creating $(VENV) with $(PYTHON)"
	@"$(PYTHON)" -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing gated-rl and its pinned dependencies (a few minutes the first time)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e . -c constraints.txt
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "Installing what the tests need"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]' -c constraints.txt
	@touch $@

# A verdict of any kind (0 supported, 10 refuted, 11 inconclusive) is a finished demo.
demo: $(VENV)/.installed
	@$(BIN)/gated-rl run arithmetic --service local --run-dir runs --run-id demo || \
	  { code=$$?; [ $$code -eq 10 ] || [ $$code -eq 11 ] || exit $$code; }

# For options such as --service URL: make ui UI_OPTIONS="--service https://..."
ui: $(VENV)/.installed
	@$(BIN)/gated-rl ui --run-dir runs $(UI_OPTIONS)

demo-retail: $(VENV)/.installed
	@$(BIN)/gated-rl run retail --service local --run-dir runs --run-id demo-retail || \
	  { code=$$?; [ $$code -eq 10 ] || [ $$code -eq 11 ] || exit $$code; }

test: $(VENV)/.installed-dev
	@$(TEST_ENV) $(BIN)/python -m pytest -q -n 2 --dist loadfile -m "not slow and not bench and not network"

test-slow: $(VENV)/.installed-dev
	@$(TEST_ENV) $(BIN)/python -m pytest -q -n 2 --dist loadfile -m "slow and not bench and not network"

# The oldest SDK and cookbook, laid over the environment: everything else they need is there already.
SDK_OLDEST := 0.25.0
SDK_OVERLAY := $(VENV)/sdk-$(SDK_OLDEST)
SDK_TESTS := tests/tasks/test_sdk_ends.py tests/tasks/test_service.py tests/tasks/test_failures.py \
             tests/tasks/test_conformance.py tests/tasks/test_openings.py tests/flows/test_conformance.py

$(SDK_OVERLAY)/.installed: $(VENV)/.installed-dev
	@echo "Installing tinker $(SDK_OLDEST) and tinker-cookbook 0.5.4 into $(SDK_OVERLAY)"
	@rm -rf $(SDK_OVERLAY)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(SDK_OVERLAY) \
	  tinker==$(SDK_OLDEST) tinker-cookbook==0.5.4
	@touch $@

test-sdks: $(SDK_OVERLAY)/.installed
	@echo "tinker $(SDK_OLDEST)"
	@$(TEST_ENV) GATED_RL_SDK=$(SDK_OLDEST) PYTHONPATH=$(CURDIR)/$(SDK_OVERLAY) \
	  $(BIN)/python -m pytest -q -m "not slow" $(SDK_TESTS)
	@echo "tinker as installed"
	@$(TEST_ENV) $(BIN)/python -m pytest -q -m "not slow" $(SDK_TESTS)

bench: $(VENV)/.installed-dev
	@OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -q -m bench tests/benchmarks

# CHAOS="--store s3" puts the run directory on a local S3 server; --kills and --seed change the moments.
chaos: $(VENV)/.installed-dev
	@$(TEST_ENV) $(BIN)/python -m tests.chaos.runner $(CHAOS)

mutants: $(VENV)/.installed-dev
	@$(TEST_ENV) $(BIN)/python -m tests.mutants.runner

check: $(VENV)/.installed-dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache

format: $(VENV)/.installed-dev
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
