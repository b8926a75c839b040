# Two commands set everything up on a machine with Python 3.10+ and a C++ compiler:
#   make demo   installs, fetches the small model, converts it, generates text and prints the statistics
#   make test   installs and passes the tests
PYTHON ?= python3
VENV ?= .venv
MODELS ?= $(HOME)/.cache/twofold-models
BIN := $(VENV)/bin
SMOLLM2 := $(MODELS)/SmolLM2-135M-Instruct.Q4_1.gguf

.PHONY: demo test install lint format clean

demo: install
	$(BIN)/python scripts/fetch_models.py --dir $(MODELS) smollm2
	$(BIN)/twofold convert $(SMOLLM2) $(MODELS)/smollm2 --base q4_0 --calibration auto --force
	$(BIN)/twofold generate $(MODELS)/smollm2.base.gguf -p "Explain what a hash table is." -n 128 --draft 3

test: install
	$(BIN)/python -m pytest
	PATH=$(abspath $(BIN)):$$PATH scripts/c_tests.sh

# llama-cpp-python is built from its source package (minutes, once: pip keeps the wheel). twofold is then built
# against that very copy, hence without build isolation.
install: $(BIN)/twofold
$(BIN)/twofold: pyproject.toml CMakeLists.txt $(wildcard csrc/*)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "scikit-build-core>=0.10" "cffi>=2.1" cmake ninja
	$(BIN)/python -m pip install llama-cpp-python==0.3.36
	$(BIN)/python -m pip install --quiet --no-build-isolation --editable ".[test]"
	touch $@

lint: install
	$(BIN)/python -m pip install --quiet --no-build-isolation --editable ".[dev]"
	$(BIN)/ruff check python scripts tests
	$(BIN)/ruff format --check python scripts tests
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror csrc/*.c csrc/*.h tests/c/*.c tests/c/*.h

format: install
	$(BIN)/ruff check --fix python scripts tests
	$(BIN)/ruff format python scripts tests
	$(BIN)/clang-format -i csrc/*.c csrc/*.h tests/c/*.c tests/c/*.h

clean:
	rm -rf build $(VENV) .stock .vulkan wheels wheels-vulkan
