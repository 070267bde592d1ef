# The command face of sft_play: `make` lists the targets; each that needs the environment makes it first.

MAKEFLAGS += --no-print-directory --no-builtin-rules
.DEFAULT_GOAL := help
.SUFFIXES:

# `override` here and below so that nobody replaces the Makefile's own by a variable of the same name.
override SHELL := /bin/sh
override .SHELLFLAGS := -c

# A variable that is misspelt, another target's, or empty is refused before anything runs: the answer would silently be
# that of the defaults. Python words it (sft_play/variables.py has the table); without variables none is started.
override GIVEN := $(strip $(foreach .v,$(.VARIABLES),$(if $(filter command,$(firstword $(origin $(.v)))),$(.v))))
override quoted = $(foreach .v,$(1),'$(subst ','\'',$(.v))')
ifneq ($(GIVEN),)
override EMPTY := $(foreach .v,$(GIVEN),$(if $(strip $(value $(.v))),,$(.v)))
override REFUSED := $(shell for python in .venv/bin/python python3 python3.14 python3.13 python3.12 python3.11 \
  '$(subst ','\'',$(value VENV))/bin/python'; do "$$python" -EsSB scripts/check_variables.py \
  $(call quoted,$(MAKECMDGOALS)) --given $(call quoted,$(GIVEN)) --empty $(call quoted,$(EMPTY)) 2>/dev/null && break; done)
$(if $(REFUSED),$(error $(REFUSED)))
endif

# Values stay values. Make would expand `$` in a command-line variable when it hands it to a recipe, so that
# SET='$(shell ...)' ran; here each such variable is frozen to its raw text and reaches the program through the
# environment alone. No recipe holds the text of a variable that a user can set: it names shell variables.
# (The loop's `.v` is a name that no environment can have; a loop over `name` would hide a user's `name`.)
override define FREEZE
override $(1) := $$(value $(1))
export $(1)
endef
$(foreach .v,$(GIVEN),$(eval $(call FREEZE,$(.v))))

# Shell text, expanded by /bin/sh.
override PY := $${VENV:-.venv}/bin/python
override PATHS := PYTHONPATH="$$PWD$${PYTHONPATH:+:$$PYTHONPATH}" && export PYTHONPATH
# Ctrl-C while Python itself starts would be a traceback of its own: where `env` can hold it back, the program takes it.
override HOLD := hold= && if env --block-signal=INT true 2>/dev/null; then hold='env --block-signal=INT'; fi
# SFT_PLAY_MAKE names make's own process and the command's: one whose make is killed ends with it.
override RUN_PYTHON := $(PATHS) && $(HOLD) && SFT_PLAY_MAKE="$$PPID:$$$$" exec $$hold "$(PY)"
override PROGRAM := $(RUN_PYTHON) -m sft_play
# What launches or trains is a script that a person can give to any launcher too.
override SCRIPT := $(RUN_PYTHON) scripts
# All tests run in two processes, a file in one of them; chosen ones in one, where a debugger can stop.
override PYTEST := import os, shlex, sys, pytest; sys.exit(pytest.main(shlex.split(os.environ.get("TESTS", "")) or \
  ["-n2", "--dist=loadfile", "--no-loadscope-reorder"]))
override OWN_VENV := [ -n "$$VENV" ] && [ -f "$$VENV/bin/python" ] && [ -x "$$VENV/bin/python" ]

# Any Python 3 can run the scripts: they look for a suitable one themselves and say so when there is none.
override NO_PYTHON := [setup] No Python 3 answers (asked: PYTHON=, python3, python3.14, python3.13, python3.12, python3.11). \
Install Python 3.11 to 3.14, or name one: make setup PYTHON=/path/to/python3
override define ANY_PYTHON
for python in .venv/bin/python "$$PYTHON" python3 python3.14 python3.13 python3.12 python3.11; do \
  if "$$python" -EsSB -c 'import sys; sys.exit(sys.version_info < (3, 6))' >/dev/null 2>&1; then \
    exec "$$python" -EsSB $(1); \
  fi; \
done; echo '$(NO_PYTHON)' >&2; exit 2
endef

##@ Setup
help: ## Show this help
	@awk '/^##@ / {print "\n" substr($$0, 5)} /^#: ?/ {sub(/^#: ?/, ""); print "  " $$0} \
	  /^[a-z-]+:.*## / {name = $$0; sub(/:.*/, "", name); sub(/.*## /, ""); printf "  %-20s %s\n", name, $$0}' Makefile
setup: ## Build .venv from requirements.lock (only when it is missing or the pins changed)
	@if $(OWN_VENV); then exit 0; fi; $(call ANY_PYTHON,scripts/setup_env.py $(filter setup,$(MAKECMDGOALS)))
setup-unsloth: ## Build .venv-unsloth, the environment of tuning.backend=unsloth, whose pins exclude those of .venv
	@$(call ANY_PYTHON,scripts/setup_env.py unsloth)
lock: ## Renew requirements.lock with the newest versions (torch moves only by TORCH=X.Y.Z)
	@$(call ANY_PYTHON,scripts/lock.py)

##@ Data
process: setup ## Raw files (data/raw) to checked conversations in data/processed, split, with a report
	@$(PROGRAM) process
style: setup ## Give processed conversations a system prompt (STYLE="…"), into data/processed_with_style
	@$(PROGRAM) style
dapt-docx: setup ## Documents (data/documents: .docx, .pdf, .html, .md, .rst, .txt) to clean text in data/processed_text
	@$(PROGRAM) dapt-docx
render: setup ## Write the text that the model will see, one row per example, with its mask as spans (OUT=FILE)
	@$(PROGRAM) render
preview: setup ## Show the tokens of examples, the trained part in colour, here and as a page (N=5, ROW=12, OUT=FILE)
	@$(PROGRAM) preview
check: setup ## Check config, model, template, data, masks, disk and memory before training; the exit code tells
	@$(PROGRAM) check
full-pipeline: setup ## process, style where asked (STYLE="…"), render and check
	@$(PROGRAM) full-pipeline
mask-score: setup ## Score the loss masks of chat templates (TEMPLATES=FOLDER TOKENIZER=FOLDER OUT=FILE)
	@$(PROGRAM) mask-score

##@ Train
train: setup ## Fine-tune as CONFIG says (without CONFIG: configs/run_starter.yaml)
	@$(SCRIPT)/train.py
train-tb: setup ## The same with TensorBoard beside it (TB_PORT, TB_HOST, TB_KEEP=1)
	@$(SCRIPT)/train.py --tensorboard
train-and-watch: train-tb ## Another name of train-tb
resume: setup ## Continue the newest unfinished run of CONFIG (RUN=NAME: that run)
	@$(SCRIPT)/resume.py

##@ Many GPUs
train-distributed: setup ## Fine-tune over all GPUs, or CPU ranks (STRATEGY=ddp|fsdp|zero2|zero3 NPROC=2 GPUS=0,1)
	@$(SCRIPT)/train_distributed.py
train-distributed-tb: setup ## The same with TensorBoard beside it (TB_PORT, TB_HOST, TB_KEEP=1)
	@$(SCRIPT)/train_distributed.py --tensorboard
train-deepspeed: setup ## The same with DeepSpeed: ZeRO-2, or what DEEPSPEED_CONFIG says
	@$(SCRIPT)/train_deepspeed.py
train-deepspeed-tb: setup ## DeepSpeed with TensorBoard beside it
	@$(SCRIPT)/train_deepspeed.py --tensorboard
launch-command: setup ## Show the command and variables that start the ranks, and start nothing
	@$(SCRIPT)/launch_command.py
setup-accelerate: setup ## Write an accelerate configuration for this machine (NUM_MACHINES, MACHINE_RANK, MAIN_IP)
	@$(PROGRAM) setup-accelerate
run-notebook: setup ## Run a notebook of yours over ranks, every cell on each (NOTEBOOK=FILE NPROC=2 GPUS=0,1)
	@$(SCRIPT)/run_notebook.py
doctor: setup ## Look for what breaks a run: versions, drivers, limits, disk, an all-reduce over every rank
	@$(PROGRAM) doctor
consolidate: setup ## Write the last checkpoint of RUN, ZeRO's parts included, as safetensors (OUT=FOLDER)
	@$(PROGRAM) consolidate
verify-layouts: setup ## Train the same run under every layout and compare with one process (OUT=FILE, CONFIG=FILE)
	@$(SCRIPT)/verify_layouts.py

##@ See
gpu-info: setup ## Show GPUs, driver, topology, host and disk (FULL=1 asks torch, HARDWARE=2xH200 what a plan assumes)
	@$(PROGRAM) gpu-info
gpu-selftest: setup ## Try this machine's GPUs against the plan: kernels, peaks, speeds, layouts; 10 minutes (OUT=FILE)
	@$(SCRIPT)/gpu_selftest.py
memory-check: setup ## Show what a run holds of each GPU beside what was predicted (WATCH=1, RUN=NAME)
	@$(PROGRAM) memory-check
tensorboard: setup ## Show the curves of all runs in output.dir (RUN=NAME: of one); stays until tb-stop
	@$(PROGRAM) tensorboard
tb-open: setup ## Open that page in a browser, or say its address
	@$(PROGRAM) tb-open
tb-stop: setup ## Stop this project's TensorBoards (CONFIG=FILE, RUN=NAME: those of that folder)
	@$(PROGRAM) tb-stop
tb-clean: setup ## Remove the event files of finished runs; asks first (YES=1: does not)
	@$(PROGRAM) tb-clean

##@ Plan
plan: setup ## Predict memory and speed, choose layout and batch for CONFIG (HARDWARE=2xH200, TRACE=1, JSON=1)
	@$(SCRIPT)/plan.py
memory-model-score: setup ## Score the memory model on measured peaks (PEAKS=FILE.csv OUT=score.json)
	@$(PROGRAM) memory-model-score

##@ Develop
test: setup ## Run the tests (TESTS="tests/test_x.py -k name" chooses)
	@$(PATHS) && exec "$(PY)" -c '$(PYTEST)'
lint: setup ## Check style, format and types (ruff, mypy)
	@"$(PY)" -m ruff check .
	@"$(PY)" -m ruff format --check .
	@"$(PY)" -m mypy
format: setup ## Sort imports and format the code (ruff)
	@"$(PY)" -m ruff check --select I --fix .
	@"$(PY)" -m ruff format .
generate: setup ## Renew generated files: configs/reference.yaml, configs/run.schema.json, sft_play/starter/data
	@$(PROGRAM) generate
benchmark: setup ## Measure predicted against real peaks (OUT=FILE; SMALL=1 on a CPU)
	@$(PATHS) && exec "$(PY)" benchmarks/predicted_peak.py
benchmark-engines: setup ## Predicted against real peaks of each engine with one rank (OUT=FILE; SMALL=1 on a CPU)
	@$(PATHS) && exec "$(PY)" benchmarks/engines.py
benchmark-logging: setup ## What logging costs: steps with it and without, in turns (OUT=FILE)
	@$(PATHS) && exec "$(PY)" benchmarks/logging_cost.py
benchmark-threads: setup ## How OpenMP's threads should wait: training alone and beside busy processes (OUT=FILE)
	@$(PATHS) && exec "$(PY)" -m benchmarks.threads
benchmark-starter: setup ## Exact match of the starter over seeds and threads, and the worst (OUT=FILE)
	@$(PATHS) && exec "$(PY)" -m benchmarks.starter
bench-data: setup ## Rows per second and memory of data preparation beside TRL's (OUT=FILE ROWS=10000,1000000)
	@$(PATHS) && exec "$(PY)" benchmarks/data.py
benchmark-speed: setup ## Predicted against published speeds (PEAKS=FILE.csv OUT=FILE)
	@$(PATHS) && exec "$(PY)" -m benchmarks.speed
mutation-score: setup ## How many changed decisions the tests find (MUTANTS=200 SEED=0 OUT=FILE)
	@$(PATHS) && exec "$(PY)" -m benchmarks.mutation_score
clean: ## Remove caches and build leftovers (never .venv, outputs or data)
	@rm -rf .pytest_cache .ruff_cache .mypy_cache __pycache__ build dist *.egg-info
	@find sft_play $(wildcard scripts tests benchmarks) -type d -name __pycache__ -prune -exec rm -rf {} +

##@ Variables (from the command line or the environment)
#: CONFIG=FILE             the run YAML (train, resume, plan)
#: SET='a.b=1 c.d=[x, y]'  settings that replace those of CONFIG
#: STRATEGY=zero2          layout over several ranks: ddp, fsdp, zero1, zero2, zero3, zero2_offload, zero3_offload
#: NPROC=2  GPUS=0,1       processes on this node; the GPUs to use
#: NNODES=2 NODE_RANK=0 MASTER_ADDR=HOST MASTER_PORT=29500   several nodes, the command once on each
#: NOTEBOOK=FILE           run-notebook: the notebook (.ipynb); it runs from its own folder
#: DEEPSPEED_CONFIG=FILE   your DeepSpeed file (JSON or YAML)
#: TB_PORT=6006 TB_HOST=127.0.0.1 TB_KEEP=1   TensorBoard's address; let it live on after the run
#: STYLE='You are terse.'  style, full-pipeline: the system prompt
#: N=5  ROW=12             preview: how many examples; or this row of the training file
#: FORCE=1                 process, style, dapt-docx, render, preview: write over files that were edited by hand
#: TEMPLATES=FOLDER  TOKENIZER=FOLDER   mask-score: chat templates, and the tokenizer to score them with
#: ROWS=10000,1000000      bench-data: how many rows
#: MUTANTS=200  SEED=0     mutation-score: how many, and which sample
#: YES=1                   tb-clean: remove without asking
#: ACCELERATE_CONFIG=FILE  your accelerate configuration
#: RUN=NAME                the run that resume continues, or that consolidate writes out
#: HARDWARE=2xH200         plan for this machine instead of the present one
#: JSON=1  OUT=FILE        plan: print one JSON object; write it to FILE
#: TRACE=1                 plan: confirm the choice by tracing the step (no GPU needed)
#: WHATIF='a.b=1,2 c=x,y'  plan: the plan of every combination
#: MAX=seq_len             plan: the largest that fits (seq_len, batch or model)
#: PRICE=2.5               plan: money per GPU-hour
#: PEAKS=FILE              memory-model-score: CSV of measured peaks
#: LAYOUTS=ddp,fsdp  MODES=lora  STEPS=4   verify-layouts: what is compared
#: FULL=1                  gpu-info: start torch too and ask it what it sees
#: WATCH=1                 memory-check: renew until Ctrl-C
#: TESTS='ARGUMENTS'       arguments for pytest
#: PYTHON=PATH             the Python (3.11 to 3.14) that .venv is built with
#: VENV=PATH               use this environment of yours; it is never built or changed
#: UNSLOTH_VENV=PATH       the environment that has Unsloth, where it is not .venv-unsloth
#: TORCH=BUILD             setup: the build of torch (cpu, cu126, cu130, rocm7.2, index, auto); lock: X.Y.Z, its version

##@ Examples
#: make train
#: make plan CONFIG=configs/run_starter.yaml HARDWARE=2xH200
#: make train CONFIG=my.yaml SET='train.epochs=1 model.max_seq_len=1024'
#: make test TESTS='tests/test_makefile.py -k help'

.PHONY: help setup setup-unsloth lock train train-tb train-and-watch tensorboard tb-open tb-stop tb-clean resume train-distributed train-distributed-tb train-deepspeed train-deepspeed-tb launch-command setup-accelerate run-notebook doctor consolidate verify-layouts gpu-info gpu-selftest memory-check process style dapt-docx render preview check full-pipeline mask-score plan memory-model-score test lint format generate benchmark benchmark-engines benchmark-logging benchmark-threads benchmark-starter bench-data benchmark-speed mutation-score clean
