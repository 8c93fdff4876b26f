# make demo    set up .venv and run the main job: Qwen2.5-Coder 0.5B, fetched once, asked about a handbook by three methods; MODEL=dir for yours,
#              DEMO_ARGS=--small for SmolLM2 135M
# make bench   measure the tables and pictures of docs/benchmarks.md and write them there; DATA=dir of the data sets, BENCH_ARGS=--quick for a try
# make install set up .venv with everything that users need, for `.venv/bin/cacheblend`
# make check   set up .venv and run lint, types, import floors, tests in two processes (WORKERS=n); CI runs more (.ci/run)
# make check-lowest  set up .venv-lowest with the lowest versions that pyproject.toml allows, and run the tests there; LOWEST_TESTS=tests/...
# make check-ray     set up .venv-ray with Ray and Arrow beside .venv's packages, and run the tests of the ingest on Ray there
# make check-vllm    set up .venv-vllm with vLLM's CPU build, and run the tests of blending inside it there
PYTHON ?= python3
BIN := .venv/bin
MODEL ?=
DATA ?= data
LOWEST := .venv-lowest/bin
RAY := .venv-ray/bin
PURELIB := import sysconfig; print(sysconfig.get_path("purelib"))
DIST := dist
LOWEST_TESTS ?=
WORKERS ?= 2

.PHONY: install demo check check-lowest check-ray check-vllm lint types imports test docs wheel format bench clean

# Where the developers' environment is, that has it all.
install: | $(BIN)/python
	@test $(BIN)/.installed -nt pyproject.toml || { echo "setting up .venv: PyTorch and some hundred packages, a few minutes"; rm -rf build/lib && scripts/install_torch.sh $(BIN)/python && $(BIN)/python -m pip install --quiet ".[all]"; }
	@echo "done: $(BIN)/cacheblend --help"

demo: $(BIN)/.installed
	@echo "set-up of .venv done; the model is fetched at its first use, and the demo times itself apart from that"
	$(BIN)/cacheblend demo $(MODEL) --yes $(DEMO_ARGS)

check: lint types imports test

lint: $(BIN)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(BIN)/.installed
	$(BIN)/mypy

imports: $(BIN)/.installed
	$(BIN)/lint-imports

test: $(BIN)/.installed
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

# What old versions call may be deprecated in the newest of what they depend on.
check-lowest: $(LOWEST)/.installed
	$(LOWEST)/python -m pytest -n $(WORKERS) --dist loadfile -W default::DeprecationWarning $(LOWEST_TESTS)

check-ray: $(RAY)/.installed
	$(RAY)/python -m pytest tests/integrations/ray

check-vllm:
	PYTHON=$(PYTHON) scripts/check_vllm.sh

docs: $(BIN)/.installed
	$(BIN)/python -m pip install --quiet --no-build-isolation --editable ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --site-dir site

# Of the last commit; the wheel's bytes are the same wherever the same Python and setuptools build it.
wheel: $(BIN)/.installed
	rm -rf build/source && mkdir -p build/source
	umask 022 && git archive HEAD | tar --extract --no-same-permissions --directory build/source
	cd build/source && umask 022 && SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) \
	    $(abspath $(BIN))/python -m build --quiet --outdir $(abspath $(DIST)) .

format: $(BIN)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(BIN)/.installed
	$(BIN)/python scripts/bench_all.py --data $(DATA) $(BENCH_ARGS)

clean:
	rm -rf .venv .venv-lowest .venv-ray .venv-vllm build dist *.egg-info

$(BIN)/python:
	$(PYTHON) -m venv .venv

$(BIN)/.installed: pyproject.toml scripts/install_torch.sh | $(BIN)/python
	@echo "setting up .venv: PyTorch and some hundred packages, a few minutes"
	scripts/install_torch.sh $(BIN)/python
	$(BIN)/python -m pip install --editable ".[dev]"
	touch $@

# Ray and Arrow beside .venv's packages, which a .pth file adds.
$(RAY)/.installed: pyproject.toml | $(BIN)/.installed
	$(PYTHON) -m venv .venv-ray
	echo "import site; site.addsitedir('$$($(BIN)/python -c '$(PURELIB)')')" > "$$($(RAY)/python -c '$(PURELIB)')/beside.pth"
	$(RAY)/python -m pip install --quiet "$$(grep -oE 'ray\[data\][^"]*' pyproject.toml)"
	touch $@

# Every floor of pyproject.toml as a constraint; torch's build is for install_torch.sh to choose.
$(LOWEST)/.installed: pyproject.toml scripts/install_torch.sh
	$(PYTHON) -m venv .venv-lowest
	scripts/install_torch.sh $(LOWEST)/python
	grep -oE '"[A-Za-z0-9._-]+(\[[a-z,]+\])?>=[0-9.]+' pyproject.toml | sed -E 's/^"//; s/\[.*\]//; s/>=/==/' \
	    | grep -vE '^(torch|setuptools)==' | sort -u > .venv-lowest/lowest.txt
	$(LOWEST)/python -m pip install --quiet --constraint .venv-lowest/lowest.txt --editable ".[dev]"
	touch $@
