# Everything sets itself up: `make demo` on a fresh checkout is a good first command.
#
#   make demo        a real daemon at work, in half a minute
#   make test        all tests, with real processes, signals and a sample of the kills
#   make test-fast   those without real processes, in under a minute
#   make kills       every SIGKILL, power cut and failing call; replay one: make kills KILL=37
#   make stress      the tests with all cores busy beside them; one test often: TESTS=path N=20
#   make test-pythons           the fast tests under each later Python that is on this machine
#   make test-systemd           those under a real systemd, in containers of their own (root)
#   make test-systemd-matrix    the same with the systemd of each Debian (root; fetches them once)
#   make lint        ruff, mypy, flake8
#   make bench       each program in bench/, one after the other
#   make lock        write requirements/*.txt anew, with the newest versions
#   make clean       remove everything that make created
#
#   sudo make install-service      the daemon as a service of this machine; again for an upgrade
#   sudo make uninstall-service    removes it; state and configuration are kept

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUN := $(VENV)/run.stamp
DEV := $(VENV)/dev.stamp
# Quiet, since the pip of a fresh environment mentions newer versions of itself.
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check --no-input
# No more workers than the two cores that any machine has: tests with real processes use wall time.
# Chains of kills take a minute each: a worker without tests left takes some of the other one's.
PYTEST := $(BIN)/pytest -q -n 2 --dist worksteal
LINTED := reconciled config tests bench
# flake8-async alone, ruff does the rest. ASYNC9 would demand a checkpoint on every path, and
# ASYNC114 a list of all functions that are started with nursery.start(). On the command line,
# since flake8 refuses codes as long as these in its own options.
FLAKE8 := $(BIN)/flake8 --isolated --select=ASY --disable=ASYNC9,ASYNC114

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-fast test-systemd test-systemd-matrix kills stress test-pythons \
	lint ruff format mypy flake8 bench lock install-service uninstall-service clean

help:
	@sed -n 's/^#   //p' Makefile

demo: $(RUN)
	@$(BIN)/python config/demo/demo.py

# `make kills` runs the kills that are left out here; SELECT= leaves out nothing, as CI does.
test stress: SELECT = not exhaustive
test: $(DEV)
	$(PYTEST) -m '$(SELECT)'

test-fast: $(DEV)
	$(PYTEST) -m 'not processes and not slow'

test-systemd: $(DEV)
	$(PYTEST) tests/systemd

test-systemd-matrix: $(DEV)
	@tests/systemd/matrix $(RELEASES)

stress: $(DEV)
	$(BIN)/python tests/stress.py $(PYTEST) -m '$(SELECT)' $(if $(N),--repeat=$(N)) $(TESTS)

# TARGET=test runs all tests in each of them, PYTHONS='3.12' one version alone.
test-pythons:
	@MAKE='$(MAKE)' tests/pythons $(or $(TARGET),test-fast) $(PYTHONS)

# KILL, KILL_SEED and CUT_SEED of the command line are in the environment of the tests.
kills: $(DEV)
	$(PYTEST) tests/kills $(if $(KILL)$(KILL_SEED),-k 'killed_at',$(if $(CUT_SEED),-k power_cut))

# A target for each, so that `make -k lint` shows the findings of all of them.
lint: ruff format mypy flake8

ruff: $(DEV)
	$(BIN)/ruff check $(LINTED)

format: $(DEV)
	$(BIN)/ruff format --check $(LINTED)

mypy: $(DEV)
	$(BIN)/mypy --strict reconciled config/demo/demo.py

flake8: $(DEV)
	$(FLAKE8) reconciled
	@# A test without an await is async so that pytest-trio runs it.
	$(FLAKE8),ASYNC124 config tests bench

bench: $(DEV)
	@for program in bench/*.py; do echo "== $$program"; $(BIN)/python "$$program" || exit 1; done

# An environment whose Python was removed or replaced is made anew; otherwise pip only changes
# what differs, and a second `make` changes nothing.
$(VENV)/made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
		{ echo 'Python 3.11 or later is missing: apt-get install python3, or name one: make PYTHON=…' >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
		{ echo 'The venv module of Python is missing: apt-get install python3-venv' >&2; exit 1; }
	@$(BIN)/python -c '' 2>/dev/null || $(PYTHON) -m venv --clear $(VENV)
	@touch $@

$(RUN): $(VENV)/made requirements/run.txt pyproject.toml
	@echo 'Setting up $(VENV) …'
	@$(PIP) install --require-hashes -r requirements/run.txt
	@$(PIP) install --no-deps --no-build-isolation --editable .
	@touch $@

$(DEV): $(VENV)/made requirements/dev.txt pyproject.toml
	@echo 'Setting up $(VENV), with what tests and linters need …'
	@$(PIP) install --require-hashes -r requirements/dev.txt
	@$(PIP) install --no-deps --no-build-isolation --editable .
	@touch $@ $(RUN)

# uv and not pip-compile, for one lock has to serve every Python from 3.11 on: pip-compile
# leaves out what the Python that runs it does not need (libcst wants another YAML on 3.13).
UV = .venv-lock/bin/uv pip compile --quiet --universal --python-version 3.11 --upgrade \
	--generate-hashes --no-emit-index-url --custom-compile-command 'make lock'

lock:
	$(PYTHON) -m venv --clear .venv-lock
	.venv-lock/bin/python -m pip --quiet --disable-pip-version-check install -r requirements/lock.in
	$(UV) pyproject.toml requirements/build.in --all-extras --output-file requirements/dev.txt
	$(UV) pyproject.toml requirements/build.in -c requirements/dev.txt --output-file requirements/run.txt
	rm -rf .venv-lock

# The head of the script lists what may be set, such as PREFIX= and DESTDIR=. The service does not
# use the Python of the checkout, which often is in a home directory, where a service cannot see it.
install-service uninstall-service:
	@env -u PYTHON $(foreach name,PYTHON PREFIX BINDIR UNITDIR SYSUSERSDIR TMPFILESDIR CATALOGDIR \
		SYSCONFDIR WHEELS SYSTEMD DESTDIR,$(if $(filter command line,$(origin $(name))),$(name)='$($(name))')) \
		systemd/install.sh $(@:-service=)

clean:
	rm -rf $(VENV) .venv-* .container build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
