"""What tokens cost at a price of a GPU-hour, with the band of the predicted throughput. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from kimi_operator.cli.figures import Amount, Figure, figures, number
from kimi_operator.cli.flags import refuse
from kimi_operator.cli.outlook import Outlook
from kimi_operator.cli.time_figures import time_figures
from kimi_operator.errors import InvalidSpec

LEAST_PRICE, MOST_PRICE = 1e-6, 1e6
TOKENS = 1_000_000


class Price(Struct, frozen=True):
    """Money for a million tokens, in the currency of the price; `low` is where throughput is at its high end."""

    value: float
    low: float
    high: float


class Cost(Struct, frozen=True):
    """Prefill's GPUs pay for prompt tokens, decode's for output tokens, all at one load."""

    per_gpu_hour: float
    concurrency: int
    tokens_per_second: float
    """Output tokens of that load."""
    binds: str
    prompt: Price
    """Of prompt tokens as clients send them, reused ones included."""
    output: Price
    all_in: Price
    """All GPUs over output tokens alone."""
    per_request: Price
    hour: float
    """All GPUs for an hour."""
    calibrated_on: str


def cost_of(outlook: Outlook, per_gpu_hour: float) -> Cost:
    """Raises InvalidSpec for a price that is none, and where throughput cannot be predicted."""
    check_price(per_gpu_hour)
    speed = outlook.speed
    if speed is None:
        raise without_throughput(outlook.no_speed or "the workload does not fit")
    # the load of the plan's own output, so that a price and the tokens beside it belong together
    point, request = speed.at, speed.request
    rate = point.tokens_per_second
    outputs = (rate.value, rate.high, rate.low)
    gpus = {each.plan.role: each.groups * each.plan.ranks for each in (outlook.prefill, outlook.decode)}
    prefill, decode = (number * per_gpu_hour / 3600 for number in gpus.values())
    prompts = tuple(each * request.prompt_tokens / request.output_tokens for each in outputs)
    requests = tuple(each / request.output_tokens for each in outputs)
    return Cost(
        per_gpu_hour=per_gpu_hour,
        concurrency=point.concurrency,
        tokens_per_second=rate.value,
        binds=point.binds,
        prompt=Price(*(prefill / each * TOKENS for each in prompts)),
        output=Price(*(decode / each * TOKENS for each in outputs)),
        all_in=Price(*(all_in(sum(gpus.values()), per_gpu_hour, each) for each in outputs)),
        per_request=Price(*((prefill + decode) / each for each in requests)),
        hour=outlook.plan.gpus * per_gpu_hour,
        calibrated_on=rate.calibrated_on,
    )


def check_price(per_gpu_hour: float) -> None:
    """Raises InvalidSpec for a price that is none; NaN is none either."""
    if not LEAST_PRICE <= per_gpu_hour <= MOST_PRICE:
        got, expected = f"{per_gpu_hour:g}", f"a price of a GPU-hour from {LEAST_PRICE:g} to {MOST_PRICE:,.0f}"
        raise refuse("--cost", got, expected, "state it without a currency, such as 2.5")


def without_throughput(reason: str) -> InvalidSpec:
    """Tokens that nobody can count have no cost."""
    return refuse("--cost", f"no throughput: {reason}", "a predicted throughput", "mend that first")


def all_in(gpus: int, per_gpu_hour: float, tokens_per_second: float) -> float:
    """Money for a million output tokens, with all GPUs paid by them."""
    return gpus * per_gpu_hour / 3600 / tokens_per_second * TOKENS


def cost_text(cost: Cost) -> Iterator[str]:
    """For a terminal."""
    load = f"{cost.hour:,.2f} an hour in all, for the output of {cost.concurrency:,} at once, as above"
    yield f"cost at {cost.per_gpu_hour:g} a GPU-hour, {load}"
    for label, price in rows(cost).items():
        yield f"  {label:<34} {price_text(price)}"
    yield f"  {'binds':<34} {cost.binds}"


def rows(cost: Cost) -> dict[str, Price]:
    """What is shown, by its label."""
    return {
        "a million prompt tokens": cost.prompt,
        "a million output tokens": cost.output,
        "all GPUs, a million output tokens": cost.all_in,
        "a request": cost.per_request,
    }


def price_text(price: Price) -> str:
    """A price and its band."""
    low, value, high = (money(x) for x in (price.low, price.value, price.high))
    return f"{value} ({low} to {high})"


def money(value: float) -> str:
    """Two decimals, or three digits of less than 1."""
    return f"{value:,.2f}" if value >= 1 else f"{value:.3g}"


def cost_figures(outlook: Outlook, cost: Cost) -> Iterator[Figure]:
    """The figures of the cost, as all others are explained."""
    assert outlook.speed is not None, "a cost has a throughput"
    prompt, answer = (f"{n:,}" for n in (outlook.speed.request.prompt_tokens, outlook.speed.request.output_tokens))
    prefill, decode = (each.groups * each.plan.ranks for each in (outlook.prefill, outlook.decode))
    rate, output, million = number(cost.tokens_per_second), "output tokens/s", " x 1,000,000"
    prompts = f"({output} x tokens of a prompt / of its answer){million}", f"({rate} x {prompt} / {answer}){million}"
    requests = f"({output} / tokens of an answer)", f"({rate} / {answer})"
    outputs = f"{output}{million}", f"{rate}{million}"
    for key, price, gpus, (over, over_values) in (
        ("cost.prompt", cost.prompt, f"{prefill:,} prefill GPUs", prompts),
        ("cost.output", cost.output, f"{decode:,} decode GPUs", outputs),
        ("cost.allIn", cost.all_in, f"{prefill + decode:,} GPUs", outputs),
        ("cost.request", cost.per_request, f"{prefill + decode:,} GPUs", requests),
    ):
        values = f"{gpus} x {cost.per_gpu_hour:g} / 3,600 / {over_values}: {output} of {cost.concurrency:,} at once"
        exact = Amount(price.value, "", price.low, price.high)
        yield Figure(key, price_text(price), f"GPUs x price / 3,600 s / {over}", values, cost.calibrated_on, exact)
    at = f"{cost.concurrency:,} at once"
    yield Figure("cost.binds", cost.binds, "which bound on the output is the least", at, cost.calibrated_on)


def all_figures(outlook: Outlook, cost: Cost | None) -> list[Figure]:
    """Every figure of a plan, those of its cost too where one is asked for."""
    return [*figures(outlook), *time_figures(outlook), *(cost_figures(outlook, cost) if cost else ())]
