"""Certificates, tokens and kubeconfigs of a cluster.

Clients use bearer tokens, which saves a certificate each; only the API server has certificates: one to serve with, one
to call kubelets with, and a key pair that signs service account tokens.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path

import yaml

from kimi_localcluster.shell import run
from kimi_localcluster.spec import API_SERVER, CONTROL_IP, KUBERNETES_SERVICE_IP, ClusterSpec

DAYS_VALID = "3650"
SERVER_NAMES = (
    f"IP:{CONTROL_IP},IP:127.0.0.1,IP:{KUBERNETES_SERVICE_IP},DNS:localhost,DNS:kubernetes,DNS:kubernetes.default,"
    "DNS:kubernetes.default.svc,DNS:kubernetes.default.svc.cluster.local"
)


@dataclass(frozen=True, slots=True)
class User:
    """A client of the API server; `key` names its kubeconfig."""

    key: str
    user: str
    group: str = ""


def users(spec: ClusterSpec) -> list[User]:
    return [
        User("admin", "admin", "system:masters"),
        User("controller-manager", "system:kube-controller-manager"),
        User("scheduler", "system:kube-scheduler"),
        User("proxy", "system:kube-proxy"),
        User("coredns", "system:coredns"),
        *(User(name, f"system:node:{name}", "system:nodes") for name in spec.node_names),
    ]


def write_pki(folder: Path, spec: ClusterSpec) -> None:
    """Fill a new folder: ca, apiserver, kubelet-client and service-account keys, tokens.csv, and KEY.kubeconfig."""
    folder.mkdir(mode=0o700)
    ca_key, ca_cert = folder / "ca.key", folder / "ca.crt"
    _make_key(ca_key)
    subject = ["-subj", "/CN=localcluster-ca", "-days", DAYS_VALID]
    run(["openssl", "req", "-x509", "-new", "-key", str(ca_key), "-out", str(ca_cert), *subject])
    _sign(folder, "apiserver", "/CN=kube-apiserver", f"subjectAltName={SERVER_NAMES}")
    _sign(folder, "kubelet-client", "/O=system:masters/CN=kube-apiserver-kubelet-client", "extendedKeyUsage=clientAuth")
    _make_key(folder / "service-account.key")
    private, public = (folder / f"service-account.{suffix}" for suffix in ("key", "pub"))
    run(["openssl", "pkey", "-in", str(private), "-pubout", "-out", str(public)])
    lines = []
    for user in users(spec):
        token = secrets.token_hex(16)
        lines.append(f'{token},{user.user},{user.key},"{user.group}"\n')
        _write_kubeconfig(folder / f"{user.key}.kubeconfig", ca_cert, user.key, token)
    (folder / "tokens.csv").write_text("".join(lines))


def _make_key(path: Path) -> None:
    run(["openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", str(path)])


def _sign(folder: Path, name: str, subject: str, extension: str) -> None:
    """Make NAME.key and NAME.crt, signed by the folder's CA."""
    key, request, cert = (folder / f"{name}.{suffix}" for suffix in ("key", "csr", "crt"))
    _make_key(key)
    run(["openssl", "req", "-new", "-key", str(key), "-out", str(request), "-subj", subject])
    authority = ["-CA", str(folder / "ca.crt"), "-CAkey", str(folder / "ca.key"), "-CAcreateserial"]
    argv = ["openssl", "x509", "-req", "-in", str(request), "-out", str(cert), "-days", DAYS_VALID, *authority]
    run([*argv, "-extfile", "/dev/stdin"], stdin=extension)


def _write_kubeconfig(path: Path, ca_cert: Path, user: str, token: str) -> None:
    name = "localcluster"
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": name, "cluster": {"server": API_SERVER, "certificate-authority": str(ca_cert)}}],
        "users": [{"name": user, "user": {"token": token}}],
        "contexts": [{"name": name, "context": {"cluster": name, "user": user}}],
        "current-context": name,
    }
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    path.chmod(0o600)
