"""Keeps prompts out of the logs: an error is told by its type and its place, never in its own words.

They may quote a prompt. What libraries log goes the way of our own lines, so that nothing prints an error whole.
"""

import asyncio
import logging
import sys
import traceback
from collections.abc import Iterator

import structlog

log = structlog.get_logger()

_MAX_FRAMES = 30
"""The innermost ones; an endless recursion has a thousand."""


def log_privately() -> None:
    """From now on, for this process and for the loop that runs."""
    logging.basicConfig(handlers=[_Handler()], level=logging.WARNING, force=True)
    asyncio.get_running_loop().set_exception_handler(_loop_failed)
    sys.unraisablehook = _unraisable


def places(error: BaseException | None) -> list[dict[str, object]]:
    """The error, then those that led to it: type, and frames from the outermost to where it was raised."""
    return [{"type": type(each).__qualname__, "frames": frames(each)} for each in _chain(error)]


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    waiting, seen = [error], set()
    while waiting:
        each = waiting.pop(0)
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        if isinstance(each, BaseExceptionGroup):
            waiting += each.exceptions
        waiting.append(each.__cause__ or (None if each.__suppress_context__ else each.__context__))


def frames(error: BaseException) -> list[str]:
    """Where it passed, the innermost ones, down to where it was raised."""
    passed = [
        f"{frame.f_code.co_filename}:{line} {frame.f_code.co_qualname}"
        for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    return passed[-_MAX_FRAMES:]


class _Handler(logging.Handler):
    """Passes on what libraries log."""

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        # beside an error, what is filled into a text may be that error
        text = str(record.msg).strip() if error else record.getMessage()
        log.log(record.levelno, "library_log", logger=record.name, text=text, errors=places(error))


def _loop_failed(_: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
    """What happened where nobody waits for it."""
    error, task = context.get("exception"), context.get("task") or context.get("future")
    log.error(
        "loop_failed",
        # a callback is described together with its arguments
        text="Exception in callback" if "handle" in context else context.get("message"),
        task=task.get_name() if isinstance(task, asyncio.Task) else None,
        errors=places(error if isinstance(error, BaseException) else None),
    )


def _unraisable(unraisable: "sys.UnraisableHookArgs") -> None:
    log.error("unraisable_error", errors=places(unraisable.exc_value))
