"""What may be written: only what can never work is refused, and nothing that was there before."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from kimi_operator.admission import Answer, Verdict, judge, read_request
from kimi_operator.api.base import parse
from kimi_operator.api.profile import HardwareProfile
from kimi_operator.desire import Profiles
from kimi_operator.errors import InvalidSpec
from kimi_operator.observe import NodeSeen
from stage import Document, example

TOO_LARGE = {"spec.model.architecture": "kimi-k3"}
"""On GPUs of 64 MiB."""
SHORTER = {"spec.model.maxModelLen": 4096}


def profiles(**changes: Any) -> Profiles:
    """That of the local example; `changes` of its spec's GPU."""
    document = example("profile.yaml")
    document["spec"]["gpu"] |= changes
    document["spec"]["match"] = {"deviceIds": ["74a1"]}
    return Profiles({"local-cpu": parse(HardwareProfile, document, "profile")}, {"broken": "broken: no memory"})


def deployment(changes: dict[str, Any] | None = None) -> Document:
    """The local example with fields changed by path; None takes one away."""
    document = copy.deepcopy(example("2p2d.yaml"))
    for path, value in (changes or {}).items():
        *parents, last = path.split(".")
        place = document
        for name in parents:
            place = place.setdefault(name, {})
        place[last] = copy.deepcopy(value)
        if value is None:
            del place[last]
    return document


def review(new: Document | None, old: Document | None = None, **fields: Any) -> Document:
    """As the API server asks, of version 1.35."""
    operation = "CREATE" if old is None else "UPDATE"
    request = {
        "uid": "705ab4f5", "kind": {"group": "kimi-operator.io", "version": "v1alpha1", "kind": "KimiDeployment"},
        "resource": {"group": "kimi-operator.io", "version": "v1alpha1", "resource": "kimideployments"},
        "name": "k3", "namespace": "ns", "operation": operation, "userInfo": {"username": "admin"}, "object": new,
        "oldObject": old, "dryRun": False, "options": {"kind": "CreateOptions"},
    }  # fmt: skip
    return {"kind": "AdmissionReview", "apiVersion": "admission.k8s.io/v1", "request": request | fields}


def decide(new: Document | None, old: Document | None = None, known: Profiles | None = None, **fields: Any) -> Verdict:
    nodes = [NodeSeen("node0", labels={"amd.com/gpu.device-id": "74a1"})]
    return judge(read_request(review(new, old, **fields)), known or profiles(), nodes)


def test_what_fits_is_allowed_without_a_word() -> None:
    assert decide(deployment()) == Verdict(Answer.ALLOWED)
    assert decide(deployment(), deployment({"spec.prefill.maxNumSeqs": 4})) == Verdict(Answer.ALLOWED)


def test_a_profile_that_the_nodes_name_counts_too() -> None:
    assert decide(deployment({"spec.hardware": None})) == Verdict(Answer.ALLOWED)
    assert decide(deployment({"spec.hardware": None} | TOO_LARGE)).answer is Answer.REFUSED


@pytest.mark.parametrize("is_new", [True, False])
def test_what_cannot_fit_is_refused_with_the_arithmetic(is_new: bool) -> None:
    verdict = decide(deployment(TOO_LARGE), None if is_new else deployment())
    assert verdict.answer is Answer.REFUSED
    for words in ("DoesNotFit: spec.prefill", "of weights +", "reserved +", "at most 64.0 MiB", "with more memory"):
        assert words in verdict.message, verdict.message
    answer = verdict.to_review("705ab4f5")
    assert answer["response"] == {
        "uid": "705ab4f5", "allowed": False, "status": {"code": 422, "reason": "Invalid", "message": verdict.message},
    }  # fmt: skip


def test_hardware_that_nobody_tried_is_warned_of() -> None:
    known = profiles(architecture="gfx1201")
    verdict = decide(deployment(), known=known)
    assert verdict.answer is Answer.WARNED
    assert "untested on local-cpu (gfx1201)" in verdict.message


def test_a_model_that_nobody_knows_is_refused_since_it_could_not_be_mended() -> None:
    verdict = decide(deployment({"spec.model.architecture": "kimi-k9"}))
    assert verdict.answer is Answer.REFUSED
    assert "kimi-k3" in verdict.message


MENDABLE = {
    "no such profile": ({"spec.hardware.profile": "mi999"}, "ProfileUnknown"),
    "a broken profile": ({"spec.hardware.profile": "broken"}, "no memory"),
    "what only another version knows": ({"spec.tomorrow": 1}, "spec.tomorrow"),
}


@pytest.mark.parametrize(("changes", "words"), MENDABLE.values(), ids=MENDABLE.keys())
def test_what_may_work_later_is_allowed_and_told(changes: dict[str, Any], words: str) -> None:
    verdict = decide(deployment(changes))
    assert verdict.answer is Answer.WARNED
    response = verdict.to_review("u")["response"]
    assert response["allowed"] is True
    assert words in response["warnings"][0]


def test_a_spec_that_stays_is_never_refused_though_it_fits_no_more() -> None:
    """A profile has changed, or the operator; finalizers and labels still come and go."""
    small = profiles(memory="40Mi")
    assert decide(deployment(), known=small).answer is Answer.REFUSED
    for changes in ({}, {"metadata.labels": {"a": "b"}}, {"metadata.finalizers": []}, {"status": {"url": "x"}}):
        assert decide(deployment(changes), deployment(), known=small) == Verdict(Answer.ALLOWED)


LONG = {"spec.workload": {"prompt": {"fixed": 1_000_000}, "output": {"fixed": 100}}}
EDITS = {
    "suspends": {"spec.suspend": True},
    "shrinks the service": {"spec.decode.groups": None, "spec.decode.maxNumSeqs": 2},
    "shrinks the longest request": SHORTER,
    "shrinks the workload": {"spec.workload.prompt.fixed": 900_000},
    "mends one shortage, and the next shows": {"spec.workload": None},
    "names another model": {"spec.model.architecture": "kimi-k8"},
    "lowers a limit": {"spec.prefill.maxNumSeqs": 1},
}
UNFIT = {
    "memory": {},
    "a workload": LONG,
    "both in the wrong order": TOO_LARGE | LONG,
    "an unknown model": LONG | {"spec.model.architecture": "kimi-k9"},
}


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("unfit", UNFIT)
def test_whoever_edits_what_could_not_run_before_is_let_and_told(unfit: str, edit: str) -> None:
    """A profile has changed, or the operator: whatever makes it less must pass, and nothing that works is at stake."""
    small, old = profiles(memory="40Mi"), deployment(LONG | UNFIT[unfit])
    new = deployment(LONG | UNFIT[unfit] | EDITS[edit])
    assert decide(old, known=small).answer is Answer.REFUSED
    verdict = decide(new, old, known=small)
    assert verdict.answer is Answer.WARNED, verdict
    assert "as before, this cannot run: " in verdict.message
    assert verdict.message.endswith(decide(new, known=small).message)


def test_an_edit_that_breaks_what_fits_is_refused_however_small() -> None:
    for changes in (TOO_LARGE, LONG, {"spec.model.architecture": "kimi-k9"}, {"spec.suspend": True} | TOO_LARGE):
        assert decide(deployment(changes), deployment()).answer is Answer.REFUSED


IRRELEVANT = {
    "deletion": {"operation": "DELETE"},
    "connect": {"operation": "CONNECT"},
    "status": {"subResource": "status"},
}


@pytest.mark.parametrize("fields", IRRELEVANT.values(), ids=IRRELEVANT.keys())
def test_nothing_else_is_ever_refused(fields: dict[str, str]) -> None:
    assert decide(deployment(TOO_LARGE), deployment(), **fields) == Verdict(Answer.ALLOWED)


def test_what_is_being_deleted_is_not_held_up() -> None:
    going = deployment(TOO_LARGE | {"metadata.deletionTimestamp": "2027-01-01T00:00:00Z"})
    assert decide(going, deployment()) == Verdict(Answer.ALLOWED)
    assert decide(None, deployment(), operation="DELETE") == Verdict(Answer.ALLOWED)


BAD = {
    "a list": ([], "the body: got list"),
    "another kind": ({"apiVersion": "v1", "kind": "Pod"}, "got v1 Pod, expected admission.k8s.io/v1 AdmissionReview"),
    "an old version": (
        {"apiVersion": "admission.k8s.io/v1beta1", "kind": "AdmissionReview"},
        "got admission.k8s.io/v1beta1 AdmissionReview",
    ),
    "no request": ({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview"}, "request: got nothing"),
    "no uid": (review(deployment(), uid=""), "request.uid"),
    "uid of a number": (review(deployment(), uid=7), "request.uid: got 7"),
    "another resource": (
        review(deployment(), kind={"group": "apps", "kind": "Deployment"}),
        "request.kind: got Deployment of apps, expected KimiDeployment of kimi-operator.io",
    ),
    "no object": (review(None), "request.object: got nothing, expected the object of CREATE"),
    "object of text": (review(deployment(), object="k3"), "request.object: got 'k3'"),
    "half a character": (review(deployment({"metadata.name": "\ud800"})), "object.metadata.name: got half a character"),
    "spec of a list": (review(deployment({"spec": []})), "an object of the API, whose spec is a map"),
}


@pytest.mark.parametrize(("body", "words"), BAD.values(), ids=BAD.keys())
def test_what_is_no_question_of_an_api_server_is_told_by_field(body: object, words: str) -> None:
    with pytest.raises(InvalidSpec) as refused:
        read_request(body)
    assert words in str(refused.value)


@pytest.mark.parametrize("part", ["hardware", "model", "prefill", "decode", "router"])
@pytest.mark.parametrize("value", [[], 7, "x", None, {"a": {"b": []}}])
def test_no_spec_whatever_breaks_the_decision(part: str, value: object) -> None:
    document = deployment()
    document["spec"][part] = value
    assert decide(document, deployment()).answer in tuple(Answer)
