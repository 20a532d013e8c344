"""How much memory a call needs besides what was there before: from the record of torch's own CPU allocator."""

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def peak_bytes(call: Callable[[], object]) -> int:
    """Most bytes that were allocated at any one time during the call, its result included.

    Every allocation and release counts, also those inside one operator. The call's result is kept until the end.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        result = call()
    events = [event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    del result
    return most
