"""`spec-ext demo-pd`: real prompts to a prefill server, a decode server and a router, then to one server.

Runs the launch scripts on free loopback ports; what they serve is set by their knobs (`launch_scripts/pd_env.sh`).
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from openai import OpenAI
from rich.console import Console
from rich.table import Table

from sglang_spec_ext.commands.demo import PROMPTS
from sglang_spec_ext.testing import HOST, Server, free_port, running_server, start_server, wait_until_ready
from sglang_spec_ext.testing_pd import server_info

FIRST_STEP = "first_accept_len_with_bonus_"
START_TIMEOUT_S = 900.0  # three servers load at the same time


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("--scripts", required=True, type=Path, help="folder of the launch scripts")
    parser.add_argument("--max-tokens", type=int, default=48)


def run(args: argparse.Namespace) -> int:
    """Serve, ask, compare; exit status 1 when an answer differs or a first step went without a record."""
    console = Console(file=sys.stdout)
    with _separate_servers(args.scripts, console) as (router, prefill, decode):
        answers = _ask(router, args.max_tokens, console)
        sent, received = server_info(prefill)["pd"], server_info(decode)["pd"]
    with console.status("starting one server"), _one_server(args.scripts) as server:
        alone = _ask(server, args.max_tokens, None)
    same = sum(a == b for a, b in zip(answers, alone, strict=True))
    console.print(_first_steps(sent["counters"], received["counters"], received["row_bytes"]))
    console.print(f"{same} of {len(PROMPTS)} answers are those of one server, to the letter")
    warm = sum(_lengths(received["counters"], "warm").values())
    return 0 if same == len(PROMPTS) and warm >= len(PROMPTS) else 1


@contextlib.contextmanager
def _separate_servers(scripts: Path, console: Console) -> Iterator[tuple[Server, Server, Server]]:
    """Run router, prefill and decode."""
    ports = {name: free_port() for name in ("PREFILL", "DECODE", "ROUTER", "BOOTSTRAP")}
    environment = {**os.environ, "SPEC_EXT_PD_BOOTSTRAP": str(ports.pop("BOOTSTRAP"))}
    environment |= {f"SPEC_EXT_PD_{name}": f"{HOST}:{port}" for name, port in ports.items()}
    with contextlib.ExitStack() as stack:
        servers = []
        with console.status("starting a prefill server, a decode server and the router"):
            for name, port in ports.items():
                script = str(scripts / f"pd_{name.lower()}.sh")
                arguments = [] if name == "ROUTER" else ["--log-level", "warning", "--max-running-requests", "8"]
                if name == "ROUTER":
                    for server in servers:
                        wait_until_ready(server, START_TIMEOUT_S)
                server = start_server(arguments, environment=environment, launcher=[script], port=port)
                stack.callback(_end, server)
                servers.append(server)
            wait_until_ready(servers[-1], START_TIMEOUT_S, route="/readiness")
        prefill, decode, router = servers
        yield router, prefill, decode


def _end(server: Server) -> None:
    try:
        server.stop()
    finally:
        server.log.unlink(missing_ok=True)


@contextlib.contextmanager
def _one_server(scripts: Path) -> Iterator[Server]:
    arguments = ["--log-level", "warning", "--max-running-requests", "8"]
    with running_server(arguments, environment=dict(os.environ), launcher=[str(scripts / "serve.sh")]) as server:
        yield server


def _ask(server: Server, max_tokens: int, console: Console | None) -> list[str]:
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=300)
    answers = []
    for prompt in PROMPTS:
        answer = client.chat.completions.create(
            model="default",
            messages=[{"role": "user", "content": prompt}],
            temperature=0,
            max_tokens=max_tokens,
        )
        answers.append(answer.choices[0].message.content or "")
        if console is not None:
            console.print(f"\n[bold]{prompt}[/]")
            console.print(answers[-1], markup=False, highlight=False)
    return answers


def _lengths(counters: dict[str, Any], kind: str) -> dict[int, int]:
    """Return {accept length with bonus: first decode steps}."""
    prefix = f"{FIRST_STEP}{kind}{{"
    return {
        int(name.removeprefix(prefix).rstrip("}")): int(count)
        for name, count in counters.items()
        if name.startswith(prefix)
    }


def _first_steps(sent: dict[str, Any], received: dict[str, Any], row_bytes: int) -> Table:
    table = Table("first decode steps", "requests", "accept length with bonus")
    for kind in ("warm", "cold"):
        lengths = _lengths(received, kind)
        requests = sum(lengths.values())
        mean = sum(length * count for length, count in lengths.items()) / requests if requests else 0.0
        table.add_row(f"{kind} ({'with' if kind == 'warm' else 'without'} a record)", str(requests), f"{mean:.2f}")
    table.caption = f"{sent['records_sent']} records of {row_bytes} bytes sent, {received['records_received']} received"
    return table
