# What the Makefile and benchmarks/Makefile include: what is refused before anything runs, how values reach the programs,
# and what the targets run. Every path is relative to the checkout.

MAKEFLAGS += --no-print-directory --no-builtin-rules
.DEFAULT_GOAL := help
.SUFFIXES:

# `override` here and below so that nobody replaces the Makefile's own by a variable of the same name.
override SHELL := /bin/sh
override .SHELLFLAGS := -c

# A variable that is misspelt, another target's, or empty is refused before anything runs: the answer would silently be
# that of the defaults. So is a target that there is not: for `make tests` make would find a folder and nothing to do.
# Python words it (sft_play/variables.py has the table); where nothing can be wrong none is started.
override GIVEN := $(strip $(foreach .v,$(.VARIABLES),$(if $(filter command,$(firstword $(origin $(.v)))),$(.v))))
override TARGETS := $(if $(filter benchmarks/Makefile,$(MAKEFILE_LIST)),benchmarks/Makefile,Makefile)
override EVERY := $(shell sed -n 's/^\([a-z][a-z-]*\):.*/\1/p' $(TARGETS))
.PHONY: $(EVERY)
override PYTHONS := python3 python3.14 python3.13 python3.12 python3.11
override quoted = $(foreach .v,$(1),'$(subst ','\'',$(.v))')
ifneq ($(GIVEN)$(filter-out $(EVERY),$(MAKECMDGOALS)),)
override EMPTY := $(foreach .v,$(GIVEN),$(if $(strip $(value $(.v))),,$(.v)))
override refused = $(shell for python in .venv/bin/python $(PYTHONS) \
  '$(subst ','\'',$(value VENV))/bin/python'; do "$$python" -EsSB scripts/check_variables.py $(call quoted,$(MAKECMDGOALS)) \
  --targets $(EVERY) --given $(call quoted,$(GIVEN)) --empty $(call quoted,$(EMPTY)) \
  --make $$PPID $(1) 2>/dev/null && break; done)
override REFUSED := $(call refused)
$(if $(REFUSED),$(if $(filter-out 0,$(value JSON)),$(info $(call refused,--json)))$(error $(REFUSED)))
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
# All tests run in three processes, a file in one of them: a third of their time is waiting for ranks, timeouts and
# servers, so two cores have work for three. Chosen tests run in one, where a debugger can stop.
override PYTEST := import os, shlex, sys, pytest; sys.exit(pytest.main(shlex.split(os.environ.get("TESTS", "")) or \
  ["-n3", "--dist=loadfile", "--no-loadscope-reorder"]))
override OWN_VENV := [ -n "$$VENV" ] && [ -f "$$VENV/bin/python" ] && [ -x "$$VENV/bin/python" ]

# Any Python 3 can run the scripts: they look for a suitable one themselves and say so when there is none.
override NO_PYTHON := [setup] No Python 3 answers (asked: PYTHON= $(PYTHONS)). \
Install Python 3.11 to 3.14, or name one: make setup PYTHON=/path/to/python3
override define ANY_PYTHON
for python in .venv/bin/python "$$PYTHON" $(PYTHONS); do \
  if "$$python" -EsSB -c 'import sys; sys.exit(sys.version_info < (3, 6))' >/dev/null 2>&1; then \
    exec "$$python" -EsSB $(1); \
  fi; \
done; echo '$(NO_PYTHON)' >&2; case "$${JSON:-0}" in 0) ;; *) \
  echo '{"ok": false, "kind": "fix", "exit": 2, "error": "$(NO_PYTHON)"}' ;; esac; exit 2
endef

# `make help plan`, `help HARDWARE`, `help train.epochs`: the word after `help` is what it is about, and runs nothing.
override ABOUT := $(if $(filter help.2,$(firstword $(MAKECMDGOALS)).$(words $(MAKECMDGOALS))),$(filter-out help,$(word 2,$(MAKECMDGOALS))))
ifneq ($(and $(ABOUT),$(filter Makefile,$(TARGETS))),)
help:
	@$(call ANY_PYTHON,scripts/check_variables.py --about $(call quoted,$(ABOUT)))
$(sort setup train-tb $(ABOUT)):
	@:
else

# Every other target of the Makefile is the command of that name: of `python -m sft_play`, or where it launches or trains
# a script of its own. (train-and-watch has none: it is train-tb.)
override OWN := help setup setup-unsloth test coverage fuzz lint format clean train-and-watch
override SCRIPTED := $(filter train% resume launch-command run-notebook verify-layouts plan gpu-selftest,$(EVERY))
ifeq ($(TARGETS),Makefile)
$(filter-out $(OWN),$(SCRIPTED)):
	@$(SCRIPT)/$(subst -,_,$(@:-tb=)).py$(if $(filter %-tb,$@), --tensorboard)
$(filter-out $(OWN) $(SCRIPTED),$(EVERY)):
	@$(PROGRAM) $@
endif

# How to begin, where the Makefile says so; with ALL=1 every target and variable.
help:
	@[ "$${ALL:-0}" = 0 ] && sed -n 's/^#> //p' $(TARGETS) | grep . || \
	  awk '/^##@ / {print "\n" substr($$0, 5)} /^#: ?/ {sub(/^#: ?/, ""); print "  " $$0} \
	  /^[a-z-]+:.*## / {name = $$0; sub(/:.*/, "", name); sub(/.*## /, ""); printf "  %-20s %s\n", name, $$0}' $(TARGETS)
setup:
	@if $(OWN_VENV); then exit 0; fi; $(call ANY_PYTHON,scripts/setup_env.py $(MAKECMDGOALS))
setup-unsloth:
	@$(call ANY_PYTHON,scripts/setup_env.py unsloth)
test:
	@$(PATHS) && exec "$(PY)" -c '$(PYTEST)'
coverage:
	@$(PATHS) && export PYTEST_ADDOPTS="$${TESTS:--n3 --dist=loadfile --no-loadscope-reorder}" && \
	  "$(PY)" -m coverage erase && { "$(PY)" -m coverage run -m pytest; code=$$?; } && \
	  "$(PY)" -m coverage combine --quiet && "$(PY)" -m coverage report && exit $$code
fuzz:
	@$(RUN_PYTHON) -m benchmarks.fuzz
lint:
	@"$(PY)" -m ruff check .
	@"$(PY)" -m ruff format --check .
	@"$(PY)" -m mypy
format:
	@"$(PY)" -m ruff check --select I --fix .
	@"$(PY)" -m ruff format .
clean:
	@rm -rf .pytest_cache .ruff_cache .mypy_cache __pycache__ build dist *.egg-info .coverage .coverage.*
	@find sft_play $(wildcard scripts tests benchmarks) -type d -name __pycache__ -prune -exec rm -rf {} +
endif
