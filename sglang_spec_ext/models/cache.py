"""A folder cache whose entries are complete or absent.

An entry is built in a temporary folder and renamed into place together with a manifest of its files; an entry
whose manifest does not match what is on disk, or that was built by another recipe, is rebuilt.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

MANIFEST = "spec_ext_manifest.json"


def home() -> Path:
    """Return the folder for environments and models: SPEC_EXT_HOME, or the user's cache folder."""
    if chosen := os.environ.get("SPEC_EXT_HOME"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "sglang-spec-ext"


def problem(folder: Path, recipe: str) -> str | None:
    """Return why the entry cannot be used, or None when every file is as its manifest says."""
    if not folder.is_dir():
        return "absent"
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return "no readable manifest"
    if manifest.get("recipe") != recipe:
        return "built by another recipe"
    for name, digest in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if _digest(path) != digest:
            return f"{name} has changed"
    return None


def ensure(folder: Path, recipe: str, build: Callable[[Path], None]) -> str | None:
    """Build the entry unless it is intact; return why it was built, or None when it was there."""
    reason = problem(folder, recipe)
    if reason is None:
        return None
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        build(scratch)
        files = {path.name: _digest(path) for path in sorted(scratch.iterdir()) if path.is_file()}
        manifest = json.dumps({"recipe": recipe, "files": files}, indent=1)
        (scratch / MANIFEST).write_text(manifest, encoding="utf-8")
        scratch.chmod(0o755)
        if folder.exists():
            shutil.rmtree(folder)
        scratch.rename(folder)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    return reason


def _digest(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
