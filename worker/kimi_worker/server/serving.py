"""How the HTTP apps of the worker and of the router are served."""

import gc

import uvicorn
from fastapi import FastAPI

from kimi_worker.server.connections import BoundedProtocol
from kimi_worker.server.listen import BACKLOG

KEEP_ALIVE_S = 120
"""How long an idle connection stays open: longer than clients keep one (httpx 5 s, aiohttp 15 s, nginx 60 s, Go 90 s),
or a request on one that is just being closed would be lost."""


def uvicorn_config(app: FastAPI, drain_s: float) -> uvicorn.Config:
    """What is logged goes to the root logger, see `private_logs`; requests that run at the end get `drain_s`."""
    return uvicorn.Config(
        app,
        http=BoundedProtocol,
        ws="none",
        access_log=False,
        log_config=None,
        log_level="warning",
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=max(1, round(drain_s)),
    )


def spare_collector() -> None:
    """Once all is imported and built, it lives as long as the process: to look at it again stops streams for 20 ms."""
    gc.collect()
    gc.freeze()
