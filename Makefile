# make sweep   environment, model pair, servers, notebooks, report; everything into OUT
# make test    lint, types, and all tests on both SGLang releases, real servers included; SGLANG=0.5.23: on that one
# make lab     JupyterLab in the same environment
# make report  notebook 04 executed again over the reference results, its outputs kept in the repository
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

# A release's own tests run in its environment; those that no release decides run in the first one's alone.
RELEASES := $(if $(filter command,$(firstword $(origin SGLANG))),$(SGLANG),0.5.12 0.5.23)
LOGS = $(RELEASES:%=.venv/test-%.log)
# At the same time: a server here computes on one core.
AT_ONCE = $(MAKE) --no-print-directory -j2

# Where this is set, as in many containers, each process of each server would compile SGLang anew: 10 s instead of none.
export PYTHONDONTWRITEBYTECODE :=

SHELL := bash
.SHELLFLAGS := -o pipefail -c

.PHONY: sweep test lint lab report env $(RELEASES:%=env-%) $(RELEASES:%=test-%)

sweep: env
	@$(BIN)/specdec run $(RUN_OPTIONS)

# The last line is pytest's own.
test:
	@$(AT_ONCE) $(RELEASES:%=env-%)
	@$(MAKE) --no-print-directory lint
	@$(AT_ONCE) --keep-going $(RELEASES:%=test-%) || { grep -hE '^(FAILED|ERROR) ' $(LOGS); tail -qn 1 $(LOGS); false; }
	@tail -qn 1 $(LOGS)

# Ctrl-C is for pytest, which ends its servers; tee and sed wait for what it says then.
$(RELEASES:%=test-%): test-%:
	@.venv/sglang-$*/bin/python -m pytest -v $(if $(filter $*,$(firstword $(RELEASES))),,-m sglang) \
	  tests/unit tests/server tests/notebooks 2>&1 | (trap '' INT; tee .venv/test-$*.log | sed -u 's/^/$* | /')

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

lab: env
	$(BIN)/jupyter lab --notebook-dir notebooks $(if $(filter 0,$(shell id -u)),--allow-root)

report: env
	$(BIN)/python -c 'from specdec.notebooks import refresh_report; refresh_report()'

env:
	@env/setup.sh '$(SGLANG)'

$(RELEASES:%=env-%): env-%:
	@env/setup.sh '$*'
