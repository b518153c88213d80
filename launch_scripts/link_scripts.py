"""Writes the console scripts of SGLang and the test tools into an overlay environment.

A script of the base environment would start the base's interpreter, which does not know this project.
"""

import sys
from importlib.metadata import distribution
from pathlib import Path

from pip._vendor.distlib.scripts import ScriptMaker

DISTRIBUTIONS = ("sglang", "pytest", "ruff", "mypy")

if __name__ == "__main__":
    overlay = Path(sys.argv[1])
    maker = ScriptMaker(None, str(overlay / "bin"))
    maker.executable = str(overlay / "bin" / "python")
    maker.variants = {""}
    for name in DISTRIBUTIONS:
        for entry in distribution(name).entry_points:
            if entry.group == "console_scripts":
                maker.make(f"{entry.name} = {entry.value}")
