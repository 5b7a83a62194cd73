"""A command to put before the simulated engine: some launches get a fault, drawn by seed.

    python chaotic_engine.py FOLDER SEED SHARE serve ...

The n-th launch draws from `SEED:n`, so a run's faults repeat. FOLDER gets `launch-N.json` with the
pid, the port and the fault.
"""

from __future__ import annotations

import json
import os
import random
import sys
from itertools import count
from pathlib import Path

# Every fault that a run outlives, at a start, under load, in single answers, in what it leaves.
FAULTS = (
    "oom_at_start",
    "kv_too_small",
    "no_kv_memory",
    "crash_at_start",
    "hang_at_start",
    "port_ignored",
    "crash_under_load:9",
    "exit_zero_under_load:9",
    "oom_under_load:9",
    "hang_under_load:9",
    "error_in_stream:0.3",
    "http_503:0.3",
    "truncate_stream:0.3",
    "wrong_length:0.3",
    "slow_first_token:150",
    "engine_core_child",
    "leak_shm",
    "live_unsupported",
    "live_mute:1",
)


def main() -> None:
    """Draw, note, and become the engine."""
    folder, seed, share, words = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]), sys.argv[4:]
    number = _take_number(folder)
    draw = random.Random(f"{seed}:{number}")
    fault = draw.choice(FAULTS) if draw.random() < share else ""
    port = int(words[words.index("--port") + 1])
    note = {"pid": os.getpid(), "port": port, "fault": fault, "word": words}
    part = folder / f"launch-{number}.part"
    part.write_text(json.dumps(note))
    part.rename(part.with_suffix(".json"))
    faults = ["--fault", fault] if fault else []
    os.execv(sys.executable, [sys.executable, "-P", "-m", "tuner.simulator.main", *words, *faults])


def _take_number(folder: Path) -> int:
    for number in count():
        try:
            (folder / f"launch-{number}").touch(exist_ok=False)
        except FileExistsError:
            continue
        return number
    raise AssertionError


if __name__ == "__main__":
    main()
