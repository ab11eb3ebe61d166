"""The one part of the build that cannot be said in pyproject.toml: the optional extension."""

import os
import sysconfig

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel

# The free-threaded builds of Python have no stable ABI: theirs is built for one version.
stable_abi = not sysconfig.get_config_var("Py_GIL_DISABLED")


class Wheel(bdist_wheel):
    """A wheel that is tagged for one platform only where it contains the extension."""

    def run(self) -> None:
        self.run_command("build")
        outputs = self.get_finalized_command("build_ext").get_outputs()
        if not any(map(os.path.exists, outputs)):
            self.distribution.ext_modules = []
            self.root_is_pure = True
        super().run()


setup(
    cmdclass={"bdist_wheel": Wheel},
    ext_modules=[
        Extension(
            "dask_devctx.driver._scope",
            ["csrc/scope.c"],
            depends=["csrc/native.h", "csrc/search.h", "csrc/stack.h"],
            define_macros=[("Py_LIMITED_API", "0x030B0000")] if stable_abi else [],
            py_limited_api=stable_abi,
            optional=True,  # without a compiler the same is done in Python
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if stable_abi else {},
)
