"""Turns the command line's cases, layers and paths into one test a stage."""

import pytest

from difftest import runner
from difftest.paths.base import get_path
from difftest.stages import stages_of
from difftest.suite.plan import plan_of


@pytest.fixture(scope="session")
def difftest_plan(request: pytest.FixtureRequest) -> runner.Plan:
    """Cases, layers and paths of this session."""
    return plan_of(request.config)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "stage" not in metafunc.fixturenames:
        return
    plan = plan_of(metafunc.config)
    _, skipped = runner.open_paths(plan.paths, plan.device)
    params = []
    for case, layer in plan.items():
        for spec in plan.paths:
            if not runner.covers(get_path(spec), case, layer):
                continue
            for stage in stages_of(case.config.kind(layer)):
                marks = [pytest.mark.xdist_group(f"{case.id}-layer{layer}"), pytest.mark.difftest]
                if spec in skipped:
                    marks.append(pytest.mark.skip(reason=f"cannot judge: {spec}: {skipped[spec]}"))
                name = f"{case.id}-layer{layer}-{spec.replace('-', '_')}-{stage}"
                params.append(pytest.param(case, layer, spec, stage, id=name, marks=marks))
    metafunc.parametrize(("case", "layer", "path", "stage"), params)
