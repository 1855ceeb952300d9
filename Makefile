# make run    make the environment if needed, then run the main job on an embedded model: no GPU, no network, no weights
# make test   format, lint, types, layering, tests: minutes
# make long   the larger cases of these tests, which CI runs after make test; after 45 minutes it begins none and says so
# make docs   the documents as a site, in build/site
# make servers  as root on Debian: Redis and Mooncake Store, for tests to start and stop; without them those tests skip
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: run test check long format gpu slow docs servers clean

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

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
