"""`python -m kimi_operator.upgrade`: applies the CRDs of this version. The chart runs it before an upgrade.

Helm itself never changes a CRD that is there.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from kubernetes.aio import client
from kubernetes.aio.client.exceptions import ApiException
from kubernetes.aio.dynamic import DynamicClient
from kubernetes.aio.dynamic.resource import Resource

from kimi_operator.api.crd import all_crds
from kimi_operator.cluster import connect
from kimi_operator.errors import ClusterUnavailable, KimiError
from kimi_operator.settings import OperatorSettings

FIELD_MANAGER = "kimi-operator-crds"
REQUEST_TIMEOUT_S = 30.0
CRD = Resource(
    prefix="apis", group="apiextensions.k8s.io", api_version="v1", kind="CustomResourceDefinition", namespaced=False,
    name="customresourcedefinitions", verbs=[],
)  # fmt: skip


async def apply_crds(api: client.ApiClient) -> list[str]:
    """Make the cluster's CRDs those of this version; returns their names. Raises ClusterUnavailable."""
    dynamic = DynamicClient(api)
    applied = []
    for crd in all_crds():
        name = crd["metadata"]["name"]
        try:
            await dynamic.server_side_apply(
                CRD, crd, name=name, field_manager=FIELD_MANAGER, force_conflicts=True,
                serializer=_plain, _request_timeout=REQUEST_TIMEOUT_S,
            )  # fmt: skip
        except ApiException as error:
            raise ClusterUnavailable(f"CustomResourceDefinition {name}: {error.status} {error.body}") from error
        except (OSError, TimeoutError) as error:
            raise ClusterUnavailable(f"CustomResourceDefinition {name}: no answer: {error!r}") from error
        applied.append(name)
    return applied


async def _run() -> list[str]:
    async with await connect(OperatorSettings().kubeconfig) as api:
        return await apply_crds(api)


def _plain(_: object, document: Any) -> Any:
    return document


def main() -> int:
    """The program; its exit status."""
    try:
        names = asyncio.run(_run())
    except KimiError as error:
        sys.stderr.write(f"kimi-operator upgrade: {error}\n")
        return 1
    sys.stdout.write("".join(f"applied {name}\n" for name in names))
    return 0


if __name__ == "__main__":
    sys.exit(main())
