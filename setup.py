"""The C++ operators, which are left out where they cannot be compiled; all else is in setup.cfg."""

from __future__ import annotations

from setuptools import Extension, setup


def extensions() -> list[Extension]:
    """The operators, built for the torch that is installed; none without torch."""
    try:
        import torch
        from torch.utils import cpp_extension
    except ImportError:
        return []
    # The name carries torch's version: a library built for another one is never loaded.
    version = "".join(letter if letter.isalnum() else "_" for letter in torch.__version__)
    return [
        Extension(
            f"shardrec.native.ops_for_torch_{version}",
            [f"shardrec/native/{name}.cpp" for name in ("ops", "cut", "lookup", "update")],
            depends=[f"shardrec/native/{name}.h" for name in ("vectors", "slots", "gradient")],
            include_dirs=cpp_extension.include_paths(),
            library_dirs=cpp_extension.library_paths(),
            libraries=["c10", "torch", "torch_cpu"],
            extra_compile_args=[
                "-std=c++20",
                "-O3",
                "-g0",
                "-fno-math-errno",
                "-Wno-psabi",
                f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
            ],
            language="c++",
            optional=True,
        )
    ]


setup(ext_modules=extensions())
