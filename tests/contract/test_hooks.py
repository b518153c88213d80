"""Every row of the hook table must fit the installed SGLang, and the table must be complete."""

import pytest

sglang = pytest.importorskip("sglang")

from sglang_spec_ext import doctor  # noqa: E402
from sglang_spec_ext.hook import Hook, split_target  # noqa: E402
from sglang_spec_ext.hooks import ACTIVE_HOOKS, HOOKS  # noqa: E402


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.target.removeprefix("sglang."))
def test_row_fits_the_installed_sglang(hook: Hook) -> None:
    assert doctor.hook_problem(hook) is None


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.target.removeprefix("sglang."))
def test_row_is_explained_and_loads(hook: Hook) -> None:
    assert hook.why
    assert hook.remove_when
    hook.load()


def test_a_target_that_is_gone_is_reported_by_name() -> None:
    gone = Hook("sglang.srt.managers.scheduler.Scheduler.no_such", "after", "x:y", "active", "why", "when")
    assert "no_such" in doctor.hook_problem(gone)


def test_a_parameter_that_is_gone_is_reported_by_name() -> None:
    row = ACTIVE_HOOKS[-1]
    renamed = Hook(row.target, row.kind, row.hook, row.when, row.why, row.remove_when, ("self", "no_such_parameter"))
    assert "no_such_parameter" in doctor.hook_problem(renamed)


def test_targets_split_at_the_class_or_the_last_name() -> None:
    assert split_target("a.b.Klass.method") == ("a.b", ("Klass", "method"))
    assert split_target("a.b.function") == ("a.b", ("function",))
    assert split_target("a.b._CONSTANT") == ("a.b", ("_CONSTANT",))
