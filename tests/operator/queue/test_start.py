"""The program starts without what it does not use, and the client of the API server works without it."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import asyncio, sys
from kimi_operator.start import leave_out
leave_out()
import kimi_operator.__main__
from kubernetes.aio import client
from kubernetes.aio.dynamic import DynamicClient

async def main():
    async with client.ApiClient(client.Configuration(host="http://127.0.0.1:9")) as api:
        DynamicClient(api)
        client.CoordinationV1Api(api)

asyncio.run(main())
absent = ("rich", "kubernetes.client", "kubernetes.config", "requests", "websocket")
print([name for name in absent if sys.modules.get(name) is not None])
"""


def test_the_program_imports_no_synchronous_client_and_no_rich() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
    run = [sys.executable, "-m", "kimi_operator.start", "--help"]
    assert "usage: kimi-operator" in subprocess.run(run, capture_output=True, text=True, timeout=120, check=True).stdout
