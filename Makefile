# Needs make and Python 3.11 or newer; every target makes the environment it wants.
#   make test PYTHON=/path/to/python   chooses the interpreter     make demo ARGS="--via pmap"   passes arguments on

VENV ?= .venv
RUN = $(VENV)/bin/python

# Prints the first interpreter that is at least 3.$(1) and can make an environment. Each is tried by running
# it: version managers leave commands on PATH that exist and fail. Their own folders are looked through last.
find_python = for p in $(or $(PYTHON),$(2) "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/3.*/bin/python3); do \
	"$$p" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, $(1)))' >/dev/null 2>&1 \
	&& echo "$$p" && break; done

.PHONY: help demo test test-slow test-newest test-aot test-device bench-deps test-bench lint format coverage docs notebooks clean
.DEFAULT_GOAL := help

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' Makefile

demo: $(VENV)/.has-demo ## train a small network on handwritten digits, data parallel
	$(RUN) examples/digits.py $(ARGS)

# Most of the time goes into compiling. Without LLVM's optimizations that takes two thirds, and the programs that XLA
# hands to LLVM, which the tests read, are the same. test-slow and test-newest run what users run.
test: $(VENV)/.has-test ## the tests, on eight fake CPU devices
	XLA_FLAGS="$${XLA_FLAGS---xla_backend_optimization_level=0}" $(RUN) -m pytest -n 2 $(ARGS)

test-slow: $(VENV)/.has-test ## the tests that take longer than a few seconds
	@$(RUN) -m pytest -n 2 -m slow $(ARGS) || { [ $$? = 5 ] && echo "SKIPPED test-slow: no test is marked slow"; }

# Python 3.11 stops at jax 0.10, so the newest jax needs an interpreter and an environment of its own.
test-newest: ## the tests again on the newest supported jax (Python 3.12 or newer)
	@py=$$($(call find_python,12,python3.13 python3.12 python3)); \
	if [ -n "$$py" ]; then XLA_FLAGS="$$XLA_FLAGS" $(MAKE) --no-print-directory test VENV=.venv-newest PYTHON="$$py"; \
	else echo "SKIPPED test-newest: no working Python 3.12 or newer was found"; fi

# The compilers must be the release of the jax beside them. They exist for few platforms, and on others
# there is nothing to test; any other failure to install them is a failure.
test-aot: ## compile for TPU and H100 without the hardware and read the programs
	@$(MAKE) --no-print-directory .venv-aot/.has-test VENV=.venv-aot
	@v=$$(.venv-aot/bin/python -c 'from importlib.metadata import version; print(version("jax"))'); \
	log=.venv-aot/compilers.log; stamp=.venv-aot/.has-compilers-$$v; \
	if [ ! -e $$stamp ]; then \
		echo "installing the TPU and GPU compilers of jax $$v into .venv-aot (once)"; \
		if .venv-aot/bin/python -m pip install --quiet --disable-pip-version-check \
			"jax[tpu]==$$v" "jax-cuda13-plugin==$$v" "jax-cuda13-pjrt==$$v" >$$log 2>&1; then touch $$stamp; \
		elif grep -q 'No matching distribution' $$log; then \
			echo "SKIPPED test-aot: no TPU and GPU compiler wheels of jax $$v for this machine ($$log)"; exit 0; \
		else cat $$log; exit 1; fi; \
	fi; \
	JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1 ALLOW_MULTIPLE_LIBTPU_LOAD=1 \
		.venv-aot/bin/python -m pytest -n 2 -m aot tests/aot $(ARGS)

# An accelerator needs its own jax (jax[cuda13], jax[tpu]): add it to .venv, or name an interpreter that has
# it and the test extra: make test-device RUN=python3. The empty JAX_PLATFORMS lets JAX choose.
test-device: $(if $(filter file,$(origin RUN)),$(VENV)/.has-test) ## the tests that need an accelerator
	@found=$$(JAX_PLATFORMS= $(RUN) -c 'import jax; print(jax.default_backend())') || exit 1; \
	if [ "$$found" = cpu ]; then echo "SKIPPED test-device: JAX finds no accelerator"; \
	else JAX_PLATFORMS= $(RUN) -m pytest -m device $(ARGS); fi

# PyTorch is large, and only the benchmarks want it. On Linux its default wheel brings CUDA's libraries along; with
# PIP_EXTRA_INDEX_URL set to PyTorch's index of CPU wheels, pip takes the one without.
bench-deps: ## what the benchmarks beside PyTorch need, in .venv-bench
	@$(MAKE) --no-print-directory .venv-bench/.has-test,bench VENV=.venv-bench

test-bench: bench-deps ## the tests that need PyTorch: the same models and steps in both frameworks
	.venv-bench/bin/python -m pytest -m torch tests/with_torch tests/test_docs_names.py $(ARGS)

lint: $(VENV)/.has-lint ## what .ci/run demands of style and types
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m pyright

format: $(VENV)/.has-lint ## let ruff repair what it can
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

coverage: $(VENV)/.has-dev ## which lines the tests reach
	$(RUN) -m pytest -n 2 --cov $(ARGS)

# The folder docs is no target; every warning is an error, broken links and anchors among them.
docs: $(VENV)/.has-docs ## the documentation as a site, in build/docs
	$(RUN) -m sphinx -W --keep-going -n -q -d build/doctrees docs build/docs
	@echo "build/docs/index.html"

# Each .py beside a notebook is its source. CHECK=1 runs them without writing and fails where the two differ.
notebooks: $(VENV)/.has-notebooks ## run the notebooks from scratch and store their outputs
	$(RUN) notebooks/run.py $(if $(CHECK),--check) $(ARGS)

clean: ## remove everything that these targets made
	rm -rf .venv .venv-newest .venv-aot .venv-bench .pytest_cache .ruff_cache .hypothesis .coverage .coverage.* htmlcov build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# 3.11 first: it gets the oldest jax that fdp supports, and `test-newest` covers the other end. --clear: a
# half-made environment, from an interrupted run, has no stamp and is made anew.
$(VENV)/.made:
	@py=$$($(call find_python,11,python3.11 python3.12 python3.13 python3)); \
	if [ -z "$$py" ]; then \
		echo "fdp needs Python 3.11 or newer with its venv and ensurepip modules, and found none that runs." >&2; \
		echo "Tried: $(or $(PYTHON),python3.11 python3.12 python3.13 python3 and what pyenv has)." >&2; \
		echo "Install one (Debian, Ubuntu: python3 and python3-venv) or name it: make ... PYTHON=/path/to/python" >&2; \
		exit 1; fi; \
	echo "making $(VENV) with $$py"; "$$py" -m venv --clear $(VENV)
	@touch $@

# One stamp an extra; a change of pyproject.toml installs again.
$(VENV)/.has-%: pyproject.toml | $(VENV)/.made
	@echo "installing fdp[$*] into $(VENV) (once)"
	@$(RUN) -m pip install --quiet --disable-pip-version-check --editable '.[$*]'
	@touch $@
