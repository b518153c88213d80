# Everything a newcomer needs: `make demo` and `make test`. See README.md.
SHELL := /bin/bash
ENV = $(shell ./launch_scripts/create_env.sh --print)
PYTHON = $(ENV)/bin/python
# which tests: make test TESTS=tests/control; WORKERS=0 runs them one by one.
# One thread each: the models of the tests are tiny, and more would only wait for one another.
TESTS ?= tests
# arguments of the benchmark: make bench BENCH="--rounds 3"
BENCH ?= --quick
WORKERS ?= 2

.PHONY: install env-path models demo pd-demo check test soak bench clean

install:
	@./launch_scripts/create_env.sh >/dev/null

env-path: install
	@./launch_scripts/create_env.sh --print

models: install
	@$(PYTHON) -m sglang_spec_ext.cli models prepare

demo: install
	@$(PYTHON) -m sglang_spec_ext.cli models prepare smollm2
	@./launch_scripts/quickstart.sh

pd-demo: install
	@$(PYTHON) -m sglang_spec_ext.cli models prepare smollm2
	@./launch_scripts/pd_demo.sh

check: install
	$(PYTHON) -m ruff check .
	$(PYTHON) -m mypy sglang_spec_ext/control sglang_spec_ext/config.py sglang_spec_ext/flags.py sglang_spec_ext/records.py

test: check models
	OMP_NUM_THREADS=1 $(PYTHON) -P -m pytest -n $(WORKERS) --dist loadgroup --durations=40 $(TESTS)

soak: install models
	OMP_NUM_THREADS=1 $(PYTHON) -P -m pytest -m soak -s tests/pd/test_soak.py
	OMP_NUM_THREADS=1 SOAK_STEPS=2000 $(PYTHON) -P -m pytest tests/workers/test_attention_dp.py

bench: install
	@$(PYTHON) -m sglang_spec_ext.cli models prepare smollm2
	@./launch_scripts/bench.sh $(BENCH)

clean:
	rm -rf .venv build dist *.egg-info
