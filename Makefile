SHELL := /bin/bash
PY := .venv/bin/python
PORT ?= 8888
PART ?= one
JOBS ?= 2

.PHONY: help setup lab demo test check record clean

help:  ## what there is to make
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

.venv/ok: pyproject.toml constraints.txt
	python3 -m venv .venv
	$(PY) -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch .venv/ok

setup: .venv/ok  ## a .venv in this folder with everything in it

lab: setup  ## JupyterLab on the quickstart
	@echo "JupyterLab opens the quickstart in a browser; its address stands below. Ctrl+C twice ends it."
	$(PY) -m jupyterlab --port $(PORT) --ServerApp.root_dir=notebooks --LabApp.default_url=/lab/tree/01_quickstart.ipynb \
		$(if $(filter 0,$(shell id -u)),--allow-root) $(LAB_FLAGS)

demo: setup  ## the main job without a browser: compare strategies here and as recorded on H200s, write TensorBoard
	.venv/bin/dspark-lab demo

test: setup  ## all tests: unit, notebooks, browser; JOBS=1 for one after the other
	$(PY) -m pytest -q $(if $(filter 1,$(JOBS)),,-n $(JOBS) --dist loadfile)

check: setup  ## ruff, pyright, import-linter
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/pyright
	.venv/bin/lint-imports

record: setup  ## measure again what ships in data/recorded: make record PART=one (a GPU) or PART=two; EP=4, EP=8 with as many GPUs
	.venv/bin/dspark-lab record $(if $(EP),ep$(EP),$(PART)) --out recordings

clean:
	rm -rf .venv .pytest_cache .ruff_cache build dist runs tb
