# Every target sets up what it needs; a second run reuses it.
UV_VERSION := 0.13.9
CACHE      := $(if $(XDG_CACHE_HOME),$(XDG_CACHE_HOME),$(HOME)/.cache)/kimi-operator
export KIMI_UV := $(CACHE)/uv-$(UV_VERSION)/bin/uv
UV         := $(KIMI_UV)
# never fetch an interpreter: the machine's own Python 3.11 or later is used
export UV_PYTHON_PREFERENCE := only-system
BIN        := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help setup demo down test check test-unit test-multiproc test-cluster bench generate train clean

help: ## Show this list
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(UV):
	@echo "==> setup: uv $(UV_VERSION) into $(CACHE) (about 5 s)"
	@python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "setup failed: Python 3.11 or later is needed, found $$(python3 --version 2>&1); install it and run make again"; exit 1; }
	@python3 -m venv $(CACHE)/uv-$(UV_VERSION) >/dev/null 2>&1 || { echo "==> setup: python3-venv from Debian"; apt-get update -qq && apt-get install -y -qq python3-venv && python3 -m venv $(CACHE)/uv-$(UV_VERSION); } \
	  || { echo "setup failed: 'python3 -m venv' does not work; install python3-venv and run make again"; exit 1; }
	@$(CACHE)/uv-$(UV_VERSION)/bin/pip install --quiet uv==$(UV_VERSION) || { rm -rf $(CACHE)/uv-$(UV_VERSION); echo "setup failed: uv could not be installed from the package index; check the network and run make again"; exit 1; }

setup: $(UV) ## Install the locked Python environment into .venv
	@echo "==> setup: Python packages (torch is large: about 1 min the first time, seconds later)"
	@$(UV) sync --frozen || { echo "setup failed: uv could not install the locked packages; the lines above say which"; exit 1; }

demo: setup ## Bring up a cluster, deploy the tiny Kimi-K3 and find 57 of 57 needles
	@$(BIN)/python examples/local/demo.py

down: ## End the demo's cluster
	@test ! -x $(BIN)/localcluster || $(BIN)/localcluster down

check: setup ## Formatting, lint, types and import contracts (seconds)
	@echo "==> check: format and lint" && $(BIN)/ruff format --check . && $(BIN)/ruff check .
	@echo "==> check: types (about 10 s, 60 s the first time)" && $(BIN)/mypy
	@echo "==> check: imports" && $(BIN)/lint-imports

# The cluster's tests mostly wait: all others run beside them.
test: check ## Set up everything and pass all tests
	@$(BIN)/localcluster build
	@$(BIN)/pytest tests -n 2

test-unit: setup ## Only the tests that need neither processes nor a cluster
	@$(BIN)/pytest tests -n 2 -m "not cluster and not multiproc"

test-multiproc: setup ## Only the tests that start several worker processes
	@$(BIN)/pytest tests -m "multiproc and not cluster"

test-cluster: setup ## Only the tests in the local Kubernetes cluster
	@$(BIN)/localcluster build
	@$(BIN)/pytest tests -m cluster

bench: setup ## Measure: reconcile latency, router, handoff, engine, start-up; one table and a JSON
	@$(BIN)/python tests/bench/run.py

generate: setup ## Regenerate the CRDs from the models
	@$(BIN)/python -m kimi_operator.api.crd

train: setup ## Train the tiny model again (under an hour on two cores)
	@$(BIN)/python examples/tiny-k3/train.py

clean: down ## Remove the environment and the caches of this checkout
	@rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
