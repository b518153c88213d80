"""A launching process's own scratch folder, so that an ended server leaves no file behind.

SGLang makes its socket names with `NamedTemporaryFile(delete=False)` and a shared-memory file for each server, and
removes neither. A server that was started from the command line therefore gets a temporary folder of its own, which
its child processes inherit and which is removed when it ends. A folder whose process was killed outright is removed
by the next start.
"""

import atexit
import os
import shutil
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

PREFIX = "spec_ext_"
LAUNCHERS = ("launch_server.py", "sglang")


def is_launcher() -> bool:
    """Return whether this process is a server's command line, not one of its children or a user's program."""
    return Path(sys.argv[0]).name in LAUNCHERS and "--multiprocessing-fork" not in sys.orig_argv


def use() -> Path:
    """Make this process's temporary folder, remove it at exit, and remove those of processes that are gone."""
    parent = Path(tempfile.gettempdir())
    for folder in parent.glob(f"{PREFIX}*_scratch"):
        _remove_if_orphaned(folder)
    folder = parent / f"{PREFIX}{os.getpid()}_scratch"
    folder.mkdir(mode=0o700, exist_ok=True)
    os.environ["TMPDIR"] = str(folder)
    tempfile.tempdir = str(folder)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def avoid_named_semaphores() -> None:
    """Give tqdm a lock of this process alone: its default is a named semaphore, which a killed process leaves."""
    from tqdm import tqdm

    tqdm.set_lock(threading.RLock())


def forget_load_file(port_args: Any, *args: Any, **kwargs: Any) -> None:
    """After `PortArgs.init_new`: remove the server's load file in /dev/shm when this process ends."""
    from sglang.srt.managers.load_snapshot import shm_path_for

    path = Path(shm_path_for(port_args.instance_id))
    atexit.register(path.unlink, missing_ok=True)


def _remove_if_orphaned(folder: Path) -> None:
    owner = folder.name.removeprefix(PREFIX).removesuffix("_scratch")
    if owner.isdigit() and not Path(f"/proc/{owner}").exists():
        shutil.rmtree(folder, ignore_errors=True)
