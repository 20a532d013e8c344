"""Start-up, prefill tokens/s, decode step time and tokens/s of the tiny model in one process on this machine.

usage: engine.py [--output FILE]
"""

import argparse
import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parents[2]
CHECKPOINT = ROOT / "examples/tiny-k3"
PORT = 18200
URL = f"http://127.0.0.1:{PORT}"
NUM_OUTPUT_TOKENS = 64
LONG_PROMPT_TOKENS = 4000


def wait_ready(process: subprocess.Popen[bytes], timeout_s: float = 120) -> float:
    """Seconds until the worker is ready."""
    began = time.monotonic()
    while time.monotonic() - began < timeout_s:
        if process.poll() is not None:
            sys.exit(f"the worker ended with status {process.returncode}")
        try:
            if httpx.get(f"{URL}/ready", timeout=1).is_success:
                return time.monotonic() - began
        except httpx.TransportError:
            pass
        time.sleep(0.05)
    sys.exit(f"the worker was not ready within {timeout_s:g} s")


async def complete(client: httpx.AsyncClient, num_prompt: int, max_tokens: int, seed: int) -> None:
    body = {
        "prompt": [65 + (seed * 7 + i) % 26 for i in range(num_prompt)],
        "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
    }  # fmt: skip
    (await client.post("/v1/completions", json=body)).raise_for_status()


async def measure() -> dict[str, float]:
    figures: dict[str, float] = {}
    async with httpx.AsyncClient(base_url=URL, timeout=300) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        assert model, "the worker serves no model"
        await complete(client, 8, 8, 0)
        for batch in (1, 8):
            began = time.monotonic()
            await asyncio.gather(*(complete(client, 8, NUM_OUTPUT_TOKENS, seed) for seed in range(batch)))
            seconds = time.monotonic() - began
            figures[f"decode_tokens_per_s_batch_{batch}"] = batch * NUM_OUTPUT_TOKENS / seconds
            figures[f"decode_step_ms_batch_{batch}"] = seconds / NUM_OUTPUT_TOKENS * 1e3
        began = time.monotonic()
        await complete(client, LONG_PROMPT_TOKENS, 1, 1)
        figures["prefill_tokens_per_s"] = LONG_PROMPT_TOKENS / (time.monotonic() - began)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    argv = [Path(sys.executable).parent / "kimi-worker", "serve", "--standalone", CHECKPOINT, "--port", str(PORT)]
    process = subprocess.Popen(list(map(str, argv)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        figures = {"worker_start_s": wait_ready(process), **asyncio.run(measure())}
    finally:
        process.terminate()
        process.wait(timeout=60)
    for name, value in figures.items():
        print(f"{name:32s} {value:10.2f}")
    if arguments.output:
        arguments.output.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
