"""The handshake over SGLang's bootstrap server: a route of our own, published by prefill, fetched by decode.

The answer is stored per rank; any rank's answer serves for the comparison, and the sidecar endpoint is
asked of the rank that will send. Nothing is added to SGLang's `/route`: a stock decode server rejects
unknown keys.
"""

from typing import Any

from sglang_spec_ext.disagg.handshake import MAX_PAYLOAD_BYTES, ROUTE, HandshakeError, decode_answer

TIMEOUT_S = 5.0
MAX_RANKS = 4096


class PeerUnavailableError(RuntimeError):
    """The bootstrap server could not be asked now; ask again later."""


def rank_key(dp: int, cp: int, tp: int, pp: int) -> str:
    """Return the name of one prefill rank."""
    return f"{dp}.{cp}.{tp}.{pp}"


def add_routes(server: Any) -> None:
    """Add ROUTE to a CommonKVBootstrapServer; runs in prefill's main process, before its loop starts."""
    from aiohttp import web

    answers: dict[str, bytes] = {}

    async def put(request: web.Request) -> web.Response:
        rank, body = request.query.get("rank", ""), await request.content.read(MAX_PAYLOAD_BYTES + 1)
        try:
            decode_answer(body)
        except HandshakeError as error:
            return web.Response(status=400, text=str(error))
        if not rank or (rank not in answers and len(answers) == MAX_RANKS):
            return web.Response(status=400, text="rank must be named, and ranks are bounded")
        answers[rank] = body
        return web.Response(text="OK")

    async def get(request: web.Request) -> web.Response:
        rank = request.query.get("rank")
        body = answers.get(rank) if rank is not None else next(iter(answers.values()), None)
        if body is None:
            return web.Response(status=404, text="no such rank has published its capability")
        return web.Response(body=body, content_type="application/json")

    server.app.router.add_put(ROUTE, put)
    server.app.router.add_get(ROUTE, get)


def publish_answer(base_url: str, rank: str, body: bytes) -> None:
    """PUT this rank's answer; raises PeerUnavailableError if the bootstrap server does not take it."""
    import requests

    try:
        response = requests.put(f"{base_url}{ROUTE}", params={"rank": rank}, data=body, timeout=TIMEOUT_S)
    except requests.RequestException as error:
        raise PeerUnavailableError(f"PUT {base_url}{ROUTE}: {error}") from error
    if response.status_code != 200:
        raise PeerUnavailableError(f"PUT {base_url}{ROUTE}: status {response.status_code} {response.text}")


def fetch_answer(base_url: str, rank: str | None = None) -> bytes | None:
    """GET a prefill server's answer; None from stock SGLang. Raises PeerUnavailableError: ask later."""
    import requests

    params = {} if rank is None else {"rank": rank}
    try:
        response = requests.get(f"{base_url}{ROUTE}", params=params, timeout=TIMEOUT_S)
    except requests.RequestException as error:
        raise PeerUnavailableError(f"GET {base_url}{ROUTE}: {error}") from error
    if response.status_code in (404, 405):
        return None
    if response.status_code != 200:
        raise PeerUnavailableError(f"GET {base_url}{ROUTE}: status {response.status_code}")
    return response.content


def sidecar_endpoint(answer: bytes) -> str:
    """Return where the rank that gave this answer listens; empty if it cannot be read."""
    try:
        return decode_answer(answer).read_capability().sidecar_endpoint
    except HandshakeError:
        return ""
