"""Searches that know the times of a forecast, and the one beside a plan: the same demand, of any layout. Pure."""

from __future__ import annotations

from msgspec.structs import replace

from kimi_operator.cli.outlook import Outlook
from kimi_operator.planner.elsewhere import same_demand
from kimi_operator.planner.objective import Forecast
from kimi_operator.planner.pools import Settings
from kimi_operator.planner.space import Search


def with_forecast(request: Search, forecast: Forecast) -> Search:
    """The search with times, by which layouts are judged and ranked."""
    return replace(request, timing=forecast.timing, throughput=forecast.throughput, queued=forecast.queued_on)


def search_beside(outlook: Outlook) -> Search:
    """The plan's demand, of any layout of its nodes; what is predicted needs its forecast."""
    planned, plan, forecast = outlook.planned, outlook.plan, outlook.forecast
    assert forecast is not None, outlook.no_speed
    settings = Settings(
        planned.architecture, planned.deployment.spec, planned.profile.spec, plan.kv_cache_dtype, plan.transport
    )
    request = same_demand(settings, outlook.workload, forecast.timing)
    return replace(with_forecast(request, forecast), is_assumed=outlook.is_assumed)
