"""`SpecExt`: look at and steer the extension of a running server or in-process engine.

Both ways go through SGLang's internal-state routes, so a server's own key guards them.
"""

import json
import urllib.error
import urllib.request
from typing import Any

from sglang_spec_ext.config import MODES, STATE_KEY, UPDATE_PREFIX
from sglang_spec_ext.errors import SpecExtError

TIMEOUT_S = 30.0


class ControlError(SpecExtError):
    """The server refused an update, does not run the extension, or could not be reached."""


class SpecExt:
    """The extension of one server, by its address or its engine.

    With data parallelism an update reaches every replica, and `state` is the first one's.
    """

    def __init__(self, engine_or_url: Any, *, api_key: str | None = None) -> None:
        self._engine = None if isinstance(engine_or_url, str) else engine_or_url
        self._url = engine_or_url.rstrip("/") if isinstance(engine_or_url, str) else ""
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def states(self) -> list[dict[str, Any]]:
        """Return the state of every replica."""
        info = self._engine.get_server_info() if self._engine is not None else self._ask("/server_info")
        found = [state[STATE_KEY] for state in info["internal_states"] if STATE_KEY in state]
        if not found:
            raise ControlError("the server does not run the extension; start it with --spec-ext-mode")
        return found

    def state(self) -> dict[str, Any]:
        """Return mode, decisions, acceptance, cost and accounting."""
        return self.states()[0]

    def cost_table(self) -> dict[str, Any] | None:
        """Return the cost table as it was measured; None when the server runs without one."""
        table: dict[str, Any] | None = self.state()["cost_table"]
        return table

    def set_mode(self, mode: str) -> None:
        """Switch between off, shadow and adaptive; what was learned is kept."""
        if mode not in MODES:
            raise ControlError(f"mode: must be one of {', '.join(MODES)}, got {mode!r}")
        self._update("mode", MODES.index(mode))

    def pin(self, k: int) -> None:
        """Fix K to one of the tiers."""
        self._update("pin", k)

    def unpin(self) -> None:
        """Give the choice back to the controller."""
        self._update("unpin", 1)

    def reset(self) -> None:
        """Forget acceptance, corrections, accounting and the pin; the cost table and the mode stay."""
        self._update("reset", 1)

    def _update(self, name: str, value: int) -> None:
        changes = {UPDATE_PREFIX + name: value}
        if self._engine is not None:
            self._update_engine(changes)
        elif not all(self._ask("/set_internal_state", {"server_args": changes})):
            raise ControlError(
                f"{name}: the server does not run the extension; start it with --spec-ext-mode"
            )

    def _update_engine(self, changes: dict[str, int]) -> None:
        from fastapi import HTTPException
        from sglang.srt.managers.io_struct import SetInternalStateReq

        assert self._engine is not None
        request = SetInternalStateReq(server_args=changes)
        try:
            done = self._engine.loop.run_until_complete(
                self._engine.tokenizer_manager.set_internal_state(request)
            )
        except HTTPException as error:
            raise ControlError(error.detail) from error
        if not all(done):
            raise ControlError(
                f"{', '.join(changes)}: the engine does not run the extension; pass spec_ext to Engine"
            )

    def _ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, self._headers)  # noqa: S310 - the user's own server
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:  # noqa: S310
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            raise ControlError(f"{self._url}{path}: {error.code} {_detail(error.read())}") from error
        except OSError as error:
            raise ControlError(
                f"{self._url}{path}: cannot be reached ({error}); is the server up?"
            ) from error


def _detail(body: bytes) -> str:
    text = body.decode(errors="replace")
    try:
        found = json.loads(text)
    except ValueError:
        return text
    return str(found.get("detail", text)) if isinstance(found, dict) else text
