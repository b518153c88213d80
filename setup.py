"""Names the packages and where they stand; everything else is in pyproject.toml."""

from setuptools import setup

setup(
    packages=[
        "sglang_spec_ext",
        "sglang_spec_ext.commands",
        "sglang_spec_ext.control",
        "sglang_spec_ext.cpu",
        "sglang_spec_ext.models",
        "sglang_spec_ext.workers",
        "sglang_spec_ext.disagg",
        "sglang_spec_ext.kernels",
    ],
    # The two top-level folders have no __init__.py: from the repository root a regular package of that
    # name would shadow PyPI's `kernels`, which SGLang imports (see CONTRIBUTING.md, "Packaging").
    package_dir={"sglang_spec_ext.disagg": "disagg", "sglang_spec_ext.kernels": "kernels"},
    package_data={"sglang_spec_ext": ["py.typed"]},
)
