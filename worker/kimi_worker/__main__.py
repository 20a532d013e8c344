"""`kimi-worker serve | route | preflight`. Each command imports what it needs; only a rank imports torch."""

import dataclasses
import gc
import json
import signal
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import cyclopts
import structlog
from cyclopts import Parameter

from kimi_worker.logs import configure_logs
from kimi_worker.processes import die_with, fork_child, run_child, wait_for_first
from kimi_worker.settings import (
    LOOPBACK,
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
def serve(
    *,
    settings: SettingsFile = None,
    standalone: Path | None = None,
    host: str = LOOPBACK,
    port: int = 8000,
    model_name: str | None = None,
) -> int:
    """Run a worker pod until SIGTERM, which drains it.

    Parameters
    ----------
    standalone
        Checkpoint folder: serve it with one rank on this machine, without settings file, prefill lanes and router.
    host
        Address that the API listens on, with --standalone; 0.0.0.0 lets other machines in, and no key is asked for.
    port
        Port of the API, with --standalone.
    model_name
        Name of the model in the API, with --standalone; that of the checkpoint folder by default.
    """
    # Process 1 of a container ignores what it does not handle, and a pod may be deleted before it has started anything.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    configure_logs("supervisor")
    if standalone is None:
        return _serve_pod(settings or settings_path(), pod_identity)
    return _serve_alone(standalone, partial(standalone_settings, port=port, host=host, served_name=model_name))


def _serve_alone(checkpoint: Path, make_settings: Callable[..., WorkerSettings]) -> int:
    from kimi_worker.model.config import ConfigError, read_config  # noqa: PLC0415

    with tempfile.TemporaryDirectory(prefix="kimi-") as folder:
        run_dir = Path(folder)
        path = run_dir / "worker.json"
        try:
            longest = read_config(checkpoint).max_position_embeddings
        except ConfigError as error:
            print(f"kimi-worker: {error}", file=sys.stderr)  # noqa: T201 - for whoever started the command
            return 1
        path.write_text(make_settings(checkpoint.resolve(), longest=longest).model_dump_json())
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
    from kimi_worker.router import app as router  # noqa: PLC0415
    from kimi_worker.server.listen import PortError  # noqa: PLC0415

    try:
        router.run(read_settings(settings or settings_path(), RouterSettings))
    except (SettingsError, PortError) as error:
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
def ranks(*, parent: int, settings: Path) -> None:
    """Load torch once and fork the pod's ranks from here; started by `serve`."""
    die_with(parent)
    configure_logs("ranks")
    identity, pod = pod_identity(), read_settings(settings, WorkerSettings)

    def body() -> None:
        # Inside, so that an error of this import is reported: torch comes with it.
        from kimi_worker.wiring import build_rank  # noqa: PLC0415

        # Shared pages stay shared: the collector of a copy must not write into them.
        gc.freeze()
        names = {}
        for local in range(pod.parallel.ranks_per_node):
            name = f"rank {identity.ordinal * pod.parallel.ranks_per_node + local}"
            run = partial(lambda number: build_rank(pod, identity, number).run(), local)
            names[fork_child(f"rank-{local}", identity.run_dir, name, run)] = name
        wait_for_first(names, identity.run_dir, pod.runtime.collectives)

    run_child("ranks", identity.run_dir, "ranks", body)


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
