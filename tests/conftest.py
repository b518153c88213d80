"""For every test: seeds, the cached checkpoints, and which tests share a worker."""

import os
import random
import sys
from collections.abc import Callable
from pathlib import Path

import hypothesis
import pytest

# The same examples each time, so that a run says something of the change it tests; no wall-clock time is asserted.
# HYPOTHESIS_PROFILE=search looks for new ones.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.register_profile("search", deadline=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

SHARED_SERVERS = ("served", "adaptive", "pd_pair")  # session fixtures, each parameter of which is one running server


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep tests of one server in one worker (`-n 2 --dist loadgroup`), and those of a file that start none."""
    for item in items:
        if (group := _group(item)) is not None:
            item.add_marker(pytest.mark.xdist_group(group))


@pytest.hookimpl(trylast=True)  # after the test's own fixtures
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End a shared server after its last test: pytest would keep it until the next of its kind, or the very end."""
    server = _server(item)
    if server is not None and (nextitem is None or _server(nextitem) != server):
        (definition,) = item._fixtureinfo.name2fixturedefs[server[0]]
        definition.finish(item._request)


def _server(item: pytest.Item) -> tuple[str, str] | None:
    """Return the fixture and the name of the server that a test shares."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    return next(((name, parameters[name].name) for name in SHARED_SERVERS if name in parameters), None)


def _group(item: pytest.Item) -> str | None:
    if (server := _server(item)) is not None:
        return "-".join(server)
    starts_its_own = item.get_closest_marker("engine") is not None
    return None if starts_its_own else item.nodeid.partition("::")[0]


@pytest.fixture(autouse=True)
def seeded() -> None:
    random.seed(0)


@pytest.fixture(scope="session")
def forked() -> tuple[str, ...]:
    """Return the launcher of a server whose processes are forked: it starts in half the time."""
    return (sys.executable, str(Path(__file__).with_name("forked_server.py")))


@pytest.fixture(scope="session")
def checkpoint() -> Callable[[str], Path]:
    """Return a function from a checkpoint's name to its folder, built on first use."""
    pytest.importorskip("torch")
    from sglang_spec_ext.models import prepare

    known = {model.name: model for model in prepare.models()}

    def folder(name: str) -> Path:
        for _ in prepare.prepare([known[name]]):
            pass
        return known[name].folder

    return folder
