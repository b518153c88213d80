"""Runtime control through SGLang's internal-state routes, in the scheduler and in front of it.

SGLang's update request carries numbers only, so a mode is sent as its place in MODES. A rejected update
leaves everything as it was and its reason in the state, from which the HTTP answer takes it.
"""

from collections.abc import Callable
from typing import Any

from sglang_spec_ext.config import MODES, STATE_KEY
from sglang_spec_ext.config import UPDATE_PREFIX as PREFIX
from sglang_spec_ext.records import Mode


def add_state(output: Any, controller: Any, recv_req: Any) -> Any:
    """After `SchedulerInternalStateController.get_internal_state`: add ours."""
    worker = controller.scheduler.draft_worker
    if getattr(worker, "spec_ext", None) is not None:
        state = output.internal_state[STATE_KEY] = worker.spec_ext_snapshot()
        if worker.spec_ext_config.pd_transport != "off":
            from sglang_spec_ext.workers import handoff

            state["pd"] = handoff.snapshot(controller.scheduler)
    return output


def add_handlers(handlers: dict[str, Any], controller: Any) -> dict[str, Any]:
    """After `SchedulerInternalStateController._update_handlers`: accept our keys."""
    worker = controller.scheduler.draft_worker
    if getattr(worker, "spec_ext", None) is None:
        return handlers
    return {**handlers, **Updates(worker).handlers()}


class Updates:
    """What may be changed while a worker serves; each check raises ValueError with the rule."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._loop = worker.spec_ext

    def handlers(self) -> dict[str, Any]:
        """Return SGLang's update handlers by key."""
        controller = self._loop.controller
        return {
            f"{PREFIX}mode": self._handler(self.mode, controller.set_mode),
            f"{PREFIX}pin": self._handler(self.tier, controller.pin),
            f"{PREFIX}unpin": self._handler(self.one, lambda _: controller.unpin()),
            f"{PREFIX}reset": self._handler(self.one, lambda _: self._loop.reset()),
        }

    def _handler(self, check: Callable[[Any], Any], act: Callable[[Any], None]) -> Any:
        from sglang.srt.managers.scheduler_components.internal_state import UpdateRejected, _UpdateHandler

        def validate(key: str, value: Any) -> None:
            try:
                check(value)
            except ValueError as error:
                self._loop.rejection = f"{key}: {error}"
                raise UpdateRejected(self._loop.rejection) from error

        def apply(_: str, value: Any) -> None:
            act(check(value))

        return _UpdateHandler(validate, apply)

    def mode(self, value: Any) -> Mode:
        """Return a mode that can run."""
        if value not in range(len(MODES)):
            names = ", ".join(f"{place} ({mode})" for place, mode in enumerate(MODES))
            raise ValueError(f"must be one of {names}, got {value!r}")
        mode = Mode(MODES[int(value)])
        if mode is not Mode.OFF:
            self._require_table()
        return mode

    def tier(self, value: Any) -> int:
        """Return a K that can be pinned."""
        controller = self._loop.controller
        if controller.mode is not Mode.ADAPTIVE:
            raise ValueError(
                f"K is pinned in mode adaptive, and the mode is {controller.mode}; set the mode first"
            )
        self._require_table()
        if value not in controller.settings.tiers:
            raise ValueError(f"must be one of the tiers {list(controller.settings.tiers)}, got {value!r}")
        return int(value)

    @staticmethod
    def one(value: Any) -> int:
        """Return 1."""
        if value != 1:
            raise ValueError(f"must be 1, got {value!r}")
        return 1

    def _require_table(self) -> None:
        if self._loop.controller.cost is None:
            raise ValueError(
                f"there is no cost table, so the fixed width runs; profile {self._worker.spec_ext_profile}"
            )


async def answer_with_reason(original: Callable[..., Any], manager: Any, obj: Any) -> list[bool]:
    """Around `TokenizerControlMixin.set_internal_state`: a rejected update of ours is a 400 with the rule."""
    updated: list[bool] = await original(manager, obj)
    ours = [key for key in obj.server_args if key.startswith(PREFIX)]
    if ours and not all(updated):
        from fastapi import HTTPException

        states = await manager.get_internal_state()
        reasons = [state.get(STATE_KEY, {}).get("rejection") for state in states]
        known = [reason for reason in reasons if reason is not None and reason.partition(":")[0] in ours]
        unknown = f"{', '.join(ours)}: known keys are {PREFIX}mode, {PREFIX}pin, {PREFIX}unpin, {PREFIX}reset"
        raise HTTPException(status_code=400, detail=known[0] if known else unknown)
    return updated
