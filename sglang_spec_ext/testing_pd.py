"""Helpers for tests of prefill and decode on separate servers of this machine: a pair as a context manager.

No router is needed: `Pair.generate` sends each request to both servers, as a router does.
"""

import contextlib
import importlib.util
import json
import random
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from sglang_spec_ext.testing import HOST, Server, free_port, start_server, wait_until_ready

LOOPBACK = {  # every transfer stays on this machine
    "SGLANG_HOST_IP": HOST,
    "HOST_IP": HOST,
    "GLOO_SOCKET_IFNAME": "lo",
    "UCX_NET_DEVICES": "lo",
    "MC_TCP_BIND_ADDRESS": HOST,
}
ROLES = ("prefill", "decode")
ANSWER_TIMEOUT_S = 120.0
START_TIMEOUT_S = 900.0  # both servers load at the same time


def missing_part(backend: str) -> str | None:
    """Return what this machine lacks for a transfer back end of SGLang, None when it can run."""
    module = backend.partition("_")[0]
    if importlib.util.find_spec(module) is None:
        return f"{module} is not installed (extra [pd]; requirements/no-deps.txt says how)"
    if module == "mooncake":
        try:  # imported, not looked up: the library may lie beside the wheel
            importlib.import_module("mooncake.engine")
        except ImportError:
            return "mooncake needs libibverbs.so.1, for TCP too (Debian: apt-get install libibverbs1)"
    return None


class RequestFailed(RuntimeError):
    """A server answered a request with an error, or not at all; the message has the status and the body."""


def ask(url: str, body: Mapping[str, Any] | None = None, *, timeout_s: float = ANSWER_TIMEOUT_S) -> Any:
    """Return the JSON answer of a server; raises RequestFailed."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})  # noqa: S310 - our own loopback
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:  # noqa: S310
            return json.loads(answer.read())
    except urllib.error.HTTPError as error:
        raise RequestFailed(f"{url}: {error.code} {error.read().decode(errors='replace')}") from error
    except (OSError, ValueError) as error:
        raise RequestFailed(f"{url}: {error}") from error


def server_info(server: Server) -> dict[str, Any]:
    """Return what the extension shows of a server."""
    found: dict[str, Any] = ask(f"{server.url}/server_info")["internal_states"][0]["spec_ext"]
    return found


@dataclass
class Pair:
    """A prefill and a decode server that are, or were, running; `arguments` and `environment` restart either."""

    backend: str
    arguments: Mapping[str, Sequence[str]]
    environment: Mapping[str, str]
    bootstrap_port: int = field(default_factory=free_port)
    servers: dict[str, Server] = field(default_factory=dict)

    def start(self, *roles: str) -> None:
        """Start servers and wait until they are ready; both load at the same time."""
        for role in roles:
            argv = [*self.arguments[role], "--disaggregation-mode", role]
            argv += ["--disaggregation-transfer-backend", self.backend]
            argv += ["--disaggregation-bootstrap-port", str(self.bootstrap_port)]
            self.servers[role] = start_server(argv, environment={**LOOPBACK, **self.environment})
        for role in roles:
            wait_until_ready(self.servers[role], START_TIMEOUT_S)

    def stop(self, *roles: str) -> None:
        """End servers, all at the same time, and remove their logs."""
        ending = [self.servers.pop(role) for role in roles if role in self.servers]
        for server in ending:
            server.ask_to_end()
        with contextlib.ExitStack() as logs:
            for server in ending:
                logs.callback(server.log.unlink, missing_ok=True)
                logs.callback(server.wait_until_ended)

    def body(self, ids: Sequence[int], **sampling: Any) -> dict[str, Any]:
        """Return a request for both servers, greedy unless told otherwise."""
        return {
            "input_ids": list(ids),
            "sampling_params": {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True, **sampling},
            "bootstrap_host": HOST,
            "bootstrap_port": self.bootstrap_port,
            "bootstrap_room": random.SystemRandom().randrange(1 << 62),
        }

    def send(self, body: Mapping[str, Any], *, timeout_s: float = ANSWER_TIMEOUT_S) -> dict[str, Any]:
        """Send one request to both servers and return decode's answer; raises RequestFailed."""
        with ThreadPoolExecutor(1) as beside:
            prefill = beside.submit(ask, f"{self.servers['prefill'].url}/generate", body, timeout_s=timeout_s)
            try:
                answer: dict[str, Any] = ask(f"{self.servers['decode'].url}/generate", body, timeout_s=timeout_s)
            finally:
                with contextlib.suppress(RequestFailed):  # decode's answer says what went wrong
                    prefill.result()
            return answer

    def generate(
        self, prompts: Sequence[Sequence[int]], *, concurrency: int = 8, **sampling: Any
    ) -> list[dict[str, Any]]:
        """Return decode's answer to each prompt, `concurrency` at a time."""
        with ThreadPoolExecutor(concurrency) as clients:
            return list(clients.map(lambda ids: self.send(self.body(ids, **sampling)), prompts))

    def handoff(self, role: str) -> dict[str, Any]:
        """Return what `/server_info` of a server shows of the records."""
        found: dict[str, Any] = server_info(self.servers[role])["pd"]
        return found


@contextlib.contextmanager
def running_pair(
    arguments: Mapping[str, Sequence[str]], *, backend: str, environment: Mapping[str, str] | None = None
) -> Iterator[Pair]:
    """Run a prefill and a decode server for the duration of a block; `arguments` by role."""
    pair = Pair(backend, arguments, environment or {})
    try:
        pair.start(*ROLES)
        yield pair
    finally:
        pair.stop(*ROLES)
