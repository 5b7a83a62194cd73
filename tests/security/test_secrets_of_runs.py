"""Runs whose secrets are masked on disk: who starts an engine takes them from the environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from objectives import Policy
from tests.fakes.virtual_fleet import VirtualFleet
from tests.security.test_secrets import ENV, HUB, KEY, SECRETS, TOKEN
from tests.session.running import VirtualRun, make_config
from tuner.errors import UsageError
from tuner.run import make_plan, read_config, report_of, resume_run
from tuner.verifying import Verification, verify_run

_VARIABLES = {"MY_TOKEN": TOKEN, "EXTRA": HUB, "VLLM_API_KEY": KEY}


@pytest.fixture
def finished(tmp_path: Path) -> VirtualRun:
    """A run with a recommendation, and three secrets that its folder does not have."""
    arguments = {"profile": "demo", "max_model_len": 4096, "time_noise": 0, "api_key": KEY}
    config = make_config(
        tmp_path, engine={"kind": "simulated", "env": ENV}, engine_arg=arguments, trials=4
    )
    run = VirtualRun(config)
    run.run()
    return run


def _verify(run: VirtualRun, fleet: VirtualFleet) -> Verification:
    return verify_run(
        run.folder.path,
        policy=Policy.THROUGHPUT_FIRST,
        clock=run.clock,
        listeners=[],
        command=["tune", "verify"],
        fleet_of=lambda _: fleet,
    )


def test_a_verification_without_the_variables_names_them(
    finished: VirtualRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is started with a mask in the place of a value."""
    for name in _VARIABLES:
        monkeypatch.delenv(name, raising=False)
    fleet = VirtualFleet(workers=1, clock=finished.clock)
    with pytest.raises(UsageError) as refused:
        _verify(finished, fleet)
    for name in _VARIABLES:
        assert f"set the environment variable {name} to it" in str(refused.value)
    assert not fleet.submitted


def test_a_verification_gives_engines_the_true_values(
    finished: VirtualRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engines get what the run's had; what is kept of it is masked again."""
    for name, value in _VARIABLES.items():
        monkeypatch.setenv(name, value)
    fleet = VirtualFleet(workers=1, clock=finished.clock)
    found = _verify(finished, fleet)
    for spec, _ in fleet.submitted:
        assert dict(spec.engine.env) == ENV
        assert spec.engine.fixed["api_key"] == KEY
    for secret in SECRETS:
        assert secret not in found.path.read_text()


def test_a_resumed_run_needs_the_variables_and_a_report_does_not(
    finished: VirtualRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A finished run only gets its report; one that goes on is refused before it starts."""
    for name in _VARIABLES:
        monkeypatch.delenv(name, raising=False)
    path = finished.folder.path
    assert report_of(path, clock=finished.clock)["engine"]["env"]["MY_TOKEN"] == "***"
    assert resume_run(path, clock=finished.clock, listeners=[]).exit_code == 0
    with pytest.raises(UsageError, match="MY_TOKEN"):
        make_plan(read_config(path), is_stored=True)
