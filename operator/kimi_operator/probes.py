"""/healthz, /readyz and /metrics on one port."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from aiohttp import web
from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from kimi_operator.metrics import Metrics


@dataclass(slots=True)
class Health:
    """What the probes tell. A standby is ready: it is there to take over."""

    is_leader: bool = False
    is_synced: bool = False
    """The leader has listed everything once and acts."""

    @property
    def is_ready(self) -> bool:
        """Standing by, or leading with a full picture."""
        return self.is_synced or not self.is_leader

    def __str__(self) -> str:
        if not self.is_leader:
            return "standing by: another replica leads"
        return "leading" if self.is_synced else "leading, reading the cluster"


async def serve_probes(port: int, health: Health, metrics: Metrics) -> web.AppRunner:
    """Serve on all addresses; the caller cleans the runner up. An answer at all shows that the event loop turns."""

    def text(body: Callable[[], tuple[int, str]]) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def answer(_: web.Request) -> web.Response:
            status, message = body()
            return web.Response(text=message + "\n", status=status)

        return answer

    async def answer_metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(metrics.registry), headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})

    app = web.Application()
    app.router.add_get("/healthz", text(lambda: (200, str(health))))
    app.router.add_get("/readyz", text(lambda: (200 if health.is_ready else 503, str(health))))
    app.router.add_get("/metrics", answer_metrics)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, None, port).start()
    return runner
