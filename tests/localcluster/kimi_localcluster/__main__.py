"""`localcluster`: the command line of the local Kubernetes cluster."""

from __future__ import annotations

import os
import sys
from collections import deque
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, CycloptsError, Parameter
from rich.console import Console
from rich.table import Table

from kimi_localcluster.binaries import DEFAULT_PROGRAMS, ensure_programs
from kimi_localcluster.cluster import START_TIMEOUT_S, Cluster, running_clusters
from kimi_localcluster.errors import LocalClusterError
from kimi_localcluster.podenv import check_place
from kimi_localcluster.progress import Progress
from kimi_localcluster.spec import DEFAULT_IMAGES, DEFAULT_NAME, ClusterSpec, default_vram

app = App(name="localcluster", help="A real multi-node Kubernetes on this machine, without Docker.")
node_app = App(name="node", help="Faults of nodes.")
app.command(node_app)

Name = Annotated[str, Parameter(help="Name of the cluster; several can run at once.")]
# Everything after the verb belongs to the program that is run, options included.
Rest = Annotated[str, Parameter(allow_leading_hyphen=True)]


@app.command
def up(
    *,
    name: Name = DEFAULT_NAME,
    nodes: int = 4,
    gpus: int = 8,
    device_id: str = "74a1",
    vram: str | None = None,
    image: tuple[str, ...] = DEFAULT_IMAGES,
    folder: tuple[str, ...] = (),
    timeout: float = START_TIMEOUT_S,
) -> None:
    """Start a cluster; builds and installs first what is missing. No effect if the same one runs.

    Parameters
    ----------
    nodes
        Number of nodes.
    gpus
        amd.com/gpu of each node.
    device_id
        PCI device id of the card that the nodes' labels claim.
    vram
        Memory label of that card, such as 192G; by default the card's own.
    image
        Image names under which pods find the project.
    folder
        HERE:THERE, a folder of this machine that every node shows at another path; may be repeated.
    timeout
        Seconds until a start counts as failed.
    """
    progress = Progress()
    pairs = [option.partition(":") for option in folder]
    folders = {Path(here).resolve(): there for here, _, there in pairs}
    if name in running_clusters():
        shown = tuple((str(here), there) for here, there in folders.items())
        wanted = ClusterSpec(name, nodes, gpus, device_id, vram or default_vram(device_id), image, shown)
        running = Cluster.attach(name).spec
        if running != wanted:
            raise LocalClusterError(
                f"cluster {name} runs with other values: {_differences(running, wanted)}; run down first"
            )
        progress.say(f"Cluster {name} is up already.")
        return
    Cluster.up(
        name, nodes=nodes, gpus=gpus, device_id=device_id, vram=vram, images=image, folders=folders,
        timeout_s=timeout, progress=progress,
    )  # fmt: skip
    option = "" if name == DEFAULT_NAME else f" --name {name}"
    progress.say(f"Cluster {name} is up. Try: localcluster kubectl{option} get nodes")


def _differences(running: ClusterSpec, wanted: ClusterSpec) -> str:
    pairs = ((field.name, getattr(running, field.name), getattr(wanted, field.name)) for field in fields(wanted))
    return ", ".join(f"{name} is {has}, asked for {wants}" for name, has, wants in pairs if has != wants)


@app.command
def down(*, name: Name = DEFAULT_NAME) -> None:
    """End a cluster and remove everything of it but its logs."""
    cluster, progress = Cluster(name), Progress()
    if not cluster.paths.state.exists() and name not in (known := running_clusters()):
        others = f"; running: {', '.join(known)}" if known else ""
        # As before: what a killed one has left outside its folder goes too.
        cluster.down()
        progress.say(f"Cluster {name} is not running, there is nothing to end{others}.")
        return
    with progress.step(f"Ending cluster {name}"):
        cluster.down()


@app.command
def status(*, name: Name = DEFAULT_NAME) -> None:
    """Components and nodes of a cluster."""
    cluster = Cluster.attach(name)
    report = cluster.status()
    console = Console(highlight=False)
    console.print(f"cluster {name}: {report['phase']} {report['problem']}")
    table = Table("component", "state", "restarts")
    for component, state in report["components"].items():
        table.add_row(component, state["state"], str(state["restarts"]))
    for node, state in report["nodes"].items():
        table.add_row(node, f"{state['state']}{', partitioned' if state['partitioned'] else ''}", "")
    console.print(table)
    others = [other for other in running_clusters() if other != name]
    if others:
        console.print(f"other clusters: {', '.join(others)}")


def _become(cluster: Cluster, argv: list[str], node: int | None = None) -> None:
    """Replace this process by a command in the cluster, so that terminals and signals work as they should."""
    command = cluster.command(argv, node)
    os.execvpe(command[0], command, cluster.command_env())


@app.command(help_flags=[], version_flags=[], end_of_options_delimiter="")
def kubectl(*args: Rest, name: Name = DEFAULT_NAME) -> None:  # its own --help and `--` reach kubectl
    """Run kubectl against a cluster. Give --name before the arguments of kubectl."""
    _become(Cluster(name), ["kubectl", *args])


@app.command(help_flags=[], version_flags=[], end_of_options_delimiter="")
def helm(*args: Rest, name: Name = DEFAULT_NAME) -> None:
    """Run helm against a cluster. Give --name before the arguments of helm."""
    _become(Cluster(name), ["helm", *args])


@app.command(name="exec")
def exec_(*args: Rest, name: Name = DEFAULT_NAME, node: int | None = None) -> None:
    """Run a command where service and pod addresses and cluster names work, or on a node: exec [--node N] -- CMD..."""
    if not args:
        raise LocalClusterError("exec needs a command: localcluster exec [--node N] -- CMD...")
    _become(Cluster(name), list(args), node)


@app.command
def kubeconfig(*, name: Name = DEFAULT_NAME) -> None:
    """Print the path of a cluster's kubeconfig, valid for commands that `exec` runs."""
    print(Cluster.attach(name).kubeconfig)


@app.command
def build(*programs: str) -> None:
    """Build the cluster's programs into the cache, or only those named, such as kwok."""
    check_place()
    for path in ensure_programs(programs or DEFAULT_PROGRAMS, Progress()).values():
        print(path)


@app.command
def load_image(image: str, *, name: Name = DEFAULT_NAME) -> None:
    """Make the checkout's present code available on all nodes as an image of this name."""
    cluster = Cluster.attach(name)
    progress = Progress()
    with progress.step(f"Loading {image}"):
        cluster.load_image(image, progress)


@app.command
def logs(component: str, *, name: Name = DEFAULT_NAME, tail: int = 200) -> None:
    """Print the end of a component's log: apiserver, etcd, node0, node0/kubelet, audit, ..."""
    if tail < 0:
        raise LocalClusterError(f"tail: got {tail}, expected a number of lines, 0 or more")
    with Cluster(name).logs(component).open(errors="replace") as lines:
        sys.stdout.writelines(deque(lines, maxlen=tail))


@app.command
def component(verb: Literal["stop", "start"], component: str, *, name: Name = DEFAULT_NAME) -> None:
    """Stop or start a control plane component: etcd, apiserver, controller-manager, scheduler, coredns, proxy."""
    cluster = Cluster.attach(name)
    (cluster.stop_component if verb == "stop" else cluster.start_component)(component)


@app.command
def apiserver(verb: Literal["stop", "start"], *, name: Name = DEFAULT_NAME) -> None:
    """Stop the API server (etcd keeps its data) or start it again."""
    component(verb, "apiserver", name=name)


@node_app.command
def partition(node: int, *, name: Name = DEFAULT_NAME) -> None:
    """Cut a node off the network; what runs on it runs on."""
    Cluster.attach(name).partition_node(node)


@node_app.command
def heal(node: int, *, name: Name = DEFAULT_NAME) -> None:
    """Give a partitioned node its network back."""
    Cluster.attach(name).heal_node(node)


@node_app.command
def kill(node: int, *, name: Name = DEFAULT_NAME) -> None:
    """End everything on a node at once."""
    Cluster.attach(name).kill_node(node)


@node_app.command
def restart(node: int, *, name: Name = DEFAULT_NAME) -> None:
    """Boot a node again, killing it first if it runs."""
    Cluster.attach(name).restart_node(node)


def main() -> None:
    try:
        app(print_error=False, exit_on_error=False)
    except LocalClusterError as error:
        sys.exit(f"localcluster: {error}")
    except CycloptsError as error:
        verb = " ".join(("localcluster", *(error.command_chain or ())))
        print(f"localcluster: {' '.join(str(error).split())} See `{verb} --help`.", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit("localcluster: interrupted; nothing was left behind")


if __name__ == "__main__":
    main()
