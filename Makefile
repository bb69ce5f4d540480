# `make lab` opens the course, `make test` runs every check, `make notebooks` executes the notebooks again.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# Root needs a flag of its own. Without a screen no browser can open; the address with its token is printed either way.
LAB_FLAGS := $(if $(filter 0,$(shell id -u)),--allow-root)
ifeq ($(shell uname -s)$(DISPLAY)$(WAYLAND_DISPLAY)$(BROWSER),Linux)
LAB_FLAGS += --no-browser
endif

.PHONY: lab test notebooks
.NOTPARALLEL:

# -y: Ctrl-C ends the server at once instead of asking whether to. The trap keeps the shell, and so make, from reporting it.
lab: $(VENV)/.lab
	@trap : INT; $(BIN)/python -m jupyterlab $(LAB_FLAGS) -y --ServerApp.root_dir=notebooks --LabApp.default_url=/lab/tree/00_start_here.ipynb

# The same device and as many threads everywhere, so that committed outputs can be compared.
test notebooks: export VRAMLAB_DEVICE = cpu
test notebooks: export OMP_NUM_THREADS = 1

# Cheap checks first; the first that fails ends it.
test: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests
	$(BIN)/python -m pytest -p no:cacheprovider --nbval --nbval-current-env --nbval-cell-timeout=300 notebooks

notebooks: $(VENV)/.test
	$(BIN)/python benchmarks/execute_notebooks.py

# Stamps: pip runs again only when pyproject.toml has changed. The extras of test contain those of lab.
$(VENV)/.lab: pyproject.toml | $(VENV)/.created
	$(BIN)/python -m pip install -e '.[lab,models]'
	@touch $@

$(VENV)/.test: pyproject.toml | $(VENV)/.created
	$(BIN)/python -m pip install -e '.[lab,models,test]'
	@touch $@ $(VENV)/.lab

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "vramlab needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) --version 2>/dev/null || echo missing). Name another: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
		{ echo "$(PYTHON) cannot make a virtual environment. On Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@touch $@
