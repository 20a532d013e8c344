"""The token bucket, in real but short time: bursts pass at once, the rest keeps the rate."""

from __future__ import annotations

import asyncio

from kimi_operator.limiter import RateLimit


async def test_a_burst_passes_and_the_rest_keeps_the_rate() -> None:
    limit = RateLimit(per_second=200.0, burst=10)
    loop = asyncio.get_running_loop()
    began = loop.time()
    passed: list[float] = []

    async def call() -> None:
        await limit.take()
        passed.append(loop.time() - began)

    await asyncio.gather(*(call() for _ in range(50)))
    # Forty calls beyond the burst at 200 a second take 0.2 s; no call may come before its share.
    for index, at_s in enumerate(passed):
        assert at_s >= (index + 1 - 10) / 200.0 - 0.01
    assert passed == sorted(passed)


async def test_an_idle_bucket_fills_up_to_its_burst_only() -> None:
    limit = RateLimit(per_second=1000.0, burst=2)
    loop = asyncio.get_running_loop()
    for _ in range(2):
        await limit.take()
    await asyncio.sleep(0.05)
    began = loop.time()
    for _ in range(12):
        await limit.take()
    assert loop.time() - began >= 0.009
