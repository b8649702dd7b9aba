# Two commands from a fresh clone, with Python 3 and make only: make demo, make test. See `make help`.
PYTHON ?= python3
BIN := .venv/bin
DEMO ?= demo
DEMO_EPOCHS ?= 2
DEMO_SCENES ?= 20000
SCENES := $(DEMO)/scenes
TRAINED := $(DEMO)/mdc/checkpoints/epoch_$(DEMO_EPOCHS).pt
CAPTIONS ?= $(wildcard ../shared/data/flickr8k/captions_test.json)

OPENCLIP_WHEEL ?= ../shared/vendor/open_clip_torch-4.2.0.dev0-py3-none-any.whl
# The tests that meet OpenCLIP's internals, or with SHORT=1 some minutes' worth of them.
TESTS4 ?= $(addprefix tests/core/test_,integration.py train.py train_finite.py train_problems.py loading.py \
    checkpoints.py encoder.py configs.py pretrained.py model.py image_rates.py image_source.py feature_cache.py \
    feature_cache_unlock.py versions.py contrastive.py lit.py) tests/tools/test_export.py \
    tests/tools/test_model_card.py tests/tools/test_refusals.py \
    tests/benchmark/test_features.py tests/benchmark/test_foreign.py
SHORT4 := tests/core/test_versions.py tests/core/test_integration.py -k \
    'weights_of_both or resuming or gloo or attributes or listed or replaced'

# OpenMP threads that spin while they wait steal the core that a data worker, or anything else, needs: 15 times slower
# on two shared cores.
export OMP_WAIT_POLICY := PASSIVE

.DEFAULT_GOAL := help
.PHONY: help demo test lint prose docs dist faults photo decodings decodings-rich beside bench bench-gpu clean
.DELETE_ON_ERROR:

help:
	@echo "make demo                  install into .venv, render scenes, train on them, show what the models learnt"
	@echo "make test                  install into .venv, run the tests"
	@echo "make test OPENCLIP=4       run the tests of OpenCLIP's internals with its next version in .venv4 (OPENCLIP_WHEEL=FILE)"
	@echo "make faults                inject faults: killed jobs, full disks (minutes)"
	@echo "make docs                  build the documentation as a site, site/index.html. A broken link is an error"
	@echo "make bench [CAPTIONS=FILE] measure speed and memory against Algorithm 1, CLIP, CoCa and plain loops"
	@echo "make bench-gpu             measure MDC and CLIP on one GPU (benchmarks/GPU.md)"
	@echo "make dist                  build wheel and sdist, and try them in an empty environment"
	@echo "make lint | prose | clean"
	@echo
	@echo "Tables and figures of the paper, which resume if you run the same command again:"
	@echo "make table1 ... table5, figure3 ... figure6, stability, floors, lengths, steps, claims, compared, or tables for all of them"
	@echo "     SCALE=scenes (default), rich, gpu, flickr8k or paper, DATA=folder of the data, GPUS=0 (the CPU) or more,"
	@echo "     SEEDS='0 1 2', JUDGE_URL=endpoint of Table 3's judge. make -n prints the commands"
	@echo "make curves SCALE=rich     learning curves on richer scenes, or with SCALE=gpu on a GPU"
	@echo "make sentences             ask photographs: two sentences, in both orders, beside a blind twin (1 h)"
	@echo "make contexts              read the same words with random masks and from the left, by one network (1 h)"
	@echo "make table6 figure7 mcdiffusion               test the claims of MC-Diffusion (scenes, flickr8k, cub)"
	@echo "make table7 figure8 figure9 figure10 article  test the claims of a summary article (scenes, flickr8k without figure8)"
	@echo "make table8 views                             compare two views of a caption with one at equal cost (scenes)"
	@echo "make between               what lies between ARC and MDC: blocks, and captioners that learn both ways (2 h),"
	@echo "     SCALE=rich after half of a run of richer scenes (2 h)"
	@echo "make rates own fair        find a learning rate for MDC and one for ARC, compare both at their own (scenes, rich)"
	@echo "make longer SCALE=rich     the same after 80,000 to 640,000 images (9 core-hours for three seeds)"
	@echo "make objectives SCALE=rich weighed and hidden words, both directions, given beginnings (8 core-hours)"
	@echo "make photos                caption photographs with a small decoder on a trained encoder, an hour of two cores"
	@echo "     DATA=folder with train/, val/ and test/, SCALE=photos-vit or photos-timm-NAME for another encoder,"
	@echo "     SCALE=photos-unlocked to train the encoder, too"
	@echo "make tries                 other blocks and shares, ARC first, consensus, on validation photographs (3 core-hours)"
	@echo "make towers SEEDS='0 1 2'                     train its encoder with MDC, ARC and CapPa, or lock it"
	@echo "make epochs repetition     repeat 500 photographs 1 to 64 times: does MDC or ARC overfit?"
	@echo "make photo                 make the captioner that is in the package, from make photos"
	@echo "make decodings             compare ways of decoding by steps and quality, with the models of make demo and make photos"
	@echo "make decodings-rich        the same in the rich world, after an hour of training"
	@echo "make beside                one training each: ways of decoding, a contrastive loss, probes, what words attend to, retrieval"
	@echo "make reproduce CLAIM=scenes.bert15            run one claim of results/claims.csv and compare it with its archive"
	@echo "make results               write all pages and figures of results from their archives"

# Everything below runs in this environment. It is made again when the dependencies change.
.venv/installed: setup.py pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --upgrade pip
	@echo "Installing OpenCLIP, clip_benchmark and PyTorch into .venv (some minutes the first time) ..."
	$(BIN)/pip install -qq --disable-pip-version-check --editable '.[dev]'
	touch $@

$(SCENES): | .venv/installed
	$(BIN)/open_clip_mdc scenes --out $@ --num-train $(DEMO_SCENES) --num-pairs 200

# The run folders demo/mdc, demo/arc and demo/untrained (the same network before training: one step with learning rate
# 0). They resume after an interruption. Each has one thread, as two train in parallel and a second thread does not help.
TRAIN := $(BIN)/open_clip_train --logs $(DEMO) --train-data "$(SCENES)/train/{00000..00007}.tar" --resume latest \
    --dataset-type webdataset --precision fp32 --device cpu --workers 1 --batch-size 64 --warmup 100 --wd 0.1
LEARN := --lr 1e-3 --epochs $(DEMO_EPOCHS) --val-data $(SCENES)/val/00000.tar --log-every-n-steps 10
TRAIN_mdc := $(TRAIN) --name mdc --model MDC-ViT-Ti-8 $(LEARN)
TRAIN_arc := $(TRAIN) --name arc --model ARC-ViT-Ti-8 $(LEARN)
TRAIN_untrained := $(TRAIN) --name untrained --model MDC-ViT-Ti-8 --lr 0 --train-num-samples 64 --epochs 1

EVAL := $(BIN)/clip_benchmark eval --num_workers 0 --no_amp --quiet --skip_existing
RESULTS := $(DEMO)/results

demo: | $(SCENES)
	@OMP_NUM_THREADS=1 $(BIN)/python -m experiments.progress --logs $(DEMO)/logs $(foreach run,mdc arc untrained,\
	    $(if $(wildcard $(DEMO)/$(run)/checkpoints/epoch_$(if $(filter untrained,$(run)),1,$(DEMO_EPOCHS)).pt),,\
	        '$(run)=$(TRAIN_$(run))'))
	@for run in mdc untrained; do \
	    $(EVAL) --model mdc --pretrained $(DEMO)/$$run --dataset wds/probe --dataset_root $(SCENES)/probe \
	        --task linear_probe --feature_root $(DEMO)/features --output $(RESULTS)/probe-$$run.json || exit; done
	@for scorer in heuristic autoregressive; do \
	    test $$scorer = autoregressive && model=arc || model=mdc; \
	    $(EVAL) --model $$model --pretrained $(DEMO)/$$model --dataset sugar_crepe/swap_att \
	        --dataset_root $(SCENES)/sugarcrepe --scorer $$scorer \
	        --output "$(RESULTS)/{dataset}-$$scorer.json" || exit; done
	@$(BIN)/open_clip_mdc caption --pretrained $(DEMO)/mdc $(SCENES)/val/00000.tar --limit 8 --length auto \
	    --out $(DEMO)/captions.jsonl --html $(DEMO)/captions.html > /dev/null
	@$(BIN)/python -m experiments.demo --demo $(DEMO) --scenes $(DEMO_SCENES) --epochs $(DEMO_EPOCHS)

test: .venv/installed
ifeq ($(OPENCLIP),4)
ifeq ($(wildcard $(OPENCLIP_WHEEL)),)
	@echo "OpenCLIP 4 is not tested: there is no $(OPENCLIP_WHEEL). Give OPENCLIP_WHEEL=FILE"
else
	$(MAKE) .venv4/installed
	OMP_NUM_THREADS=1 .venv4/bin/python -m pytest -n 2 --dist loadfile $(if $(SHORT),$(SHORT4),$(TESTS4))
endif
else
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile
endif

# OpenCLIP's next version in a second environment. Its packages come before those of .venv.
.venv4/installed: .venv/installed $(OPENCLIP_WHEEL)
	rm -rf .venv4
	$(BIN)/python -m venv --without-pip .venv4
	$(BIN)/python -m zipfile -e $(OPENCLIP_WHEEL) .venv4/lib/python*/site-packages
	echo "import site; site.addsitedir('$$(echo $(CURDIR)/.venv/lib/python*/site-packages)')" \
	    > $$(echo .venv4/lib/python*/site-packages)/released.pth
	touch $@

lint: prose .venv/installed
	$(BIN)/ruff check .

# Words a sentence, semicolons, how docstrings begin, the length of README, and the tree in CONTRIBUTING.
prose:
	$(PYTHON) tests/prose.py

docs: .venv/installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict
	@echo "site/index.html"

# Wheel and sdist are installed into an empty environment each, and caption a photograph that comes with scikit-learn.
EMPTY := build/empty
dist: .venv/installed
	rm -rf dist $(EMPTY)
	$(BIN)/python -m build --outdir dist .
	$(PYTHON) -m venv $(EMPTY)
	for file in dist/*.whl dist/*.tar.gz; do \
	    $(EMPTY)/bin/pip install --quiet --force-reinstall $$(test -e $(EMPTY)/bin/open_clip_mdc && echo --no-deps) $$file && \
	    $(EMPTY)/bin/open_clip_mdc caption $(EMPTY)/lib/python*/site-packages/sklearn/datasets/images/flower.jpg \
	        --out $(EMPTY)/captions.jsonl && cut -c-150 $(EMPTY)/captions.jsonl || exit; done

# It resumes after an interruption. Finished parts are in build/faults/parts.
faults: .venv/installed
	$(BIN)/python tests/faults/campaign.py --out tests/FAULTS.md

# ---- The paper's tables and figures (experiments/run.py). `make -n` runs the recipe, too, as the commands that it prints
# depend on the results that exist already.
SCALE ?= scenes
DATA ?= data
GPUS ?=
SEEDS ?=
TABLES := table1 table2 table3 table4 table5 stability floors figure3 figure4 figure5 figure6 lengths steps claims compared
ARTICLE := table6 figure7 mcdiffusion table7 figure8 figure9 figure10 article table8 views curves photos tries towers epochs repetition contexts between sentences rates own fair longer objectives
DRY_RUN := $(findstring n,$(firstword -$(MAKEFLAGS)))
EXPERIMENT = $(if $(DRY_RUN),$(PYTHON),$(BIN)/python) -m experiments.run --scale $(SCALE) --data '$(DATA)' \
    --bin $(BIN)/ $(if $(GPUS),--gpus $(GPUS)) $(if $(SEEDS),--seeds $(SEEDS)) $(if $(DRY_RUN),--dry-run)

.PHONY: tables $(TABLES) $(ARTICLE)
# MC-Diffusion's own scale is CUB-200.
table6 figure7 mcdiffusion: override SCALE := $(SCALE:paper=cub)
photos tries: override SCALE := $(SCALE:scenes=photos)
photos beside tries towers epochs repetition sentences: override DATA := $(DATA:data=../shared/data/flickr8k_224)
epochs repetition: override SCALE := few
contexts: override SCALE := contexts
between: override SCALE := $(SCALE:scenes=contexts)
sentences: override SCALE := sentences
towers: override SCALE := towers
photos: SEEDS := $(or $(SEEDS),0)
tries: SEEDS := $(or $(SEEDS),1)
rates: SEEDS := $(or $(SEEDS),10 11)
tables $(TABLES) $(ARTICLE): | .venv/installed
	+@$(EXPERIMENT) --tables $(if $(filter tables,$@),$(TABLES),$@) $(if $(filter photos,$@),likelihoods words)

# Run one claim of experiments/results/claims.csv and compare it with the archive. Write all pages and figures.
.PHONY: reproduce results
reproduce: | .venv/installed
	+@$(BIN)/python -m experiments.reproduce $(CLAIM) --data '$(DATA)' --bin $(BIN)/ \
	    $(if $(SEEDS),--seeds $(SEEDS)) $(if $(DRY_RUN),--dry-run)
results: | .venv/installed
	$(BIN)/python -m experiments.report.publish

# The captioner "photo", which `open_clip_mdc caption` takes by default.
PHOTO := MDC-small-timm-tf_efficientnet_lite0
ARC_PHOTO := build/photos/runs/$(PHOTO:MDC%=ARC%)-locked--captions--s0
PHOTO_TEST := build/photos/data/captions/test/0.tar
photo: photos
	rm -rf build/photo
	$(BIN)/open_clip_mdc export --pretrained build/photos/runs/$(PHOTO)-locked--captions--s0 --to open_clip --half \
	    --about experiments/photo/about.md --out build/photo \
	    --results build/photos/results/captioning-caption_length-auto-repeats-avoid/captions-*$(PHOTO)*.json
	cp model_configs/photo/LICENSE build/photo/
	rm -rf model_configs/photo && cp -r build/photo model_configs/photo

# Writes experiments/figures/decodings-*.png, and captions and tables into build/decodings.
DECODINGS := OMP_NUM_THREADS=1 $(BIN)/python -m experiments.decodings
decodings: photos | $(TRAINED)
	$(DECODINGS) --mdc $(DEMO)/mdc --arc $(DEMO)/arc --data $(SCENES)/val/00000.tar --length 8 --limit 100 \
	    --out build/decodings/scenes
	$(DECODINGS) --mdc build/photos/runs/$(PHOTO)-locked--captions--s0 --arc $(ARC_PHOTO) \
	    --data $(PHOTO_TEST) --length 12 --limit 200 --out build/decodings/photos
	for what in scenes photos; do cp build/decodings/$$what.png experiments/figures/decodings-$$what.png || exit; done

# Results of one training each, for the tables of results/beside.md. To publish them, run
# `python -m experiments.report.archive pack build/beside experiments/results/beside.tar.xz` and `make results`.
BESIDE := build/beside
SIDE := $(BESIDE)/results
LEARNT := checkpoints/epoch_$(DEMO_EPOCHS).pt
TRAIN_beside = $(TRAIN) --logs $(BESIDE)/runs --lr 1e-3 --epochs $(DEMO_EPOCHS)
BOTH := MDC-ViT-Ti-8-contrastive
LIT := LiT-ViT-Ti-8 --lock-image --pretrained-image
COSINE := ViT-Ti-8:$(BESIDE)/runs/clip $(BOTH):$(BESIDE)/runs/both LiT-ViT-Ti-8:$(BESIDE)/runs/lit LiT-ViT-Ti-8:$(BESIDE)/runs/floor
FIRST := 100
beside: decodings | $(TRAINED)
	mkdir -p $(SIDE)/pointing $(SIDE)/decodings_scenes/items $(SIDE)/decodings_photos/items
	@OMP_NUM_THREADS=1 $(BIN)/python -m experiments.progress --logs $(BESIDE)/logs \
	    'clip=$(TRAIN_beside) --name clip --model ViT-Ti-8' 'both=$(TRAIN_beside) --name both --model $(BOTH)' \
	    'lit=$(TRAIN_beside) --name lit --model $(LIT) $(DEMO)/mdc' \
	    'floor=$(TRAIN_beside) --name floor --model $(LIT) $(DEMO)/untrained'
	for run in $(COSINE) mdc:$(DEMO)/mdc; do \
	    model=$${run%%:*}; weights=$${run#*:}/$(LEARNT); output="$(SIDE)/contrastive/{dataset}-{task}-{pretrained_full_path}.json"; \
	    test $$model = $(BOTH) && scorer='--scorer cosine' || scorer=; \
	    $(EVAL) --model $$model --pretrained $$weights --dataset wds/probe --dataset_root $(SCENES)/probe \
	        --task linear_probe --feature_root $(BESIDE)/features --output "$$output" && \
	    $(EVAL) --model $$model --pretrained $$weights $$scorer --dataset_root $(SCENES)/sugarcrepe \
	        --dataset sugar_crepe/swap_obj sugar_crepe/replace_rel --output "$$output" && \
	    $(EVAL) --model $$model --pretrained $$weights $$scorer --dataset_root $(SCENES)/probe --dataset wds/probe \
	        --task zeroshot_classification --output "$$output" || exit; done
	$(EVAL) --model timm-tf_efficientnet_lite0 --pretrained $(DATA)/../encoders/efficientnet_lite0 --image_size 128 \
	    --dataset wds/cifar10 --dataset_root $(DATA)/../probe/cifar10 --task probe --output $(SIDE)/probes/probes.json
	rm -rf $(BESIDE)/first $(BESIDE)/retrieval && mkdir $(BESIDE)/first
	tar xf $(PHOTO_TEST) -C $(BESIDE)/first $$(tar tf $(PHOTO_TEST) | grep -v json | head -n $$((2 * $(FIRST))))
	$(BIN)/open_clip_mdc prepare shards --test $(BESIDE)/first --out $(BESIDE)/retrieval
	for run in 'arc=arc --pretrained $(ARC_PHOTO)' 'parallel=mdc --pretrained photo --scorer parallel' \
	    'heuristic=mdc --pretrained photo' 'shortlist10=mdc --pretrained photo --shortlist 10' \
	    'shortlist50=mdc --pretrained photo --shortlist 50'; do \
	    $(EVAL) --model $${run#*=} --dataset wds/retrieval --dataset_root $(BESIDE)/retrieval --recall_k 1 5 10 \
	        --task zeroshot_retrieval --feature_root $(BESIDE)/features --output $(SIDE)/retrieval/$${run%%=*}.json || exit; done
	$(BIN)/python -m experiments.pointing --scenes $(SCENES)/val/00000.tar \
	    --runs MDC=$(DEMO)/mdc ARC=$(DEMO)/arc untrained=$(DEMO)/untrained > $(BESIDE)/pointing.md
	mv $(BESIDE)/pointing.md $(SIDE)/pointing/table.md
	for what in scenes photos; do \
	    cp build/decodings/$$what.json $(SIDE)/decodings_$$what/items/ && \
	    cp build/decodings/$$what.md $(SIDE)/decodings_$$what/table.md || exit; done

decodings-rich:
	+$(MAKE) table3 SCALE=rich SEEDS=0
	$(DECODINGS) --mdc build/rich/runs/MDC-ViT-Ti-8-rich--short--s0 --arc build/rich/runs/ARC-ViT-Ti-8-rich--short--s0 \
	    --data build/rich/data/rich/val/00000.tar --length 10 --limit 100 --out build/decodings/rich
	cp build/decodings/rich.png experiments/figures/decodings-rich.png

# Writes benchmarks/RESULTS.md. Only one process runs at a time, so its threads may spin.
BENCH := OMP_WAIT_POLICY=ACTIVE $(BIN)/python -m benchmarks.
$(TRAINED):
	+$(MAKE) demo
bench: | $(TRAINED)
	$(BENCH)training $(CAPTIONS:%=--captions %)
	$(BENCH)scoring $(CAPTIONS:%=--captions %)
	$(BENCH)decoding
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m benchmarks.bulk --scenes $(SCENES) --pretrained $(DEMO)/mdc
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m benchmarks.growth --pretrained $(DEMO)/mdc

# The same on a GPU, each part within 10 minutes. Writes the section "Measured" of benchmarks/GPU.md.
bench-gpu: .venv/installed
	$(BENCH)gpu --parts ceilings,syncs,decoding,scoring
	for size in ViT-B-16 ViT-B-32 ViT-L-14; do $(BENCH)gpu --parts steps --sizes $$size || exit; done

# build/SCALE is kept, as it holds hours of training.
clean:
	rm -rf .venv .venv4 build/lib build/bdist.* build/demo build/empty *.egg-info .pytest_cache .ruff_cache demo dist site
