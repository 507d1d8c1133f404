# make help lists the targets. Each does its own set-up in $(VENV), once: a second run installs nothing and needs no network.

DEVICE      ?= $(if $(filter gpu,$(MAKECMDGOALS)),gpu,cpu)
SET         ?= 2.13
VENV        ?= .venv$(if $(filter-out 2.13,$(SET)),-$(SET))$(if $(filter gpu,$(DEVICE)),-gpu)
NPROC       ?= 2
WORKERS     ?= 2
TRAIN_ARGS  ?=
PYTEST_ARGS ?=
BENCH_ARGS  ?=
GPU_ARGS    ?=
TORCHREC    ?= ../torchrec
PEERS_ARGS  ?=
SANITIZERS  ?= address,undefined
KILLS       ?= 200
SEED        ?= 0
MUTANTS     ?= 40
FOLDERS     ?= shardrec

# The first of these that runs and is in the supported range (a name on PATH may be a launcher with nothing behind it).
PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3; do \
	if $$python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1; \
	then echo $$python; break; fi; done)

SHELL       := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

BIN     := $(VENV)/bin
RUNTIME := $(VENV)/.shardrec-$(DEVICE)-$(SET)
DEV     := $(VENV)/.shardrec-$(DEVICE)-$(SET)-dev
SITE    := $(VENV)/.shardrec-$(DEVICE)-$(SET)-site

PIP := PYTHONUNBUFFERED=1 $(BIN)/python -m pip install --disable-pip-version-check --no-input --progress-bar off

# A dot for each package shows that it works; the rest of what pip says matters only when it fails.
DOTS    = { while IFS= read -r line; do case "$$line" in Collecting*|Installing*) printf .;; esac; done; }
install = { $(PIP) $(1) 2>&1 | tee "$(VENV)/install.log" | $(DOTS); } || \
	{ echo; grep '^ERROR' "$(VENV)/install.log" >&2 || tail -n 20 "$(VENV)/install.log" >&2; exit 1; }

ifeq ($(filter cpu gpu,$(DEVICE)),)
$(error DEVICE is "$(DEVICE)"; it can be cpu or gpu)
endif

SETS := $(patsubst requirements/set-%.txt,%,$(wildcard requirements/set-*.txt))
ifeq ($(filter $(SET),$(SETS)),)
$(error SET is "$(SET)"; it is a release of torch, one of $(SETS))
endif

.PHONY: help setup train test check sanitize faults mutants peers bench gpu cpp-example parameter-server online docs docs-site wheel clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1\t\2/p' Makefile | expand -t 18

setup: $(RUNTIME) ## set up $(VENV) with what training needs, and no more (DEVICE, SET)

train: $(RUNTIME) ## train a sharded model on NPROC ranks of this machine (DEVICE, NPROC, TRAIN_ARGS)
	$(BIN)/shardrec train --nproc $(NPROC) $(TRAIN_ARGS)

# Hundreds of processes import the package, most of them for a moment: they find it compiled, whatever the environment says.
test: $(DEV) ## run the tests, in so many processes, with a release of torch (WORKERS, PYTEST_ARGS, SET)
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(PYTEST_ARGS)

check: $(DEV) ## lint, format, types, then the tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict shardrec benchmarks/harness
	@$(MAKE) --no-print-directory test

# Apart from the libraries in use. The sanitizer comes first in every process, and libstdc++ with it, whose exceptions it looks
# for at the start. Python's own leaks are not looked for, and memory that is not there is an error, as without it.
sanitize: $(DEV) ## run the tests of what C++ does under the address and undefined-behaviour sanitizers (PYTEST_ARGS)
	SHARDREC_SANITIZE=$(SANITIZERS) $(BIN)/python setup.py -q build_ext --build-lib build/sanitize --build-temp build/sanitize-objects
	SHARDREC_NATIVE=$(CURDIR)/build/sanitize LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libstdc++.so)" \
	  ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1 \
	  $(BIN)/python -m pytest -o timeout=1200 tests/native tests/lookup tests/exchange $(PYTEST_ARGS)

faults: $(DEV) ## kill and stop training runs at random, and say what was lost (KILLS, SEED)
	$(BIN)/python -m tests.campaign.main --kills $(KILLS) --seed $(SEED)

mutants: $(DEV) ## change the package at random places, and say which changes no test notices (MUTANTS, FOLDERS, SEED, WORKERS)
	$(BIN)/python -m tests.mutants.main --count $(MUTANTS) --seed $(SEED) --workers $(WORKERS) $(FOLDERS)

# TorchRec's repository is the tester's, at the release that is installed: git clone --branch release/v1.8.0 ...
peers: $(DEV) ## run TorchRec's own tests on shardrec, from a checkout of its repository (TORCHREC=path, PEERS_ARGS)
	$(BIN)/python -m tests.peers.main $(TORCHREC) $(PEERS_ARGS)

bench: $(RUNTIME) ## run every benchmark under benchmarks/ that needs no GPU (BENCH_ARGS)
	@for main in $(filter-out benchmarks/gpu/main.py,$(wildcard benchmarks/*/main.py)); do \
	  [ -e "$$main" ] || { echo "there is no benchmarks/*/main.py to run"; break; }; \
	  echo "==> $$main"; module=$${main%.py}; $(BIN)/python -m "$${module//\//.}" $(BENCH_ARGS); \
	done

# It installs the CUDA builds. GPU_ARGS: such as --resume, --max-rows 10000000, --parts doctor tests.
gpu: $(DEV) ## everything that needs a GPU: doctor, tests, benchmark, profile, in runs/gpu (GPU_ARGS)
	$(BIN)/python -m benchmarks.gpu.main $(GPU_ARGS)

cpp-example: $(RUNTIME) ## serve a quantized model from C++, and compare its answers with Python's (needs cmake, g++)
	$(BIN)/python -W ignore -m examples.cpp_serving.main

parameter-server: $(RUNTIME) ## train with 2 embedding servers and 2 trainers, and compare with collectives
	$(BIN)/python -W ignore -m examples.parameter_server.main

online: $(RUNTIME) ## train on clicks that drift as they arrive, publish, follow, and plot the AUC that is served (2 minutes)
	rm -rf runs/online
	$(BIN)/python -W ignore -m examples.online.main

docs: $(DEV) ## write options, notebook and charts, and run the examples of docs/
	$(BIN)/python -m docs.make_options
	$(BIN)/python -m docs.make_notebook
	$(BIN)/python -m docs.make_chart
	$(BIN)/python -m pytest -q tests/docs

# For this Python and this torch, which the operators are compiled against. It is tried in an environment that has the packages of
# $(VENV), but not its editable install, and from a folder without the sources.
wheel: TRY = build/wheel
wheel: $(RUNTIME) ## build a wheel with the C++ operators, in dist, and try it in an environment of its own
	@rm -rf build/lib $(TRY)
	@echo "==> building the wheel (minutes, where the operators are yet to be compiled)"
	@SHARDREC_OPERATORS=required $(BIN)/python -W ignore setup.py -q build --build-lib build/lib bdist_wheel -d $(TRY)/dist
	@echo "==> trying it in $(TRY)"
	@$(BIN)/python -m venv --without-pip $(TRY)
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$$(echo $(TRY)/lib/python*/site-packages)/packages.pth"
	@$(BIN)/python -m pip --python $(TRY)/bin/python install -q --disable-pip-version-check --no-index --no-deps \
	  --ignore-installed $(TRY)/dist/*.whl
	@cd $(TRY) && bin/shardrec doctor | tee doctor.txt && grep -q "C++: the operators compiled for this torch are loaded" doctor.txt
	@cd $(TRY) && { bin/shardrec train --nproc $(NPROC) --samples 20_000 --batch-size 512 --out run >train.txt 2>&1 || { cat train.txt; exit 1; }; }
	@mkdir -p dist && mv $(TRY)/dist/*.whl dist && ls dist/shardrec-*.whl

# Once installed, the build asks no network. Its warnings are errors.
docs-site: $(SITE) ## build the pages and the API as a site, in build/site
	$(BIN)/sphinx-build -q -W --keep-going -c docs/site . build/site
	@echo "build/site/index.html"

clean: ## delete caches and build leftovers; .venv stays
	rm -rf build dist examples/cpp_serving/build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find shardrec tests examples benchmarks docs -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

$(BIN)/python:
	@if [ -z "$(PYTHON)" ]; then \
	  echo "shardrec needs Python 3.11, 3.12 or 3.13 and found none on PATH: install one, or name it with PYTHON=..." >&2; \
	  exit 1; \
	fi
	@if [ -e "$(VENV)" ]; then \
	  echo "$(VENV) is there but has no working bin/python: delete it and run make again." >&2; exit 1; \
	fi
	@echo "==> making $(VENV) with $(PYTHON)"
	@$(PYTHON) -m venv "$(VENV)" >/dev/null || { \
	  rm -rf "$(VENV)"; \
	  echo "$(PYTHON) cannot make a virtual environment with pip in it: install its venv module" \
	       "(on Debian and Ubuntu: apt-get install python3-venv) and run make again." >&2; \
	  exit 1; \
	}

# The CPU and the CUDA build of fbgemm-gpu own one folder: where the other one is, both go before the right one comes.
$(RUNTIME): requirements/base.txt requirements/$(DEVICE).txt requirements/set-$(SET).txt requirements/torchrec.txt \
            setup.cfg pyproject.toml setup.py shardrec/native/ops.cpp | $(BIN)/python
	@printf '%s' "==> installing shardrec for $(DEVICE), with torch $(SET), in $(VENV) (minutes, the first time) "
	@rm -f "$(VENV)"/.shardrec-*
	@if $(BIN)/python -m pip show -q $(if $(filter cpu,$(DEVICE)),fbgemm-gpu,fbgemm-gpu-cpu) 2>/dev/null; then \
	  $(BIN)/python -m pip uninstall --disable-pip-version-check -q -y fbgemm-gpu fbgemm-gpu-cpu; \
	fi
	@$(call install,-r requirements/$(DEVICE).txt -c requirements/set-$(SET).txt)
	@$(call install,--no-deps -r requirements/torchrec.txt -c requirements/set-$(SET).txt)
	@$(call install,--no-deps --no-build-isolation -e .); echo
	@touch $@

$(DEV): requirements/dev.txt $(RUNTIME)
	@printf '%s' "==> installing the test tools in $(VENV) "
	@$(call install,--no-warn-conflicts -r requirements/$(DEVICE).txt -r requirements/dev.txt -c requirements/set-$(SET).txt); echo
	@touch $@

$(SITE): requirements/docs.txt $(RUNTIME)
	@printf '%s' "==> installing Sphinx in $(VENV) "
	@$(call install,--no-warn-conflicts -r requirements/$(DEVICE).txt -r requirements/docs.txt -c requirements/set-$(SET).txt); echo
	@touch $@
