"""Whether a local cluster can run on this machine at all."""

from __future__ import annotations

import os
import sys

from kimi_localcluster.errors import LocalClusterError
from kimi_localcluster.shell import UNSHARE, run


def check_machine() -> None:
    """Raise LocalClusterError where no local cluster can run."""
    if sys.platform != "linux":
        raise LocalClusterError(
            f"the local cluster needs Linux, this is {sys.platform}; use KUBECONFIG for another cluster"
        )
    if os.geteuid() != 0:
        raise LocalClusterError("the local cluster needs root for namespaces, mounts and cgroups; run it as root")
    try:
        run([*UNSHARE, "true"])
    except LocalClusterError as error:
        raise LocalClusterError(
            f"new namespaces cannot be made here: {error}; in a container, run it privileged"
        ) from error
