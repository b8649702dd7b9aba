"""Package layout and dependencies. The rest of the packaging is in pyproject.toml."""
from setuptools import find_packages, setup

DOCS = ["mkdocs-material", "mkdocstrings[python]"]

setup(
    packages=["open_clip_mdc.model_configs", "open_clip_mdc.model_configs.photo", *find_packages("src"),
              *find_packages(include=["clip_benchmark_ext", "clip_benchmark_ext.*"])],
    package_dir={
        "open_clip_mdc": "src/open_clip_mdc",
        "open_clip_mdc.model_configs": "model_configs",
        "clip_benchmark_ext": "clip_benchmark_ext",
    },
    package_data={"open_clip_mdc": ["py.typed"], "open_clip_mdc.model_configs": ["*.json", "*.txt.gz"],
                  "open_clip_mdc.model_configs.photo": ["*"], "open_clip_mdc.cli": ["*.jinja"],
                  "clip_benchmark_ext": ["*.json"]},
    python_requires=">=3.10",
    install_requires=[
        "open_clip_torch[training]>=3.3,<5",  # its internals are replaced (integration/patches.py)
        "clip_benchmark==1.6.*",
        "torch>=2.6",
        "timm",
        "webdataset",
        "braceexpand",
        "numpy",
        "huggingface_hub",
        "jinja2",
        "markupsafe",
        "requests",  # imported by clip_benchmark, which does not declare it
        "pycocoevalcap",
        "matplotlib",
        "pandas",
        "pyarrow>=14.0.1",  # earlier versions unpickle objects from parquet files
        "pillow",
        "safetensors",
        "scikit-learn",
        "scipy",
        "threadpoolctl",
        "tensorboard",  # --report-to tensorboard
        "torchvision",
        "tqdm",
    ],
    extras_require={
        "app": ["gradio>=6"],
        "aro": ["spacy", "nltk"],  # also run: python -m spacy download en_core_web_sm
        "export": ["timm>=1.0.31", "transformers"],
        "vq": ["diffusers"],
        "ray": ["ray"],
        "completion": ["argcomplete"],  # eval "$(register-python-argcomplete open_clip_mdc)"
        "docs": DOCS,
        "dev": ["pytest", "pytest-xdist", "ruff", "build", "nltk", "transformers", "diffusers", "gradio>=6",
                "playwright", "argcomplete", *DOCS],
    },
    entry_points={"console_scripts": [
        "open_clip_train = open_clip_mdc.train:main",
        "open_clip_mdc = open_clip_mdc.cli:main",
        # A superset of clip_benchmark's own script, under the same name. A later install of clip_benchmark takes the
        # name back. python -m clip_benchmark_ext.cli always works.
        "clip_benchmark = clip_benchmark_ext.cli:main",
    ]},
)
