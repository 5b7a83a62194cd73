"""A disk that fills up in the middle of a run."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.chaos.invariants import Scene, assert_whole
from tests.chaos.runs import run_config, the_run
from tuner.clock import SystemClock
from tuner.errors import StoreError
from tuner.events import Event
from tuner.run import make_plan, resume_run, start_run


@contextmanager
def _limited_files() -> Iterator[list[bool]]:
    """Once something is put into the list, this process can write no file beyond a few bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        yield []
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_fills_up_is_an_error_and_loses_no_record(here: Scene) -> None:
    """It is said which file could not be written; what was there is whole, and resume goes on."""
    config = run_config(here, seed=0, share=0.0)

    def fill_the_disk(event: Event) -> None:
        # The kernel refuses longer files from now on, as a full disk does.
        if event.kind == "trial_finished" and event.details["trial"] == 1:
            _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, most))

    with _limited_files(), pytest.raises(StoreError, match=r"cannot be written|File too large"):
        start_run(
            make_plan(config), clock=SystemClock(), listeners=[fill_the_disk], command=["chaos"]
        )
    run = the_run(here)
    assert_whole(run, is_finished=False)
    kept = {path: path.read_bytes() for path in run.glob("trials/*/trial.json")}
    assert kept
    result = resume_run(run, clock=SystemClock(), listeners=[])
    assert result.exit_code == 0
    assert all(path.read_bytes() == content for path, content in kept.items())
    assert_whole(run, is_finished=True)
