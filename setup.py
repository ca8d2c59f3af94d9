"""The kernels' part of the packaging; pyproject.toml has the rest.

`DS_HESSIAN_BUILD_OPS=1` builds the kernels ahead of time.
"""

import runpy

from setuptools import setup

setup(**runpy.run_path("ds_hessian/ops/build_ext.py")["setup_arguments"]())
