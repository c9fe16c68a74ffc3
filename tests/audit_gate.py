"""A toy adapter that waits for a file, so that a test can act while its audit is surely running."""

import time

import audit_toys

GATED = audit_toys.GOOD.replace(
    '    return Measurement(metrics={{"loss": 4.0}})',
    """    import os
    import time

    open(os.environ["TOY_GATE"] + ".reached", "w").close()
    while not os.path.exists(os.environ["TOY_GATE"]):
        time.sleep(0.2)
    return Measurement(metrics={{"loss": 4.0}})""",
)


def wait_for(condition, process, deadline: float = 400.0):
    """The first true value of `condition`; fails when `process` ends or the deadline (s) passes before."""
    end = time.monotonic() + deadline
    while time.monotonic() < end:
        if found := condition():
            return found
        assert process.poll() is None, "the process ended first"
        time.sleep(0.2)
    raise AssertionError("deadline passed")
