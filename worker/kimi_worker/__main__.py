"""`kimi-worker serve | route | preflight`. Each command imports what it needs; only a rank imports torch."""

import asyncio
import dataclasses
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import cyclopts
import structlog
from cyclopts import Parameter

from kimi_worker.logs import configure_logs
from kimi_worker.processes import die_with, run_child
from kimi_worker.settings import (
    PodIdentity,
    RouterSettings,
    SettingsError,
    WorkerSettings,
    pod_identity,
    read_settings,
    settings_path,
    standalone_settings,
)

log = structlog.get_logger()
app = cyclopts.App(name="kimi-worker", help="Serves Kimi-K3: a worker pod, or the router in front of all of them.")

SettingsFile = Annotated[Path | None, Parameter(help="Settings file; $KIMI_SETTINGS by default.")]


@app.command
def serve(*, settings: SettingsFile = None, standalone: Path | None = None, port: int = 8000) -> int:
    """Run a worker pod until SIGTERM, which drains it.

    Parameters
    ----------
    standalone
        Checkpoint folder: serve it with one rank on this machine, without settings file, prefill lanes and router.
    port
        Port of the API, with --standalone.
    """
    configure_logs("supervisor")
    if standalone is None:
        return _serve_pod(settings or settings_path(), pod_identity)
    with tempfile.TemporaryDirectory(prefix="kimi-") as folder:
        run_dir = Path(folder)
        path = run_dir / "worker.json"
        path.write_text(standalone_settings(standalone, port).model_dump_json())
        return _serve_pod(path, lambda: PodIdentity(run_dir=run_dir))


def _serve_pod(path: Path, identify: Callable[[], PodIdentity]) -> int:
    from kimi_worker.preflight import PREFLIGHT_ERRORS, check_pod  # noqa: PLC0415
    from kimi_worker.supervisor import leave_message, run_pod  # noqa: PLC0415

    identity = PodIdentity()
    try:
        identity = identify()
        settings = read_settings(path, WorkerSettings)
        log.info("settings", path=str(path), **settings.model_dump(mode="json"))
        log.info("preflight_passed", **dataclasses.asdict(check_pod(settings, identity)))
    except PREFLIGHT_ERRORS as error:
        leave_message(identity, str(error))
        return 1
    return run_pod(settings, identity, path)


@app.command
def route(*, settings: SettingsFile = None) -> int:
    """Run the router until SIGTERM."""
    configure_logs("router")
    from kimi_worker.router.app import serve as serve_router  # noqa: PLC0415

    try:
        asyncio.run(serve_router(read_settings(settings or settings_path(), RouterSettings)))
    except SettingsError as error:
        print(f"kimi-worker: {error}", file=sys.stderr)  # noqa: T201 - for whoever started the command
        return 1
    return 0


@app.command
def preflight(*, settings: SettingsFile = None) -> int:
    """Check settings, checkpoint and group against each other, without torch and without reading weights."""
    from kimi_worker.preflight import PREFLIGHT_ERRORS, check_pod  # noqa: PLC0415

    try:
        findings = check_pod(read_settings(settings or settings_path(), WorkerSettings), pod_identity())
    except PREFLIGHT_ERRORS as error:
        print(f"kimi-worker: {error}", file=sys.stderr)  # noqa: T201 - for whoever started the command
        return 1
    print(json.dumps(dataclasses.asdict(findings)))  # noqa: T201 - the command's result
    return 0


@app.command(show=False)
def rank(local: int, *, parent: int, settings: Path) -> None:
    """Run one rank of a pod; started by `serve`."""
    die_with(parent)
    configure_logs(f"rank-{local}")
    identity, pod = pod_identity(), read_settings(settings, WorkerSettings)

    def body() -> None:
        # An error of this import has a name only inside: torch comes with it and takes seconds.
        from kimi_worker.wiring import build_rank  # noqa: PLC0415

        build_rank(pod, identity, local).run()

    number = identity.ordinal * pod.parallel.ranks_per_node + local
    run_child(f"rank-{local}", identity.run_dir, f"rank {number}", body)


@app.command(show=False)
def api(*, parent: int, settings: Path) -> None:
    """Run the API process of a pod; started by `serve`."""
    die_with(parent)
    configure_logs("api")
    identity, pod = pod_identity(), read_settings(settings, WorkerSettings)

    def body() -> None:
        import uvloop  # noqa: PLC0415

        from kimi_worker.server.app import serve as serve_api  # noqa: PLC0415

        uvloop.run(serve_api(pod, identity))

    run_child("api", identity.run_dir, "api", body)


def main() -> None:
    """The `kimi-worker` command."""
    sys.exit(app())


if __name__ == "__main__":
    main()
