"""What pyproject.toml cannot say: packages in folders of other names, and the CUDA kernels.

`MEGAFRAME_BUILD_CUDA=1 pip install .` builds the CUDA kernels in advance; otherwise they are built
when a GPU first needs them.
"""

import os
import sys
from pathlib import Path

from setuptools import Distribution, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

HERE = Path(__file__).resolve().parent
WITH_KERNELS = os.environ.get("MEGAFRAME_BUILD_CUDA") == "1"


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


setup(
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
    cmdclass={"build_py": BuildWithKernels, "bdist_wheel": WheelOfAnyPython},
    distclass=WithKernels,
)
