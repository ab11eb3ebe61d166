"""The one part of the build that cannot be said in pyproject.toml: the optional extension."""

import sysconfig

from setuptools import Extension, setup

# The free-threaded builds of Python have no stable ABI: theirs is built for one version.
stable_abi = not sysconfig.get_config_var("Py_GIL_DISABLED")

setup(
    ext_modules=[
        Extension(
            "dask_devctx.driver._scope",
            ["csrc/scope.c"],
            depends=["csrc/native.h", "csrc/stack.h"],
            define_macros=[("Py_LIMITED_API", "0x030B0000")] if stable_abi else [],
            py_limited_api=stable_abi,
            optional=True,  # without a compiler the same is done in Python
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if stable_abi else {},
)
