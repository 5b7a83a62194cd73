"""A command to put before the simulated engine: it notes how it was started, then becomes it.

    python engine_wrapper.py FOLDER [--rendezvous N] [--replace OLD NEW] [--wait-for FILE] serve ...

FOLDER gets `PID.json` with the environment, the arguments and the parent's pid. `--rendezvous N`
waits until N engines have started, which proves that they run side by side; `--replace` changes an
argument on the way, as an engine would that does not take what it is told.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

PATIENCE_S = 90.0


def main() -> None:
    """Note, wait, and become the engine."""
    folder, words = Path(sys.argv[1]), sys.argv[2:]
    rendezvous, wait_for = 0, None
    replaced: dict[str, str] = {}
    while words[0] != "serve":
        if words[0] == "--rendezvous":
            rendezvous, words = int(words[1]), words[2:]
        elif words[0] == "--wait-for":
            wait_for, words = Path(words[1]), words[2:]
        else:
            replaced[words[1]], words = words[2], words[3:]
    part = folder / f"{os.getpid()}.part"
    note = {
        "pid": os.getpid(),
        "parent": os.getppid(),
        "env": dict(os.environ),
        "port": int(words[words.index("--port") + 1]),
        "words": words,
    }
    part.write_text(json.dumps(note))
    part.rename(part.with_suffix(".json"))
    end_s = time.monotonic() + PATIENCE_S
    while len(list(folder.glob("*.json"))) < rendezvous or (wait_for and not wait_for.exists()):
        if time.monotonic() > end_s:
            sys.exit(f"waited {PATIENCE_S:g} s in vain")
        time.sleep(0.05)
    words = [replaced.get(word, word) for word in words]
    os.execv(sys.executable, [sys.executable, "-P", "-m", "tuner.simulator.main", *words])


if __name__ == "__main__":
    main()
