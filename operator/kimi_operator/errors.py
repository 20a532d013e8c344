"""Errors of the operator, sorted by who must act. No kopf here: the planner and kimictl import this."""

from __future__ import annotations

from msgspec import Struct


class KimiError(Exception):
    """Base of every error that this package raises on purpose."""


class Problem(Struct, frozen=True):
    """One thing that is wrong: `field` as the user wrote it, what it got, what was expected, what to do about it."""

    field: str
    got: str
    expected: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.field}: got {self.got}, expected {self.expected}; {self.remedy}"


class InvalidSpec(KimiError):  # noqa: N818 - named for what is wrong
    """The user must edit the resource, the profile or the command line; retrying cannot help."""

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        super().__init__("; ".join(str(problem) for problem in problems))
        self.problems = problems


class ResourceGone(KimiError):  # noqa: N818 - named for what is wrong
    """A KimiDeployment is deleted, or will be: nothing is left to do for it, and nobody has to act."""


class ClusterUnavailable(KimiError):  # noqa: N818 - named for what is wrong
    """The API server or a node is not answering; try again after `retry_after_s` seconds."""

    def __init__(self, message: str, retry_after_s: float = 5.0, *, is_answer: bool = False) -> None:
        """`is_answer`: the server did answer, about this one object; others may fare better."""
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.is_answer = is_answer
