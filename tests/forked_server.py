"""`sglang.launch_server` whose processes are forked, not spawned: one import of SGLang for a server instead of three.

Importing it takes ten seconds of a core. The processes, what they say to one another and the extension in them are
those of the stock command; some tests of `e2e`, and those of failures, start that as it is.
"""

import multiprocessing
import runpy


def launch() -> None:
    """Run the command; `set_start_method("spawn")`, which SGLang calls before it starts a process, chooses fork."""
    choose = multiprocessing.set_start_method
    multiprocessing.set_start_method = lambda method, force=False: choose("fork", force=force)
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    launch()
