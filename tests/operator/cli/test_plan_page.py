"""The HTML page and the Markdown of a plan, read by strict parsers; the page in a real browser where there is one."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import shutil
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
MI300X, LOCAL = EXAMPLES / "mi300x-2p2d.yaml", EXAMPLES / "local" / "2p2d.yaml"
SVG = "{http://www.w3.org/2000/svg}"
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
START_S = 120.0

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def page(run: Run) -> Callable[..., str]:
    def call(*arguments: object) -> str:
        status, out, err = run("plan", *arguments, "-o", "html")
        assert status in (0, 1), err
        return out

    return call


def tree(text: str) -> ET.Element:
    """The page as XML: stricter than what a browser asks for."""
    assert text.startswith("<!DOCTYPE html>\n")
    return ET.fromstring(text.removeprefix("<!DOCTYPE html>\n"))


def coordinates(svg: ET.Element) -> Iterator[tuple[float, float]]:
    for each in svg.iter():
        if points := each.get("points"):
            yield from (tuple(map(float, pair.split(","))) for pair in points.split())
        names = {"rect": ("x", "y"), "circle": ("cx", "cy"), "line": ("x1", "y1"), "text": ("x", "y")}
        x, y = names.get(each.tag.removeprefix(SVG), ("", ""))
        if each.get(x) is not None:
            yield float(each.get(x, "nan")), float(each.get(y, "nan"))


@pytest.mark.parametrize("flags", [("-f", MI300X), ("-f", LOCAL), ("--chip", "mi355x", "--nodes", 4, "--cost", 2)])
def test_the_page_is_well_formed_and_every_point_lies_in_its_picture(page: Callable[..., str], flags: tuple) -> None:
    pictures = list(tree(page(*flags)).iter(f"{SVG}svg"))
    assert len(pictures) == (3 if LOCAL in flags else 5)
    for svg in pictures:
        _, _, width, height = map(float, svg.get("viewBox", "").split())
        points = list(coordinates(svg))
        assert points
        for x, y in points:
            assert math.isfinite(x)
            assert math.isfinite(y)
            assert 0 <= x <= width
            assert 0 <= y <= height


def test_the_page_needs_nothing_from_elsewhere(page: Callable[..., str]) -> None:
    text = page("-f", MI300X)
    assert "<script" not in text
    assert "@import" not in text
    assert re.findall(r"(?:src|href|url)\s*[=(]", text) == []
    assert set(re.findall(r"https?://[^\"' ]+", text)) == {"http://www.w3.org/2000/svg"}


def test_the_memory_bar_is_in_proportion(page: Callable[..., str]) -> None:
    bar = next(tree(page("-f", MI300X)).iter(f"{SVG}svg"))
    widths = {each.get("class"): float(each.get("width", "nan")) for each in bar.iter(f"{SVG}rect")}
    assert sum(widths.values()) == pytest.approx(718, abs=0.05)
    assert widths["pages"] == pytest.approx(718 * 15_229_845_504 / 206_141_652_992, abs=0.01)


def test_the_band_encloses_the_curve_and_the_knee_is_marked(run: Run, page: Callable[..., str]) -> None:
    knee = json.loads(run("plan", "-f", MI300X, "--concurrency", 20, "-o", "json")[1])["speed"]["knee"]
    svg = list(tree(page("-f", MI300X, "--concurrency", 20)).iter(f"{SVG}svg"))[2]
    shapes = {each.get("class"): each.get("points", "") for each in svg.iter() if each.get("points")}
    band = [tuple(map(float, pair.split(","))) for pair in shapes["band"].split()]
    curve = [tuple(map(float, pair.split(","))) for pair in shapes["line value"].split()]
    upper, lower = band[: len(curve)], list(reversed(band[len(curve) :]))
    for (x, value), (high_x, high), (low_x, low) in zip(curve, upper, lower, strict=True):
        assert high_x == low_x == x
        # down is larger in a picture
        assert high < value < low
    words = [each.text for each in svg.iter(f"{SVG}text")]
    assert f"knee at {knee:,}" in words
    assert "load at 20" in words


def test_markup_in_a_profile_stays_text(page: Callable[..., str], run: Run, tmp_path: Path) -> None:
    profile = yaml.safe_load((EXAMPLES / "local" / "profile.yaml").read_text())
    bad = "<script>alert('1')</script> | **x** & \"y\""
    profile["spec"].setdefault("sources", {})["reserve.contexts"] = bad
    (tmp_path / "profile.yaml").write_text(yaml.safe_dump(profile))
    (tmp_path / "k3.yaml").write_text(LOCAL.read_text())
    text = page("-f", tmp_path / "k3.yaml")
    assert "<script" not in text
    assert any(bad in (cell.text or "") for cell in tree(text).iter("td"))
    _, markdown, _ = run("plan", "-f", tmp_path / "k3.yaml", "-o", "markdown")
    (line,) = {line for line in markdown.splitlines() if "script" in line}
    assert re.sub(r"\\.", "", line).count("|") == 5


def test_a_refusal_is_a_page_and_a_table_too(run: Run) -> None:
    flags = ("plan", "--chip", "mi300x", "--nodes", 4, "--tensor-parallel", 1)
    status, out, _ = run(*flags, "-o", "html")
    assert status == 1
    assert any("191.0 GiB of weights" in (cell.text or "") for cell in tree(out).iter("td"))
    status, out, _ = run(*flags, "-o", "markdown")
    assert status == 1
    assert out.startswith(
        "**does not fit**\n\n| field | got | expected | remedy |\n|---|---|---|---|\n| spec.prefill |"
    )


def test_tables_of_the_markdown_have_as_many_cells_as_their_head(run: Run) -> None:
    _, out, _ = run("plan", "-f", MI300X, "-o", "markdown", "--cost", 2)
    tables = [block.splitlines() for block in out.split("\n\n") if block.startswith("|")]
    assert len(tables) == 4
    for table in tables:
        assert len({re.sub(r"\\.", "", line).count("|") for line in table}) == 1


# In a real browser, driven by its own protocol.

DRAWN = "svg, svg rect, svg polyline, svg polygon, svg circle, svg text"
SIZES = f"""new Promise(done => document.readyState === "complete" ? done() : addEventListener("load", done)).then(() =>
  JSON.stringify([...document.querySelectorAll("{DRAWN}")].map(e => {{
    const box = e.getBoundingClientRect(), own = e.tagName === "svg" ? box : e.getBBox(), style = getComputedStyle(e);
    const outer = (e.ownerSVGElement || e).getBoundingClientRect();
    const sides = [box.left - outer.left, outer.right - box.right, box.top - outer.top, outer.bottom - box.bottom];
    return {{tag: e.tagName, name: e.getAttribute("class") || "", inside: Math.min(...sides),
      width: box.width, height: box.height, shown: own.width + own.height,
      paint: style.fill, stroke: style.stroke, opacity: style.opacity * style.fillOpacity}}; }})))"""
COMPLAINTS = {
    "Runtime.exceptionThrown",
    "Runtime.consoleAPICalled",
    "Log.entryAdded",
    "Network.loadingFailed",
    "Network.requestWillBeSent",
}


@asynccontextmanager
async def browser(folder: Path) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
    """A page of a headless browser, by its DevTools socket. All that it writes lies in the folder."""
    assert BROWSER
    log = folder / "browser.log"
    # A folder of its own, for it leaves some when it is ended; a short path, for it makes sockets there.
    temporary = tempfile.mkdtemp()
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            "--no-first-run", f"--user-data-dir={folder / 'profile'}",
            "--remote-debugging-port=0", "about:blank", stdout=output, stderr=output,
            env={**os.environ, "TMPDIR": temporary},
        )  # fmt: skip
    try:
        async with asyncio.timeout(START_S):
            while not (match := re.search(rb"DevTools listening on ws://([^/]+)/", log.read_bytes())):
                assert process.returncode is None, f"the browser ended: {log.read_text()[-2000:]}"
                await asyncio.sleep(0.1)
        host = match[1].decode()
        async with aiohttp.ClientSession() as http:
            targets = await (await http.get(f"http://{host}/json/list")).json()
            address = next(target["webSocketDebuggerUrl"] for target in targets if target["type"] == "page")
            async with http.ws_connect(address, max_msg_size=2**26) as socket:
                yield socket
    finally:
        if process.returncode is None:
            process.terminate()
        async with asyncio.timeout(START_S):
            await process.wait()
        shutil.rmtree(temporary, ignore_errors=True)


async def look_at(socket: aiohttp.ClientWebSocketResponse, file: Path) -> tuple[list[str], list[dict[str, Any]]]:
    """What the browser complains about or asks for, and the sizes of what it drew."""
    complaints: list[str] = []

    async def call(method: str, **parameters: Any) -> dict[str, Any]:
        await socket.send_json({"id": 1, "method": method, "params": parameters})
        async with asyncio.timeout(START_S):
            while "id" not in (event := await socket.receive_json()):
                is_the_page = event["params"].get("request", {}).get("url") == file.as_uri()
                if event["method"] in COMPLAINTS and not is_the_page:
                    complaints.append(json.dumps(event))
        assert "error" not in event, event
        return event["result"]

    for domain in ("Runtime", "Log", "Network", "Page"):
        await call(f"{domain}.enable")
    await call("Page.navigate", url=file.as_uri())
    drawn = await call("Runtime.evaluate", expression=SIZES, awaitPromise=True)
    return complaints, json.loads(drawn["result"]["value"])


@pytest.mark.skipif(BROWSER is None, reason="no chromium or google-chrome on PATH")
async def test_a_browser_draws_the_page_from_a_file_without_complaint(page: Callable[..., str], tmp_path: Path) -> None:
    file = tmp_path / "plan.html"
    # the longest context there is has the widest label, at the right edge
    flags = ("--chip", "mi325x", "--max-model-len", 1_048_576, "--max-num-seqs", 8, "--cost", 2, "--concurrency", 20)
    file.write_text(page(*flags), encoding="utf-8")
    async with browser(tmp_path) as socket:
        complaints, drawn = await look_at(socket, file)
    assert complaints == []
    assert sum(each["tag"] == "svg" for each in drawn) == 5
    for each in drawn:
        # what is 1.3 MiB of 192 GiB has no width to speak of
        if each["tag"] != "rect" or each["name"] != "free":
            assert each["shown"] > 0, each
        assert each["inside"] >= -1, f"cut off: {each}"
        if each["tag"] == "svg":
            assert each["width"] > 300, each
            assert each["height"] > 20, each
    painted = {each["name"]: each["paint"] for each in drawn if each["tag"] == "rect"}
    # black is what a class without a colour is painted in
    assert "rgb(0, 0, 0)" not in painted.values()
    assert len(set(painted.values())) == len(painted) == 5
    assert all(each["stroke"] != "none" for each in drawn if each["tag"] == "polyline")
    # a band has the colour of its line, which is seen through it
    bands = [each for each in drawn if each["tag"] == "polygon"]
    lines = {each["stroke"] for each in drawn if each["name"] == "line value"}
    assert [each["name"] for each in bands] == ["band", "band"]
    assert {each["paint"] for each in bands} == lines == {painted["weights"]}
    assert all(0.1 <= each["opacity"] <= 0.4 for each in bands), bands
    assert all(each["paint"] != "rgb(0, 0, 0)" for each in drawn if each["tag"] == "circle")
