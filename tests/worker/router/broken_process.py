"""A real router's or API's process with a bug: what reads bodies raises errors that quote them, in every way there is.

Run as a script: `broken_process.py router|api <settings file> <run folder>`.
"""

import asyncio
import gc
import logging
import sys
from pathlib import Path

import uvloop
from fastapi import Request
from kimi_worker.logs import configure_logs
from kimi_worker.router import app as router
from kimi_worker.router import bodies
from kimi_worker.server import app as server
from kimi_worker.settings import PodIdentity, RouterSettings, WorkerSettings, read_settings


class Unlucky:
    def __init__(self, words: str) -> None:
        self.words = words

    def __del__(self) -> None:
        raise ArithmeticError(self.words)


async def fail_unheard(words: str) -> None:
    raise LookupError(words)


def fail_in_callback(words: str) -> None:
    raise AttributeError(words)


async def broken_read_body(request: Request, *_: object, **__: object) -> bytes:
    gc.collect()
    words = (await request.body()).decode()
    loop = asyncio.get_running_loop()
    loop.call_soon(fail_in_callback, words)
    unheard = loop.create_task(fail_unheard(words))
    await asyncio.wait({unheard})
    del unheard
    Unlucky(words)
    try:
        raise KeyError(words)
    except KeyError as error:
        logging.getLogger("library").exception("cannot look up %s", error)
        raise ValueError(f"no such thing as {words}") from error


def main() -> None:
    which, path, run_dir = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    configure_logs(which)
    if which == "router":
        bodies.read_body = broken_read_body
        router.run(read_settings(path, RouterSettings))
    else:
        server.read_body = broken_read_body
        uvloop.run(server.serve(read_settings(path, WorkerSettings), PodIdentity(run_dir=run_dir)))


if __name__ == "__main__":
    main()
