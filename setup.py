"""Packaging of ds_hessian. `DS_HESSIAN_BUILD_OPS=1` builds the kernels ahead of time."""

import runpy

from setuptools import find_packages, setup

DOCS = ["sphinx>=8.2", "myst-parser>=4", "furo>=2025.7.19"]

setup(
    name="ds_hessian",
    version="0.1.0",
    description="The true Hessian of a live DeepSpeed engine: spectra on the shards the job has",
    long_description=open("README.md", encoding="utf-8").read(),
    long_description_content_type="text/markdown",
    license="MIT",
    python_requires=">=3.11",
    packages=find_packages(include=["ds_hessian", "ds_hessian.*"]),
    package_data={"ds_hessian": ["py.typed", "show/page/page.html"]},
    install_requires=[
        "torch>=2.4",
        "deepspeed>=0.16.7",
        "numpy",
        "scipy",
        "pydantic>=2",
        "safetensors>=0.4",
        "hjson",
        "psutil",
        "tqdm",
        "click",
        "matplotlib",
        "pybind11",
        "ninja",
    ],
    entry_points={"console_scripts": ["ds-hessian = ds_hessian.cli:main"]},
    extras_require={
        "megatron": ["megatron-core>=0.14"],
        "report": ["plotly>=6"],
        "hf": ["transformers>=5", "accelerate>=1"],
        "peers": ["curvlinops-for-pytorch>=3", "hessian-eigenthings>=1.0.0a5"],
        "docs": [*DOCS, "transformers>=5", "accelerate>=1"],
        "dev": [
            "plotly>=6",
            *["pytest", "pytest-timeout", "hypothesis", "ruff", "mypy", "clang-format"],
            *["transformers>=5", "accelerate>=1", "tensorboard", *DOCS],
        ],
    },
    **runpy.run_path("ds_hessian/ops/build_ext.py")["setup_arguments"](),
)
