# Two commands from a fresh clone, with Python 3 and make only:
#   make demo    installs into .venv, renders the scenes, trains MDC on them, shows what it learnt
#   make test    installs into .venv, runs the tests
PYTHON ?= python3
BIN := .venv/bin
DEMO ?= demo
DEMO_EPOCHS ?= 2
DEMO_SCENES ?= 20000
CAPTIONS ?=

.PHONY: demo test lint bench clean
.DEFAULT_GOAL := help

help:
	@sed -n '2,3p' Makefile | sed 's/^#  //'
	@echo "  make bench CAPTIONS=FILE   speed and memory against Algorithm 1, CLIP and CoCa"
	@echo "  make lint | clean"

# Everything below runs in this environment; it is made anew when the dependencies change.
.venv/installed: setup.py pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --upgrade pip
	@echo "Installing OpenCLIP, clip_benchmark and PyTorch into .venv (some minutes the first time) ..."
	$(BIN)/pip install -qq --disable-pip-version-check --editable '.[dev]'
	touch $@

$(DEMO)/scenes: | .venv/installed
	$(BIN)/open_clip_mdc scenes --out $@ --num-train $(DEMO_SCENES)

$(DEMO)/mdc/checkpoints/epoch_$(DEMO_EPOCHS).pt: | $(DEMO)/scenes
	$(BIN)/open_clip_train --model MDC-ViT-Ti-8 --name mdc --logs $(DEMO) --resume latest \
	    --train-data "$$(ls $(DEMO)/scenes/train/*.tar | paste -sd: | sed 's/:/::/g')" --dataset-type webdataset \
	    --val-data $(DEMO)/scenes/val/00000.tar --precision fp32 --device cpu --workers 1 \
	    --batch-size 128 --epochs $(DEMO_EPOCHS) --lr 1e-3 --warmup 100 --wd 0.1 --log-every-n-steps 20

demo: $(DEMO)/mdc/checkpoints/epoch_$(DEMO_EPOCHS).pt
	$(BIN)/open_clip_mdc reconstruct --pretrained $(DEMO)/mdc --data $(DEMO)/scenes/val/00000.tar \
	    --out $(DEMO)/reconstructions.png

test: .venv/installed
	OMP_NUM_THREADS=2 $(BIN)/python -m pytest

lint: .venv/installed
	$(BIN)/ruff check .

bench: .venv/installed
	$(BIN)/python benchmarks/training.py $(if $(CAPTIONS),--captions $(CAPTIONS))

clean:
	rm -rf .venv build *.egg-info .pytest_cache .ruff_cache demo
