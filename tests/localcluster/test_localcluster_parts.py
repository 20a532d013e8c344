"""Parts of the local cluster that need no cluster: values, images, control groups, build cache, progress."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from kimi_localcluster import binaries, machine, packages, podenv, progress
from kimi_localcluster import cluster as cluster_module
from kimi_localcluster.cgroups import Cgroups
from kimi_localcluster.cluster import Cluster
from kimi_localcluster.errors import CommandError, LocalClusterError
from kimi_localcluster.images import Image, write_images
from kimi_localcluster.kube import Kube
from kimi_localcluster.node import is_heartbeat_after
from kimi_localcluster.paths import environment
from kimi_localcluster.pki import write_pki
from kimi_localcluster.progress import TICK_S, Progress, Step, format_seconds
from kimi_localcluster.shell import run, run_logged
from kimi_localcluster.spec import ClusterSpec, default_vram, gpu_labels
from rich.console import Console


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"name": "Upper"}, "cluster name 'Upper'"),
        ({"name": "a/b"}, "cluster name 'a/b'"),
        ({"name": "x" * 41}, "at most 40"),
        ({"num_nodes": 0}, "nodes: got 0"),
        ({"num_nodes": 33}, "expected 1 to 32"),
        ({"gpus_per_node": -1}, "gpus: got -1"),
        ({"device_id": "MI300X"}, "device-id: got 'MI300X'"),
        ({"vram": "192Gi"}, "vram: got '192Gi'"),
        ({"folders": (("/nowhere", "/mnt/x"),)}, "'/nowhere' for the nodes' /mnt/x: not a folder"),
        ({"folders": (("/usr", "x/y/z"),)}, "expected an absolute path"),
    ],
)
def test_impossible_values_are_refused(values: dict[str, object], complaint: str) -> None:
    with pytest.raises(LocalClusterError, match=complaint):
        ClusterSpec(**values)  # type: ignore[arg-type]


def test_spec_survives_its_file(tmp_path: Path) -> None:
    spec = ClusterSpec("a", 2, 4, "74a5", "256G", ("x:1", "y:2"), (("/usr", "/mnt/usr"),))
    spec.write(tmp_path / "spec")
    assert ClusterSpec.read(tmp_path / "spec") == spec


def test_labels_are_those_of_amds_labeller() -> None:
    labels = gpu_labels(ClusterSpec(device_id="74a5", vram="256G"))
    assert labels["amd.com/gpu.device-id"] == "74a5"
    assert labels["amd.com/gpu.cu-count"] == "304"
    assert labels["amd.com/gpu.product-name"] == "AMD_Instinct_MI325X"
    assert labels["beta.amd.com/gpu.vram.256G"] == "8"
    assert "amd.com/gpu.product-name" not in gpu_labels(ClusterSpec(device_id="ffff"))
    assert gpu_labels(ClusterSpec(gpus_per_node=0)) == {}
    assert (default_vram("74a5"), default_vram("ffff")) == ("256G", "192G")


def test_image_has_mount_points_that_any_user_can_pass(tmp_path: Path) -> None:
    program = tmp_path / "pause"
    program.write_text("static")
    image = Image(("a/b:1", "a/c:1"), ("/pause",), "/env/bin:/usr/bin", program)
    write_images(tmp_path / "images.tar", [image], [Path("/root/.cache/pods")])
    with tarfile.open(tmp_path / "images.tar") as archive:
        files = {name: archive.extractfile(name).read() for name in archive.getnames()}  # type: ignore[union-attr]
    (entry,) = json.loads(files["manifest.json"])
    assert entry["RepoTags"] == ["a/b:1", "a/c:1"]
    assert json.loads(files[entry["Config"]])["config"]["Env"] == ["PATH=/env/bin:/usr/bin"]
    with tarfile.open(fileobj=io.BytesIO(files[entry["Layers"][0]])) as layer:
        members = {member.name: member for member in layer}
    assert {members[path].mode for path in ("root", "root/.cache", "root/.cache/pods")} == {0o755}
    assert members["tmp"].mode == 0o1777
    assert members["home/nonroot"].uid == 65532
    assert "pause" in members


def fake_v1(root: Path) -> Path:
    for controller in ("cpu", "cpuset", "pids"):
        (root / controller).mkdir(parents=True)
        (root / controller / "cgroup.procs").touch()
    for file in ("cpuset.cpus", "cpuset.mems"):
        (root / "cpuset" / file).write_text("0-1\n")
    (root / "cpuacct").symlink_to("cpu")
    return root


def test_v1_groups_are_made_in_each_hierarchy_with_cpus(tmp_path: Path) -> None:
    cgroups = Cgroups("a", fake_v1(tmp_path))
    cgroups.create(num_nodes=2)
    assert not cgroups.is_v2
    assert len(cgroups.hierarchies()) == 3
    for group in ("kimi-a/system", "kimi-a/node0", "kimi-a/node1"):
        assert all((tmp_path / controller / group).is_dir() for controller in ("cpu", "cpuset", "pids"))
        assert (tmp_path / "cpuset" / group / "cpuset.cpus").read_text() == "0-1\n"
    cgroups.join_system()
    assert not (tmp_path / "pids/kimi-a/system/cgroup.procs").exists()
    assert (tmp_path / "cpu/kimi-a/system/cgroup.procs").read_text() == "0"


def test_v2_groups_get_the_controllers_of_their_parent(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("cpu memory pids\n")
    (tmp_path / "cgroup.subtree_control").write_text("cpu\n")
    top = tmp_path / "kimi-a"
    top.mkdir()
    (top / "cgroup.controllers").write_text("cpu memory pids\n")
    (top / "cgroup.subtree_control").write_text("cpu memory pids\n")
    cgroups = Cgroups("a", tmp_path)
    cgroups.create(num_nodes=1)
    assert cgroups.is_v2
    assert (tmp_path / "cgroup.subtree_control").read_text() == "+memory +pids"
    assert (top / "cgroup.subtree_control").read_text() == "cpu memory pids\n", "nothing is missing there"
    assert (top / "node0").is_dir()
    assert cgroups.kubelet_root(0) == "/kimi-a/node0"


def test_groups_that_stay_busy_are_reported(tmp_path: Path) -> None:
    cgroups = Cgroups("a", fake_v1(tmp_path))
    (tmp_path / "pids/kimi-a/node0").mkdir(parents=True)
    (tmp_path / "pids/kimi-a/node0/file").touch()
    with pytest.raises(LocalClusterError, match="cannot be removed"):
        cgroups.remove(deadline_s=0.1)
    (tmp_path / "pids/kimi-a/node0/file").unlink()
    cgroups.remove(deadline_s=1)
    assert cgroups.groups() == []


def test_machine_without_cgroups_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LocalClusterError, match="no cgroup hierarchy is mounted"):
        Cgroups("a", tmp_path).create(num_nodes=1)


def test_certificates_verify_and_name_the_api_server(tmp_path: Path) -> None:
    write_pki(tmp_path / "pki", ClusterSpec(num_nodes=2))
    verify = ["openssl", "verify", "-CAfile", str(tmp_path / "pki/ca.crt")]
    run([*verify, "-verify_ip", "10.96.0.1", str(tmp_path / "pki/apiserver.crt")])
    run([*verify, "-purpose", "sslclient", str(tmp_path / "pki/kubelet-client.crt")])
    tokens = (tmp_path / "pki/tokens.csv").read_text()
    assert ',system:node:node1,node1,"system:nodes"\n' in tokens
    assert (tmp_path / "pki/node1.kubeconfig").stat().st_mode & 0o077 == 0


def test_cache_key_changes_with_module_flags_and_go_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binaries, "go_modules", lambda: tmp_path)
    (tmp_path / "m").mkdir()
    for file in ("go.mod", "go.sum", "main.go"):
        (tmp_path / "m" / file).write_text(file)
    program = binaries.Program("p", "m", ".", 1)
    first = binaries.cache_path(program, "go1")
    assert binaries.cache_path(program, "go1") == first
    assert binaries.cache_path(program, "go2") != first
    assert binaries.cache_path(binaries.Program("p", "m", ".", 1, "-X a=b"), "go1") != first
    (tmp_path / "m/main.go").write_text("changed")
    assert binaries.cache_path(program, "go1") != first


def test_failing_build_names_the_program_the_log_and_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBEBUILDER_ASSETS", raising=False)
    # Not XDG_CACHE_HOME, which would make Go compile its own library anew.
    monkeypatch.setattr(binaries, "cache_dir", lambda: tmp_path / "cache")
    monkeypatch.setattr(binaries, "go_modules", lambda: tmp_path)
    (tmp_path / "pause").mkdir()
    (tmp_path / "pause/go.mod").write_text("module m\n\ngo 1.26.0\n")
    (tmp_path / "pause/go.sum").touch()
    (tmp_path / "pause/main.go").write_text("package main\n\nfunc main() { undefinedThing() }\n")
    with pytest.raises(LocalClusterError, match=r"building pause[\s\S]*build-pause.log[\s\S]*undefinedThing"):
        binaries.ensure_programs(("pause",), Progress(Console(file=io.StringIO())))
    with pytest.raises(LocalClusterError, match="unknown program 'nope'"):
        binaries.ensure_programs(("nope",), Progress(Console(file=io.StringIO())))


@pytest.mark.parametrize(("home", "hidden"), [("/tmp/home", "/tmp"), ("/run/user/0", "/run")])
def test_a_cache_that_pods_cannot_see_is_refused(home: str, hidden: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", home)
    with pytest.raises(LocalClusterError, match=f"{home}/kimi-operator lies below {hidden}, .*XDG_CACHE_HOME"):
        podenv.check_place()
    monkeypatch.setenv("XDG_CACHE_HOME", "/srv/cache")
    podenv.check_place()


def test_kubebuilder_assets_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "etcd").touch()
    monkeypatch.setenv("KUBEBUILDER_ASSETS", str(tmp_path))
    assert binaries.find("etcd") == tmp_path / "etcd"
    monkeypatch.setenv("KUBEBUILDER_ASSETS", str(tmp_path / "nowhere"))
    with pytest.raises(LocalClusterError, match="is not a folder"):
        binaries.find("etcd")


def test_pod_sources_are_the_packages_without_caches(tmp_path: Path) -> None:
    for file in ("operator/a.py", "worker/w/__pycache__/b.pyc", "worker/w/b.py", "tests/c.py"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    assert [str(path.relative_to(tmp_path)) for path in podenv.source_files(tmp_path)] == [
        "operator/a.py",
        "worker/w/b.py",
    ]


def test_old_pod_environments_go_unless_a_cluster_uses_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(podenv, "pods_dir", lambda: tmp_path)
    for age, name in enumerate(["used", "old", *(f"recent{n}" for n in range(podenv.KEEP_RECENT))]):
        (tmp_path / name).mkdir()
        podenv.os.utime(tmp_path / name, (age, age))
    podenv.remove_old({f"{tmp_path}/used/venv/bin:/usr/bin"})
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == [
        *(f"recent{n}" for n in range(podenv.KEEP_RECENT)),
        "used",
    ]


def test_log_progress_is_never_silent_for_two_seconds() -> None:
    output = io.StringIO()
    with Progress(Console(file=output)).step("Long", expected_s=5):
        deadline = time.monotonic() + 10
        while output.getvalue().count(".") < 4 and time.monotonic() < deadline:
            time.sleep(0.05)
    assert TICK_S < 2
    assert re.match(r"Long \(\d\.\d s of about 5\.0 s\) \.", output.getvalue())
    assert "Long: done in" in output.getvalue()


TIMES = {
    250: "Build (4 min 10 s of about 5 min 0 s)",
    310: "Build (5 min 10 s, usually about 5 min 0 s on 2 idle cores)",
    1560: "Build (slower than usual: 26 min 0 s, usually about 5 min 0 s on 2 idle cores)",
}


@pytest.mark.parametrize(("elapsed_s", "line"), TIMES.items())
def test_a_step_that_overruns_its_estimate_says_so(
    monkeypatch: pytest.MonkeyPatch, elapsed_s: float, line: str
) -> None:
    now_s = 1000.0
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now_s))
    step = Step("Build", 300)
    now_s += elapsed_s
    assert step.line() == line
    step.note("downloading")
    assert step.line() == f"{line} - downloading"
    is_slow = elapsed_s > 1000
    assert step.end("done").endswith(", usually about 5 min 0 s on 2 idle cores") == is_slow


def test_a_step_without_an_estimate_promises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now_s))
    step = Step("Wait", None)
    now_s += 90
    assert (step.line(), step.end("done")) == ("Wait (90 s)", "Wait: done in 90 s")


def test_progress_says_that_a_step_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: 1000.0))
    output = io.StringIO()
    with pytest.raises(ValueError, match="no"), Progress(Console(file=output)).step("Short"):
        raise ValueError("no")
    assert output.getvalue().endswith("Short: failed in 0.0 s\n")


@pytest.mark.parametrize(("seconds", "text"), [(7.26, "7.3 s"), (48.4, "48 s"), (245, "4 min 5 s")])
def test_seconds_for_people(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_failed_command_carries_its_output() -> None:
    with pytest.raises(CommandError, match="status 3: on stderr") as caught:
        run(["sh", "-c", "echo on stderr >&2; exit 3"])
    assert caught.value.returncode == 3
    with pytest.raises(LocalClusterError, match="did not end within"):
        run(["sleep", "10"], timeout_s=0.1)
    with pytest.raises(LocalClusterError, match="program nonesuch not found"):
        run(["nonesuch"])


def test_long_command_ends_with_its_caller(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path; from kimi_localcluster.shell import run_logged;"
        f"run_logged(['sh', '-c', 'echo $$; exec sleep 1000'], Path({str(tmp_path / 'log')!r}), what='w', hint='h')"
    )
    caller = subprocess.Popen([sys.executable, "-c", code])
    log = tmp_path / "log"
    deadline = time.monotonic() + 20
    while not (log.exists() and log.read_text().strip()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    sleeper = Path("/proc") / log.read_text().strip()
    assert sleeper.exists()
    caller.kill()
    caller.wait()
    while sleeper.exists():
        assert time.monotonic() < deadline, "sleep outlived its caller"
        time.sleep(0.02)


def test_failed_long_command_says_what_where_and_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(LocalClusterError, match=r"the thing failed[\s\S]*log[\s\S]*went wrong[\s\S]*do this"):
        run_logged(["sh", "-c", "echo went wrong; exit 1"], tmp_path / "log", what="the thing", hint="do this")


def test_heartbeat_is_compared_in_whole_seconds() -> None:
    status = {"conditions": [{"type": "Ready", "lastHeartbeatTime": "1970-01-01T00:01:40Z"}]}
    assert is_heartbeat_after(status, 100.9)
    assert not is_heartbeat_after(status, 101.0)
    assert not is_heartbeat_after({}, 0)


class Here(Kube):
    """Runs commands on this machine, to try the waiting without a cluster."""

    def command(self, argv, node=None):  # type: ignore[no-untyped-def]
        return list(argv)

    def command_env(self) -> dict[str, str]:
        return {"PATH": "/usr/bin:/bin"}


def test_wait_for_reports_the_last_look() -> None:
    looks = iter([None, CommandError(["x"], 1, "not yet"), "there"])

    def look() -> str | None:
        result = next(looks)
        if isinstance(result, CommandError):
            raise result
        return result

    assert Here().wait_for("a thing", look, timeout_s=5) == "there"
    with pytest.raises(LocalClusterError, match=r"a thing: not seen within 0 s; last look: \[\]"):
        Here().wait_for("a thing", list, timeout_s=0)


SILENT_TEST = """
import sys
from pathlib import Path
sys.path.insert(0, {folder!r})
from test_localcluster_parts import Here
from kimi_localcluster.testing import telling

def test_silent(request):
    here, told = Here(), Path({told!r})
    with telling(here, request.config.pluginmanager.getplugin("capturemanager"), every_s=0.2):
        here.wait_for("words", lambda: here.exec(["sleep", "0.3"]) and "words" in told.read_text(), timeout_s=60)
        here.exec(["sh", "-c", "true;\\nuntil grep -q 'running sh' $0; do sleep 0.1; done", str(told)])
        print("kept until the test fails")
"""


@pytest.mark.parametrize("workers", [[], ["-n", "1"]])
def test_a_test_that_waits_says_for_what_past_pytests_capture(tmp_path: Path, workers: list[str]) -> None:
    """Also from a worker of `pytest -n`; a look's own commands are not told in place of what is awaited."""
    told = tmp_path / "told"
    (tmp_path / "test_it.py").write_text(SILENT_TEST.format(folder=str(Path(__file__).parent), told=str(told)))
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *workers, "--rootdir", str(tmp_path)]
    with told.open("w") as stderr:
        done = subprocess.run(
            [*argv, str(tmp_path)], stdout=subprocess.PIPE, stderr=stderr, text=True, timeout=120, check=False
        )
    assert done.returncode == 0, done.stdout + told.read_text()
    steps = {line.rpartition(" (")[0] for line in told.read_text().splitlines()}
    assert "test_silent (call): waiting for words" in steps
    assert any(step.startswith("test_silent (call): running sh -c true; until grep") for step in steps)
    assert not any("running sleep" in step for step in steps)
    assert "kept" not in done.stdout + told.read_text()


def test_command_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    pid, limit_s = tmp_path / "child", 0.25
    while not (pid.exists() and pid.read_text()):
        limit_s *= 2  # a busy machine had not started the shell in the time before
        with pytest.raises(LocalClusterError, match="did not end within"):
            Here().exec(["sh", "-c", f"sleep 1000 & echo $! > {pid}; wait"], timeout_s=limit_s)
    child = int(pid.read_text())
    deadline = time.monotonic() + 60
    while Path(f"/proc/{child}").exists() and "Z" not in Path(f"/proc/{child}/stat").read_text().split()[2]:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_missing_packages_are_named_where_they_cannot_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "PROOFS", {"the-package": "the-program", "coreutils": "ls", "base": "/etc/passwd"})
    monkeypatch.setattr(packages.os, "geteuid", lambda: 1000)
    assert packages.missing_packages() == ["the-package"]
    with pytest.raises(LocalClusterError, match=r"missing: the-program; install .* the-package"):
        packages.ensure_packages(Progress(Console(file=io.StringIO())))


def test_only_root_may_start_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.os, "geteuid", lambda: 1000)
    with pytest.raises(LocalClusterError, match="needs root"):
        machine.check_machine()


NOT_RUNNING = "cluster absent is not running; start it with `localcluster up --name absent`"
WRONG_USES = {
    "nope": (2, 'Unknown command "nope".'),
    "node explode 1": (2, "Available commands: partition, heal, kill, restart. See `localcluster node --help`."),
    "node kill": (2, "requires an argument. See `localcluster node kill --help`."),
    "node kill x": (2, 'unable to convert "x" into int. See `localcluster node kill --help`.'),
    "component break etcd": (2, 'Choose from: "stop", "start".'),
    "up absent": (2, "Unused Tokens: ['absent']. See `localcluster up --help`."),
    "up --name one --name two": (2, "Parameter --name specified multiple times."),
    "up --name A/B": (1, "cluster name 'A/B': expected at most 40 lower-case letters"),
    "up --nodes 0": (1, "nodes: got 0, expected 1 to 32"),
    "up --folder /usr": (1, "expected an absolute path such as /opt/models"),
    "exec --name absent": (1, "exec needs a command: localcluster exec [--node N] -- CMD..."),
    "exec --name absent -- true": (1, NOT_RUNNING),
    "kubectl --name absent get pods": (1, NOT_RUNNING),
    "status --name absent": (1, NOT_RUNNING),
    "node partition 1 --name absent": (1, NOT_RUNNING),
    "node restart 1 --name absent": (1, NOT_RUNNING),
    "apiserver stop --name absent": (1, NOT_RUNNING),
    "kubeconfig --name absent": (1, NOT_RUNNING),
    "logs etcd --name absent": (1, "no log of 'etcd'; cluster absent has not run here"),
    "logs etcd --tail -1": (1, "tail: got -1, expected a number of lines, 0 or more"),
    "down --name absent": (0, "Cluster absent is not running, there is nothing to end."),
    "down --name ..": (1, "cluster name '..': expected"),
    "down --name ../bin": (1, "cluster name '../bin': expected"),
    "down --name=": (1, "cluster name '': expected"),
}


@pytest.mark.parametrize("words", WRONG_USES)
def test_a_wrong_use_of_the_command_is_told_in_one_line(tmp_path: Path, words: str) -> None:
    """And nothing is touched: what lies beside the clusters must not go by a name that leads there."""
    built = tmp_path / "kimi-operator/bin/etcd"
    built.parent.mkdir(parents=True)
    built.touch()
    argv = [sys.executable, "-m", "kimi_localcluster", *words.split()]
    env = environment(XDG_CACHE_HOME=str(tmp_path), KUBECONFIG="/nowhere")
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60, check=False)
    status, what = WRONG_USES[words]
    assert (done.returncode, done.stdout) == (status, ""), done.stderr
    assert what in done.stderr
    assert done.stderr.count("\n") == 1
    assert built.exists()


def test_a_command_needs_a_folder_to_run_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    monkeypatch.setattr(cluster_module, "control_process", lambda _: 1)
    with pytest.raises(LocalClusterError, match="working folder has been removed"):
        Cluster("absent").command(["true"])


@pytest.mark.parametrize("kubeconfig", ["/nowhere", "/etc"])
def test_the_demo_names_a_kubeconfig_that_is_none(kubeconfig: str) -> None:
    demo = Path(__file__).parents[2] / "examples/local/demo.py"
    env = environment(KUBECONFIG=kubeconfig)
    done = subprocess.run([sys.executable, str(demo)], env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr == f"demo failed: kubeconfig {kubeconfig} is not a file; correct KUBECONFIG or unset it\n"
