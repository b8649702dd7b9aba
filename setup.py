"""Package layout and dependencies. The rest of the packaging is in pyproject.toml.

A range ends before the next release that may change what is used here. The newest tried are torch 2.14, timm 1.0.31,
NumPy 2.4, pandas 3.1, PyArrow 26, Pillow 13.0, gradio 6.31, transformers 5.24 and diffusers 0.42.
"""
from setuptools import find_packages, setup

DOCS = ["mkdocs-material", "mkdocstrings[python]"]

setup(
    packages=["open_clip_mdc.model_configs", "open_clip_mdc.model_configs.photo", "clip_benchmark_ext.lmms.tasks",
              *find_packages("src"),
              *find_packages(include=["clip_benchmark_ext", "clip_benchmark_ext.*"])],
    package_dir={
        "open_clip_mdc": "src/open_clip_mdc",
        "open_clip_mdc.model_configs": "model_configs",
        "clip_benchmark_ext": "clip_benchmark_ext",
    },
    package_data={"open_clip_mdc": ["py.typed"], "open_clip_mdc.model_configs": ["*.json", "*.txt.gz"],
                  "open_clip_mdc.model_configs.photo": ["*"], "open_clip_mdc.cli": ["*.jinja", "*.json"],
                  "open_clip_mdc.integration": ["*.json"],
                  "clip_benchmark_ext": ["*.json"], "clip_benchmark_ext.lmms.tasks": ["*.yaml"]},
    python_requires=">=3.10",
    install_requires=[
        "open_clip_torch[training]>=3.3,<5",  # its internals are replaced (integration/patches.py)
        "clip_benchmark==1.6.*",
        "torch>=2.6,<3",
        "timm>=1.0.31,<2",  # 1.0.16 lacks encoders, and reads no data_config of ours
        "webdataset>=0.2.73,<=0.2.86",  # its gopen, base_plus_ext and group_by_keys are imported. OpenCLIP's end
        "braceexpand<1",
        "numpy>=1.26,<3",
        "huggingface_hub<3",
        "jinja2>=3.1.3,<4",
        "requests>=2.31,<3",  # imported by clip_benchmark, which does not declare it
        "pycocoevalcap<2",
        "pyarrow>=17,<27",  # before 14.0.1 they unpickle objects from parquet files
        "pillow>=11,<14",
        "safetensors<1",
        "scikit-learn>=1.5.2,<2",
        # torchvision, tqdm and pandas come with OpenCLIP, markupsafe with Jinja. threadpoolctl and scipy come with
        # scikit-learn.
    ],
    extras_require={
        "app": ["gradio>=6,<7", "starlette<2"],
        "aro": ["spacy<4", "nltk<4"],  # also run: python -m spacy download en_core_web_sm
        "export": ["transformers<6"],
        "vq": ["diffusers<1"],
        "lmms": ["lmms-eval==0.7.*", "filelock<4"],  # lmms-eval 0.7 imports filelock._api, which 4 lacks
        "completion": ["argcomplete<4"],  # eval "$(register-python-argcomplete open_clip_mdc)"
        "tensorboard": ["tensorboard>=2.18,<3"],  # open_clip_train --report-to tensorboard
        "docs": DOCS,
        "dev": ["pytest", "pytest-xdist", "ruff", "build", "matplotlib>=3.9,<4", "pandas>=2.2.3,<4", "nltk<4",
                "transformers<6", "diffusers<1", "gradio>=6,<7", "playwright", "argcomplete<4", "tensorboard>=2.18,<3",
                "hypothesis", *DOCS],
    },
    entry_points={"console_scripts": [
        "open_clip_train = open_clip_mdc.train:main",
        "open_clip_mdc = open_clip_mdc.cli:main",
        # A superset of clip_benchmark's own script, under the same name. A later install of clip_benchmark takes the
        # name back. python -m clip_benchmark_ext.cli always works.
        "clip_benchmark = clip_benchmark_ext.cli:main",
    ], "lmms_eval.models": ["open_clip_mdc = clip_benchmark_ext.lmms:manifest"]},
)
