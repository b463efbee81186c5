"""The plan of a session: what the options ask for, looked up once."""

import pytest

from .. import runner, session
from ..testing import resolve_device

PLAN: pytest.StashKey[runner.Plan] = pytest.StashKey()


def plan_of(config: pytest.Config) -> runner.Plan:
    """What the options ask for, looked up once a session. CollectError names what is unknown."""
    if PLAN not in config.stash:
        option = config.getoption
        request = session.Request(
            profile=option("--difftest-profile"),
            cases=option("--difftest-case"),
            paths=option("--difftest-path"),
            layers=option("--difftest-layer"),
            device=resolve_device(option("--difftest-device")),
            policy=option("--difftest-policy"),
            seed=option("--difftest-seed"),
        )
        try:
            config.stash[PLAN], _ = session.plan(request)
        except ValueError as error:
            raise pytest.Collector.CollectError(str(error)) from error
    return config.stash[PLAN]
