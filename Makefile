# make sweep   environment, model pair, servers, notebooks, report; everything into OUT
# make test    lint, types, and all tests (real servers included)
# make lab     JupyterLab in the same environment
# Overrides:   make sweep CONCURRENCY=1,8 THRESHOLDS=4 REPEATS=1 WORKERS=v1 PROFILE=cpu-tiny OUT=results/my-run
#              make sweep SGLANG=0.5.23

SGLANG := 0.5.12
VENV := .venv/sglang-$(SGLANG)
BIN := $(VENV)/bin

# A misspelt name would otherwise be taken in silence.
NAMES := CONCURRENCY THRESHOLDS REPEATS WORKERS PROFILE OUT SGLANG
GIVEN := $(foreach name,$(.VARIABLES),$(if $(filter command,$(firstword $(origin $(name)))),$(name)))
UNKNOWN := $(filter-out $(NAMES) MAKE% -%,$(GIVEN))
ifneq ($(UNKNOWN),)
$(error unknown name $(UNKNOWN); known: $(NAMES))
endif

# What is not given, or given empty, is left to the profile.
option = $(if $($(1)),$(2) '$(subst ','\'',$($(1)))')
RUN_OPTIONS = $(call option,PROFILE,--profile) $(call option,CONCURRENCY,--concurrency) \
  $(call option,THRESHOLDS,--thresholds) $(call option,REPEATS,--repeats) $(call option,WORKERS,--workers) \
  $(call option,OUT,--out)

.PHONY: sweep test lint lab env

sweep: env
	@$(BIN)/specdec run $(RUN_OPTIONS)

test: lint
	$(BIN)/python -m pytest tests/unit tests/server tests/notebooks

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

lab: env
	$(BIN)/jupyter lab --notebook-dir notebooks $(if $(filter 0,$(shell id -u)),--allow-root)

env:
	@env/setup.sh '$(SGLANG)'
