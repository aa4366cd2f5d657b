# Commands from nothing: `make demo` trains a GPT, `make model` one that answers, `make test` proves it.
# `make demo OVERRIDES="train.steps=20"` changes keys of the demo, DEMO_MEGABYTES the size of its data.

PYTHON ?= python3
# Test files that run at a time: one more than there are cores, because many wait for processes.
WORKERS ?= $(shell cores=$$(getconf _NPROCESSORS_ONLN); echo $$((cores < 8 ? cores + 1 : 8)))
BIN := .venv/bin
SECONDS ?= 60
SEED ?= $(shell date +%s)
DEMO := runs/demo-data
DEMO_MEGABYTES ?= 8
TRAIN := $(BIN)/python pretrain_gpt.py --config configs/demo.yaml
MODEL := runs/demo-chat-data
MEGABYTES ?= 40
VOCAB ?= 4096

# Tests of what `make test-all` leaves out where it is not installed: Ray, lm-evaluation-harness, and
# Slurm, which comes with the machine or not.
ENGINES := tests/unit/tools/test_ray.py tests/unit/tools/test_ray_server.py tests/unit/tools/test_slurm.py tests/unit/inference/test_lm_eval.py

# Other versions that pyproject.toml allows: those of an image for GPUs, with the newest numpy, and
# the Python that has it, if it is here.
VERSIONS := torch==2.11.0 triton==3.6.0 numpy
NEWER_PYTHON ?= $(firstword $(shell for python in python3.12 "$$(pyenv root 2> /dev/null)"/versions/3.12*/bin/python \
	$(PYTHON); do "$$python" -c 'import venv' 2> /dev/null && echo "$$python"; done))
# Tests of what runs on a GPU and of what differs between versions.
VERSION_TESTS := tests/unit/kernels tests/parity/test_kernels.py tests/parity/test_cuda_graph_replay.py \
	tests/parity/test_shared_device.py tests/unit/support/test_fake_cuda.py tests/unit/support/test_fake_nccl.py \
	tests/end_to_end/test_fake_gpu_runs.py tests/end_to_end/test_fake_gpu_faults.py

# What is imported is compiled once and not in every process, also where the environment turns that off.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo model test test-all test-again test-engines test-processors test-versions lint format docs fuzz parity-fuzz gpu-check \
	wheels clean

demo: $(DEMO)/python.idx
	$(TRAIN) $(OVERRIDES)
	$(BIN)/python tools/generate.py --checkpoint runs/demo/checkpoints --prompt "def main("

# From text to chat, in stages (docs/road.md). The same command continues what was interrupted.
# MEGABYTES, VOCAB, BASE and CHAT make it shorter: sizes of texts and tokenizer, and keys of both runs.
model: $(MODEL)/sources.idx $(MODEL)/prose.idx $(MODEL)/dialogues.idx $(MODEL)/questions.jsonl
	$(BIN)/python pretrain_gpt.py --config configs/demo-chat-base.yaml $(BASE)
	$(BIN)/python pretrain_gpt.py --config configs/demo-chat.yaml $(CHAT)
	rm -rf runs/demo-chat-huggingface
	$(BIN)/python tools/checkpoint.py export-hf runs/demo-chat --to runs/demo-chat-huggingface \
		--tokenizer hf:$(MODEL)/tokenizer/tokenizer.json
	$(BIN)/python tools/chat.py --checkpoint runs/demo-chat/checkpoints --temperature 0 --echo < docs/examples/questions.txt

# Every mechanism once. What repeats one of them with other cases is marked slow.
test: .venv/ready
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m "not slow" --hypothesis-profile quick

test-all: .venv/ready
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

# What failed in the last run, alone, one after the other.
test-again: .venv/ready
	$(BIN)/python -m pytest -v --last-failed --last-failed-no-failures none

test-engines: .venv/engines
	$(BIN)/python -m pytest $(ENGINES)

# Tests of numbers under the instructions and threads of other processors; ARGS names files.
test-processors: .venv/ready
	$(BIN)/python tools/test_processors.py $(ARGS)

lint: .venv/ready
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	PYTHONPATH=kernels $(BIN)/lint-imports --no-cache

format: .venv/ready
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# What documents take from the code.
docs: .venv/ready
	$(BIN)/python tools/options.py > docs/reference/options.md
	$(BIN)/python tools/families.py > docs/reference/families.md

# With the versions of an image for GPUs. Other packages are those of constraints.txt.
test-versions: .venv-versions/ready
	.venv-versions/bin/python -m pytest -n $(WORKERS) --dist loadfile -m "not slow" \
		--hypothesis-profile quick $(VERSION_TESTS)

# torch alone takes most of the time, and shares nothing with another installation that runs meanwhile.
.venv-versions/torch: pyproject.toml constraints.txt
	$(NEWER_PYTHON) -m venv .venv-versions
	grep -vE '^(torch|triton|numpy|setuptools)==' constraints.txt > .venv-versions/constraints.txt
	.venv-versions/bin/python -m pip install -q --no-compile $(VERSIONS)
	touch $@

.venv-versions/ready: .venv-versions/torch
	PIP_CONSTRAINT=.venv-versions/constraints.txt .venv-versions/bin/python -m pip install -q --no-compile \
		-e . pytest pytest-xdist hypothesis
	touch $@

# Changed inputs of every kind; ends with a summary, and with the command for each finding.
fuzz: .venv/ready
	$(BIN)/python tests/support/fuzz/fuzz.py --seconds $(SECONDS) --seed $(SEED)

# Random models under random layouts against one rank, for SECONDS or, if it is given, COUNT of them; a
# failure is made small and printed as a config.
parity-fuzz: .venv/ready
	$(BIN)/python tests/support/parity/parity_fuzz.py --seed $(SEED) \
		$(if $(COUNT),--count $(COUNT),--seconds $(SECONDS))

# Tests and measures kernels and whole steps on the GPU that is here, with the Python that has its torch;
# ARGS=--skip-training and ARGS=--only-training each have the whole of its time.
gpu-check:
	$(PYTHON) benchmarks/gpu/gpu_check.py $(ARGS)

# Wheels of what an environment with torch lacks, for nodes that reach no package index. PYTHON is the
# version of the nodes' Python, such as 3.12; MACHINE their processor, if it is another one.
wheels:
	python3 tools/wheels.py --python $(PYTHON) $(if $(MACHINE),--machine $(MACHINE))

$(DEMO)/corpus.jsonl: | .venv/ready
	$(BIN)/python tools/demo_corpus.py --megabytes $(DEMO_MEGABYTES) --output $@

$(DEMO)/tokenizer.model: $(DEMO)/corpus.jsonl
	$(BIN)/python tools/train_tokenizer.py --input $< --vocab 4096 --output $(DEMO)/tokenizer

$(DEMO)/python.idx: $(DEMO)/corpus.jsonl $(DEMO)/tokenizer.model
	$(BIN)/python tools/preprocess_data.py --input $< --output $(DEMO)/python \
		--tokenizer sentencepiece:$(DEMO)/tokenizer.model

$(MODEL)/%.jsonl: | .venv/evaluate
	$(BIN)/python tools/demo_corpus.py --kind $* --megabytes $(MEGABYTES) --output $@

$(MODEL)/tokenizer/tokenizer.json: $(MODEL)/sources.jsonl $(MODEL)/prose.jsonl
	$(BIN)/python tools/train_tokenizer.py --input $^ --vocab $(VOCAB) --kind byte-bpe \
		--control "<|im_start|>,<|im_end|>" --answer-end "<|im_end|>" \
		--template docs/examples/chatml.jinja --output $(@D) --overwrite

$(MODEL)/dialogues.idx: $(MODEL)/dialogues.jsonl $(MODEL)/tokenizer/tokenizer.json
	$(BIN)/python tools/preprocess_chat.py --input $< --output $(basename $@) \
		--tokenizer hf:$(MODEL)/tokenizer/tokenizer.json --overwrite

$(MODEL)/%.idx: $(MODEL)/%.jsonl $(MODEL)/tokenizer/tokenizer.json
	$(BIN)/python tools/preprocess_data.py --input $< --output $(basename $@) \
		--tokenizer hf:$(MODEL)/tokenizer/tokenizer.json --overwrite

# pip comes first: the one that Python 3.11 brings takes twice as long to see what fits. torch comes
# alone, so that nothing else can ask for another build of it, and is compiled while pip brings the
# rest, which is compiled by who first needs it. So is the tests' stand-in for GPUs, if it can be.
.venv/ready: pyproject.toml setup.py constraints.txt
	$(PYTHON) -m venv .venv
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install -q --upgrade pip
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install -q --no-compile torch
	{ PYTHONPATH=tests/support $(BIN)/python -m fake_cuda.build; \
	$(BIN)/python -m compileall -q -j 0 .venv/lib/python*/site-packages/torch; } > /dev/null 2>&1 & \
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install -q --no-compile -e '.[dev]'
	touch $@

.venv/evaluate: .venv/ready
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install -q --no-compile -e '.[evaluate]'
	touch $@

.venv/engines: .venv/evaluate
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install -q --no-compile -e '.[ray]'
	touch $@

clean:
	rm -rf .venv .venv-versions runs
