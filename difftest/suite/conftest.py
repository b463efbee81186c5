"""Turns the command line's cases, layers and paths into one test a stage."""

import pytest

from difftest import runner, session
from difftest.paths.base import get_path
from difftest.stages import stages_of
from difftest.testing import resolve_device


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "stage" not in metafunc.fixturenames:
        return
    option = metafunc.config.getoption
    device = resolve_device(option("--difftest-device"))
    request = session.Request(
        profile=option("--difftest-profile"),
        cases=option("--difftest-case"),
        paths=option("--difftest-path"),
        layers=option("--difftest-layer"),
        device=device,
        policy=option("--difftest-policy"),
        seed=option("--difftest-seed"),
    )
    try:
        plan, _ = session.plan(request)
    except ValueError as error:
        raise pytest.UsageError(str(error)) from error
    _, skipped = runner.open_paths(plan.paths, device)
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
                params.append(pytest.param(case, layer, spec, stage, plan.paths, id=name, marks=marks))
    metafunc.parametrize(("case", "layer", "path", "stage", "paths"), params)
