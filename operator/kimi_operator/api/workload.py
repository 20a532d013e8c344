"""What a service is asked to do: lengths of prompts and answers, reuse, targets, and how many requests at once.

The same in `spec.workload` of a KimiDeployment and in a file for `kimictl plan --workload`.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field, WithJsonSchema

from kimi_operator.api.base import ApiModel, rule, rules
from kimi_operator.numerals import whole

MAX_TOKENS = 16_777_216
MAX_OBSERVED = 100_000
"""Observed lengths in a file; an object of the API holds fewer."""
MAX_OBSERVED_IN_CLUSTER = 1024
MAX_CONCURRENCY = 1_000_000
ONE_DISTRIBUTION = "exactly one of fixed, uniform, logNormal, empirical"

Tokens = Annotated[int, Field(ge=1, le=MAX_TOKENS)]
# A CRD's schema has no number for an open bound: a rule says it.
Share = Annotated[float, Field(ge=0, lt=1), WithJsonSchema({"type": "number", "minimum": 0, "maximum": 1})]


class Uniform(ApiModel):
    """Any length between two, equally likely."""

    model_config = ConfigDict(json_schema_extra=rules(rule("self.min <= self.max", "min must not be above max")))

    min: Tokens = Field(description="Shortest, in tokens.")
    max: Tokens = Field(description="Longest, in tokens.")


class LogNormal(ApiModel):
    """Many short and few long ones; the 99th percentile is served in full."""

    model_config = ConfigDict(
        json_schema_extra=rules(rule("self.median <= self.p95", "median must not be above p95")),
    )

    median: Tokens = Field(description="Half of all are shorter, in tokens.")
    p95: Tokens = Field(description="95 of 100 are shorter, in tokens.")


class LengthsSpec(ApiModel):
    """A distribution of lengths in tokens: exactly one of its fields."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                "[has(self.fixed), has(self.uniform), has(self.logNormal), has(self.empirical)]"
                ".filter(x, x).size() == 1",
                ONE_DISTRIBUTION,
            )
        )
    )

    @classmethod
    def instead_of(cls, value: object) -> str:
        """Plain numbers, and lists of them, stand for lengths."""
        if (number := whole(value)) is not None:
            return f"write {{fixed: {number}}}"
        if isinstance(value, list):
            return "write {empirical: [...]} for lengths as they were observed"
        return "write one such as {fixed: 4096} or {uniform: {min: 1000, max: 8000}}"

    fixed: Tokens | None = Field(default=None, description="All of one length.")
    uniform: Uniform | None = Field(default=None, description="Any length between two, equally likely.")
    log_normal: LogNormal | None = Field(default=None, description="Many short and few long ones.")
    empirical: tuple[Tokens, ...] | None = Field(
        default=None,
        min_length=1,
        max_length=MAX_OBSERVED,
        description="Lengths as they were observed.",
        json_schema_extra={"maxItems": MAX_OBSERVED_IN_CLUSTER},
    )


class TargetsSpec(ApiModel):
    """How fast requests should be served. What predictions say of it is in the plan."""

    # Not gt=0: a CRD's schema has no number for an open bound.
    ttft_seconds: float | None = Field(
        default=None,
        ge=1e-6,
        le=86_400,
        description="Time to the first token of the longest prompt beside "
        "those of busy lanes, and on average of prompts that wait for a lane.",
    )
    tpot_seconds: float | None = Field(
        default=None, ge=1e-6, le=3600, description="Time between two tokens of a running request."
    )


class WorkloadSpec(ApiModel):
    """Requests as clients send them. Prompt and output lengths are independent of each other."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                "!has(self.requestsPerSecond) || !has(self.concurrency)",
                "one of concurrency and requestsPerSecond; remove either",
                field_path=".requestsPerSecond",
            ),
            rule(
                "!has(self.requestsPerSecond) || (has(self.targets) && has(self.targets.tpotSeconds))",
                "requestsPerSecond needs targets.tpotSeconds: running requests are the rate x output tokens x TPOT",
            ),
            rule("!has(self.reuse) || self.reuse < 1.0", "reuse must be less than 1", field_path=".reuse"),
        )
    )

    prompt: LengthsSpec = Field(description="Tokens of a prompt.")
    output: LengthsSpec = Field(description="Tokens of an answer.")
    reuse: Share = Field(default=0.0, description="Share of prompt tokens whose prefix is in the cache of prefill.")
    targets: TargetsSpec = Field(default_factory=TargetsSpec, description="How fast requests should be served.")
    concurrency: int | None = Field(
        default=None,
        ge=1,
        le=MAX_CONCURRENCY,
        description="Requests at once, in prefill or in decode, which gets room for all; as many as fit when absent.",
    )
    requests_per_second: float | None = Field(
        default=None, ge=1e-6, le=1_000_000, description="Requests that arrive a second, instead of concurrency."
    )
