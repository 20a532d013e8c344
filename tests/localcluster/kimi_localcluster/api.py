"""The few API calls that the cluster's own processes make, without a client library or a kubectl process each."""

from __future__ import annotations

import http.client
import json
import ssl
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml


class ApiError(Exception):
    """The API server refused a request or is not there (status 0)."""

    def __init__(self, status: int, text: str) -> None:
        self.status = status
        super().__init__(f"{status}: {text}")


class Api:
    """Requests with the identity of one kubeconfig that `pki` wrote. Blocking; a connection a call."""

    def __init__(self, kubeconfig: Path) -> None:
        config = yaml.safe_load(kubeconfig.read_text())
        cluster = config["clusters"][0]["cluster"]
        self._host = urlsplit(cluster["server"])
        self._tls = ssl.create_default_context(cafile=cluster["certificate-authority"])
        self._token = config["users"][0]["user"]["token"]

    def call(self, method: str, path: str, body: object = None, content_type: str = "application/json") -> Any:
        """Parsed answer, or its text where it is not JSON. Raises ApiError."""
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": content_type}
        data = None if body is None else json.dumps(body)
        connection = http.client.HTTPSConnection(
            self._host.hostname or "", self._host.port, context=self._tls, timeout=5
        )
        try:
            connection.request(method, path, data, headers)
            response = connection.getresponse()
            text = response.read().decode()
        except (OSError, http.client.HTTPException) as error:
            raise ApiError(0, str(error)) from error
        finally:
            connection.close()
        if response.status >= 300:
            raise ApiError(response.status, text)
        return json.loads(text) if text.startswith(("{", "[")) else text
