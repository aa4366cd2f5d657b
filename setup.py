"""Packaging of megaframe. constraints.txt pins the versions that the tests ran with.

`MEGAFRAME_BUILD_CUDA=1 pip install .` builds the CUDA kernels in advance; otherwise they are built
when a GPU first needs them.
"""

import os
import re
import sys
from pathlib import Path

from setuptools import Distribution, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

HERE = Path(__file__).resolve().parent
WITH_KERNELS = os.environ.get("MEGAFRAME_BUILD_CUDA") == "1"


def version() -> str:
    """Return the version in `megaframe/__init__.py`, without importing it."""
    text = (HERE / "megaframe" / "__init__.py").read_text(encoding="utf-8")
    return re.findall(r'^__version__ = "(.+)"$', text, re.MULTILINE)[0]


class BuildWithKernels(build_py):
    """Also builds the CUDA kernels, if they are asked for."""

    def run(self) -> None:
        super().run()
        if not WITH_KERNELS:
            return
        sys.path.insert(0, str(HERE / "kernels"))
        from megaframe_kernels.cuda_build import CHIPS, build, find_prebuilt_library

        whole = HERE / "kernels" if self.editable_mode else Path(self.build_lib)
        build(whole / "megaframe_kernels" / find_prebuilt_library().name, CHIPS)


class WithKernels(Distribution):
    """A distribution that is specific to a platform if it contains the CUDA kernels."""

    def has_ext_modules(self) -> bool:
        return WITH_KERNELS


class WheelOfAnyPython(bdist_wheel):
    """A wheel for every Python 3, because the CUDA kernels are called by address."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


wandb = ["wandb>=0.22,<0.32", "wandb-workspaces>=0.4,<0.5"]
tensorboard = ["tensorboard>=2.18,<2.22"]
data = ["tiktoken>=0.9,<0.15", "pyarrow>=18,<27", "zstandard>=0.23,<0.26"]
hf = ["tokenizers>=0.21,<0.24"]
cloud = ["fsspec>=2025.1,<2027", "s3fs>=2025.1,<2027"]
bench = ["matplotlib>=3.9,<3.12"]
plan = ["plotly>=6,<8"]
dashboard = ["plotly>=6,<8"]
evaluate = ["lm_eval>=0.4.13,<0.5"]
ray = ["ray[train,tune]>=2.40,<2.61"]
test = [
    "pytest>=8,<10",
    "pytest-xdist>=3.6,<4",
    "hypothesis>=6.100,<7",
    # Drives an installed browser, for example Debian's chromium.
    "playwright>=1.50,<2",
    # Builds the wheel that a test installs.
    "setuptools>=70.1",
    # Kubernetes manifests are validated against its models.
    "kubeflow-trainer-api>=2.3,<3",
    "import-linter>=2.1,<3",
    "transformers>=5.0,<5.24",
    "ruff>=0.12,<0.18",
    "mypy>=1.15,<3",
    "types-PyYAML>=6.0.12",
    # An S3 server on loopback, and the packages that it needs.
    "moto[s3]>=5.1,<6",
    "flask>=3,<4",
    "flask-cors>=5,<7",
]

setup(
    name="megaframe",
    version=version(),
    description="Pretrains GPT-style transformers; layout never changes the answer.",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    python_requires=">=3.10",
    packages=[
        *find_packages(include=["megaframe", "megaframe.*"]),
        *find_packages("kernels", include=["megaframe_kernels", "megaframe_kernels.*"]),
        "megaframe_kernels.cuda",
        "megaframe_tools",
        "megaframe_tools.launch",
        "megaframe_tools.launch.kubernetes",
        "megaframe_configs",
        "megaframe_configs.clusters",
    ],
    py_modules=["pretrain_gpt"],
    entry_points={"console_scripts": ["megaframe=pretrain_gpt:main"]},
    package_dir={
        "megaframe_kernels": "kernels/megaframe_kernels",
        "megaframe_kernels.cuda": "kernels/cuda",
        "megaframe_tools": "tools",
        "megaframe_configs": "configs",
        "megaframe_configs.clusters": "configs/clusters",
    },
    package_data={
        "megaframe": ["py.typed", "dashboard/*.css", "dashboard/*.js", "hardware/chips.csv"],
        "megaframe_kernels": ["choices.json"],
        "megaframe_kernels.cuda": ["*.cu", "*.cuh"],
        "megaframe_configs": ["*.yaml"],
        "megaframe_configs.clusters": ["*.yaml"],
        "megaframe_tools.launch": ["*.sh", "*.yaml", "Containerfile"],
        "megaframe_tools.launch.kubernetes": ["*.yaml"],
    },
    cmdclass={"build_py": BuildWithKernels, "bdist_wheel": WheelOfAnyPython},
    distclass=WithKernels,
    install_requires=[
        "torch>=2.9,<2.14",
        "numpy>=1.26,<2.6",
        "orjson>=3.10,<3.14",
        "pydantic>=2.11,<2.15",
        "PyYAML>=6.0,<6.1",
        "safetensors>=0.5,<0.9",
        "sentencepiece>=0.2.3,<0.3",
        "rich>=13.9,<16",
        "xxhash>=3.5,<5",
        # Comes with torch's GPU builds; on a CPU the kernels' tests use its interpreter.
        "triton>=3.5,<3.8; sys_platform == 'linux'",
    ],
    extras_require={
        "wandb": wandb,
        "tensorboard": tensorboard,
        "data": data,
        "hf": hf,
        "cloud": cloud,
        "ray": ray,
        "evaluate": evaluate,
        "bench": bench,
        "plan": plan,
        "dashboard": dashboard,
        "dev": wandb + tensorboard + data + hf + cloud + plan + dashboard + test,
    },
)
