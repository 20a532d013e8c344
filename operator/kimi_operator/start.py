"""`kimi-operator`: the program, without what its libraries import for uses that it does not make of them.

The kubernetes package imports its synchronous client with all that belongs to it, and kopf looks for that client only
to take objects of it; structlog imports rich for coloured traces. Together they are 10 MB of the process.
"""

from __future__ import annotations

import gc
import importlib.util
import sys


def leave_out() -> None:
    """Import nothing of kubernetes but what is asked for by name, and no rich. To be called before any other import."""
    spec = importlib.util.find_spec("kubernetes")
    assert spec is not None, "a dependency of this package"
    # The package as such, without what its __init__ imports.
    package = importlib.util.module_from_spec(spec)
    # None stands for a module that cannot be imported: kopf and structlog do without.
    sys.modules |= {"kubernetes": package, "kubernetes.client": None, "rich": None}  # type: ignore[dict-item]


def main() -> None:
    """Run the program."""
    leave_out()
    from kimi_operator.__main__ import main as run  # noqa: PLC0415  # not before the line above

    # What is imported stays: collections of garbage, for which everything else waits, need not look at it again.
    gc.collect()
    gc.freeze()
    run()


if __name__ == "__main__":
    main()
