"""Pure: whether a KimiDeployment may be written. Only what can never work is refused, where nothing of it was before.

Whatever happens here, the reconcile loop refuses the same by condition: nothing depends on being asked.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator
from pydantic.alias_generators import to_camel

from kimi_operator.api.base import GROUP, parse
from kimi_operator.api.conditions import Reason
from kimi_operator.desire import Planned, Profiles, plan_document
from kimi_operator.errors import InvalidSpec, Problem
from kimi_operator.look import Refusal
from kimi_operator.observe import NodeSeen
from kimi_operator.store import Document

API_VERSION = "admission.k8s.io/v1"
KIND = "AdmissionReview"
MAX_WARNING = 1024
"""Characters; the API server drops the warnings of an answer beyond 4,096."""

REFUSED = frozenset({Reason.DOES_NOT_FIT, Reason.ARCHITECTURE_UNKNOWN})
"""Neither can be mended by what is applied later; a profile that is not there yet can."""


class Answer(StrEnum):
    """What became of a request."""

    ALLOWED = "allowed"
    WARNED = "warned"
    REFUSED = "refused"


class _Part(BaseModel):
    # Newer API servers may say more.
    model_config = ConfigDict(alias_generator=to_camel, extra="ignore", frozen=True, strict=True)


class _Kind(_Part):
    group: str
    kind: str


class Request(_Part):
    """What the API server asks about."""

    uid: str = Field(min_length=1)
    kind: _Kind
    operation: str
    sub_resource: str = ""
    object: dict[str, Any] | None = None
    old_object: dict[str, Any] | None = None

    @field_validator("object", "old_object")
    @classmethod
    def _is_an_object(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        for part in ("metadata", "spec", "status"):
            if value is not None and not isinstance(value.get(part, {}), dict):
                raise ValueError(f"an object of the API, whose {part} is a map")
        return value

    @property
    def is_relevant(self) -> bool:
        """Whether a spec comes that was not there before; never true for what is being deleted."""
        if self.operation not in ("CREATE", "UPDATE") or self.sub_resource or self.object is None:
            return False
        if self.object.get("metadata", {}).get("deletionTimestamp"):
            return False
        return self.old_object is None or self.old_object.get("spec") != self.object.get("spec")

    @property
    def documents(self) -> tuple[Document, ...]:
        """The object as it is to be, and as it is."""
        return tuple(one for one in (self.object, self.old_object) if one is not None)


class _Review(_Part):
    api_version: str
    kind: str
    request: Request


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer, with what is said to the user."""

    answer: Answer
    message: str = ""

    def to_review(self, uid: str) -> dict[str, Any]:
        """As an AdmissionReview."""
        response: dict[str, Any] = {"uid": uid, "allowed": self.answer is not Answer.REFUSED}
        if self.answer is Answer.REFUSED:
            response["status"] = {"code": 422, "reason": "Invalid", "message": self.message}
        elif self.answer is Answer.WARNED:
            response["warnings"] = [self.message[:MAX_WARNING]]
        return {"apiVersion": API_VERSION, "kind": KIND, "response": response}


ALLOWED = Verdict(Answer.ALLOWED)


def read_request(review: object) -> Request:
    """The request of an AdmissionReview. Raises InvalidSpec that names each field that is wrong."""
    if not isinstance(review, Mapping):
        raise InvalidSpec((_problem("the body", type(review).__name__, f"a JSON object, an {KIND}"),))
    got = str(review.get("apiVersion")), str(review.get("kind"))
    if got != (API_VERSION, KIND):
        raise InvalidSpec((_problem("apiVersion and kind", " ".join(got), f"{API_VERSION} {KIND}"),))
    request = parse(_Review, review).request
    if (request.kind.group, request.kind.kind) != (GROUP, "KimiDeployment"):
        got_kind = f"{request.kind.kind} of {request.kind.group}"
        raise InvalidSpec((_problem("request.kind", got_kind, f"KimiDeployment of {GROUP}"),))
    if request.operation in ("CREATE", "UPDATE") and request.object is None:
        raise InvalidSpec((_problem("request.object", "nothing", f"the object of {request.operation}"),))
    return request


def judge(request: Request, profiles: Profiles, nodes: Collection[NodeSeen]) -> Verdict:
    """Whether the API server may take the object."""
    if not request.is_relevant or request.object is None:
        return ALLOWED
    found = plan_document(request.object, profiles, nodes)
    if isinstance(found, Planned):
        return Verdict(Answer.WARNED, "; ".join(found.plan.warnings)) if found.plan.warnings else ALLOWED
    if found.reason not in REFUSED:
        return Verdict(Answer.WARNED, f"{found.reason}: {found.message}")
    if _could_not_before(request, profiles, nodes):
        # Nothing that works is at stake, and whoever suspends, shrinks or mends step by step must be let: numbers and
        # fields of a shortage differ from step to step, and one may have hidden the next.
        return Verdict(Answer.WARNED, f"as before, this cannot run: {found.reason}: {found.message}")
    return Verdict(Answer.REFUSED, f"{found.reason}: {found.message}")


def _could_not_before(request: Request, profiles: Profiles, nodes: Iterable[NodeSeen]) -> bool:
    if request.old_object is None:
        return False
    before = plan_document(request.old_object, profiles, nodes)
    return isinstance(before, Refusal) and before.reason in REFUSED


def _problem(field: str, got: str, expected: str) -> Problem:
    return Problem(field, got, expected, "let only the API server call this, by the chart's webhook configuration")
