"""From an engine's last words to a kind of failure: every text of vllm.md, section 8."""

from __future__ import annotations

from pathlib import Path

import pytest

from tuner.engines.ending import Ending
from tuner.engines.failures import Phase, classify_exit
from tuner.records import FailureKind as Kind

DATA = Path(__file__).parent / "data"
GENERIC = (
    "Traceback (most recent call last):\n"
    '  File "/site-packages/vllm/v1/engine/utils.py", line 1431, in wait_for_engine_startup\n'
    "    raise RuntimeError(\n"
    "RuntimeError: Engine core initialization failed. See root cause above. "
    "Failed core proc(s): {}\n"
)
PREFIX = "(EngineCore pid=6671) ERROR 11-29 16:54:55 [core.py:1141] "


@pytest.mark.parametrize(
    ("text", "at_start", "under_load"),
    [
        (
            (
                "ValueError: No available memory for the cache blocks. Try increasing "
                "`gpu_memory_utilization` when initializing the engine."
            ),
            Kind.KV_SPACE_TOO_SMALL,
            Kind.KV_SPACE_TOO_SMALL,
        ),
        (
            (
                "ValueError: To serve at least one request with the model's max seq len (32768), "
                "(1.75 GiB KV cache is needed, which is larger than the available KV cache memory "
                "(0.90 GiB). Based on the available memory, the estimated maximum model length is "
                "16384."
            ),
            Kind.KV_SPACE_TOO_SMALL,
            Kind.KV_SPACE_TOO_SMALL,
        ),
        (
            (
                "ValueError: Free memory on device cuda:0 (10.2/79.2 GiB) on startup is less than "
                "desired GPU memory utilization (0.92, 72.86 GiB)."
            ),
            Kind.OUT_OF_MEMORY_AT_START,
            Kind.OUT_OF_MEMORY_AT_START,
        ),
        (
            "ValueError: Failed to load model - not enough GPU memory.",
            Kind.OUT_OF_MEMORY_AT_START,
            Kind.OUT_OF_MEMORY_UNDER_LOAD,
        ),
        (
            (
                "RuntimeError: CUDA out of memory occurred when warming up sampler with 1024 dummy "
                "requests."
            ),
            Kind.OUT_OF_MEMORY_AT_START,
            Kind.OUT_OF_MEMORY_UNDER_LOAD,
        ),
        (
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
            Kind.OUT_OF_MEMORY_AT_START,
            Kind.OUT_OF_MEMORY_UNDER_LOAD,
        ),
        (
            "OSError: [Errno 98] Address already in use",
            Kind.PORT_TAKEN,
            Kind.PORT_TAKEN,
        ),
        (
            "pydantic_core._pydantic_core.ValidationError: 1 validation error for SchedulerConfig",
            Kind.INVALID_SETTINGS,
            Kind.CRASH_UNDER_LOAD,
        ),
        (
            "  Value error, max_num_active_seqs (9) cannot be greater than max_num_seqs (8).",
            Kind.INVALID_SETTINGS,
            Kind.CRASH_UNDER_LOAD,
        ),
        (
            (
                "  Value error, User-specified max_model_len (100000) is greater than the derived "
                "max_model_len (max_position_embeddings=8192.0)"
            ),
            Kind.INVALID_SETTINGS,
            Kind.CRASH_UNDER_LOAD,
        ),
        (
            "api_server.py: error: unrecognized arguments: --max-num-partial-prefills",
            Kind.UNKNOWN_ARGUMENT,
            Kind.UNKNOWN_ARGUMENT,
        ),
        (
            "vllm serve: error: argument --max-num-seqs: invalid int value: '2K'",
            Kind.UNKNOWN_ARGUMENT,
            Kind.UNKNOWN_ARGUMENT,
        ),
        (
            "OSError: /models/none is not a local folder and is not a valid model identifier",
            Kind.MODEL_NOT_FOUND,
            Kind.MODEL_NOT_FOUND,
        ),
        (
            "RuntimeError: CUDA error: an illegal memory access was encountered",
            Kind.CRASH_AT_START,
            Kind.CRASH_UNDER_LOAD,
        ),
    ],
)
@pytest.mark.parametrize("phase", ["start", "load"])
def test_the_cause_decides_the_kind_in_both_phases(
    text: str, at_start: Kind, under_load: Kind, phase: Phase
) -> None:
    """The cause above vLLM's generic last line is found, quoted, and its context kept."""
    log = f"INFO starting\n{PREFIX}{text}\n{GENERIC}"
    failure = classify_exit(log, ending=Ending(1), phase=phase)
    assert failure.kind is (at_start if phase == "start" else under_load)
    assert text.strip()[:60] in failure.message
    assert "(EngineCore" not in failure.message
    assert text.strip()[:60] in failure.log_tail


@pytest.mark.parametrize(
    ("name", "exit_code", "kind", "message"),
    [
        ("fail-unknown-flag.txt", 2, Kind.UNKNOWN_ARGUMENT, "--max-num-partial-prefills"),
        ("fail-bool-equals.txt", 2, Kind.UNKNOWN_ARGUMENT, "ignored explicit argument 'False'"),
        ("fail-kv-zero.txt", 1, Kind.KV_SPACE_TOO_SMALL, "No available memory for the cache"),
        (
            "fail-max-model-len.txt",
            1,
            Kind.INVALID_SETTINGS,
            "max_model_len (100000) is greater than the derived max_model_len",
        ),
        (
            "fail-tokens-below-seqs.txt",
            1,
            Kind.INVALID_SETTINGS,
            "max_num_batched_tokens (32) must be greater than or equal to max_num_seqs (64)",
        ),
        (
            "fail-no-chunked-small-budget.txt",
            1,
            Kind.INVALID_SETTINGS,
            "max_num_batched_tokens (512) is smaller than max_model_len (2048)",
        ),
        ("fail-port-taken.txt", 1, Kind.PORT_TAKEN, "Address already in use"),
    ],
)
def test_real_logs_of_vllm_0_32_are_classified(
    name: str, exit_code: int, kind: Kind, message: str
) -> None:
    """Last lines of real failed starts give the right kind and quote the cause."""
    failure = classify_exit((DATA / name).read_text(), ending=Ending(exit_code), phase="start")
    assert failure.kind is kind
    assert message in failure.message


_DEAD = "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue."
_FATAL = "(EngineCore pid=7) ERROR 11-29 [core.py:1] EngineCore encountered a fatal error."


@pytest.mark.parametrize(
    ("log", "ending", "phase", "kind", "words"),
    [
        ("", Ending(0), "start", Kind.CRASH_AT_START, "exit code 0"),
        ("", Ending(1), "load", Kind.CRASH_UNDER_LOAD, "exit code 1"),
        ("", Ending(-11), "load", Kind.CRASH_UNDER_LOAD, "signal 11"),
        (_FATAL, Ending(0), "load", Kind.CRASH_UNDER_LOAD, "exit code 0"),
        (_FATAL, Ending(None), "load", Kind.CRASH_UNDER_LOAD, "not healthy"),
        ("", Ending(None), "load", Kind.HANG_UNDER_LOAD, "still runs and is not healthy"),
        ("", Ending(-9), "start", Kind.API_SERVER_LOST, "signal 9, which the tuner did not"),
        ("", Ending(-9, 2), "load", Kind.API_SERVER_LOST, "2 of its processes ran on"),
        ("", Ending(137), "load", Kind.API_SERVER_LOST, "signal 9"),
        ("", Ending(-15), "load", Kind.API_SERVER_LOST, "signal 15"),
        ("", Ending(0), "load", Kind.API_SERVER_LOST, "which the tuner did not ask for"),
        (_DEAD, Ending(0), "load", Kind.ENGINE_CORE_LOST, "somebody else ended it"),
        (_DEAD, Ending(None), "load", Kind.ENGINE_CORE_LOST, "still runs"),
        (_DEAD, Ending(1), "load", Kind.ENGINE_CORE_LOST, "exit code 1"),
        ("", Ending(-9, 2, 1), "load", Kind.OUT_OF_MEMORY_UNDER_LOAD, "memory was full"),
        (_DEAD, Ending(0, 0, 1), "load", Kind.OUT_OF_MEMORY_UNDER_LOAD, "out-of-memory killer"),
        ("", Ending(-9, 0, 2), "start", Kind.OUT_OF_MEMORY_AT_START, "out-of-memory killer"),
        # Others ran out of memory; this engine crashed by a fault of its own.
        (_FATAL, Ending(1, 0, 1), "load", Kind.CRASH_UNDER_LOAD, "exit code 1"),
    ],
)
def test_what_was_seen_of_the_processes_decides_where_the_log_is_silent(
    log: str, ending: Ending, phase: Phase, kind: Kind, words: str
) -> None:
    """Killed by others, by the kernel for lack of memory, or fallen by itself; with evidence."""
    failure = classify_exit(f"INFO all is well\n{log}\n", ending=ending, phase=phase)
    assert failure.kind is kind
    assert words in failure.message
    assert failure.evidence == ending.evidence


def test_last_words_of_a_killed_engine_are_not_called_its_cause() -> None:
    """What real vLLM wrote after a SIGTERM from outside says nothing about why it ended."""
    log = "Exception ignored in atexit callback: <function _exit_function at 0x7f39>\n"
    failure = classify_exit(log, ending=Ending(-15), phase="start")
    assert failure.message.endswith("which the tuner did not send")
    assert "atexit" in failure.log_tail


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("OSError: [Errno 28] No space left on device", Kind.DISK_FULL),
        ("RuntimeError: CUDA error: uncorrectable ECC error encountered", Kind.GPU_FAILED),
        ("RuntimeError: No CUDA GPUs: no CUDA-capable device is detected", Kind.GPU_FAILED),
        (
            "PermissionError: [Errno 13] Permission denied: '/models/m/config.json'",
            Kind.MODEL_NOT_FOUND,
        ),
        (
            "NotImplementedError: Pipeline parallelism is not supported for this model.",
            Kind.UNSUPPORTED_COMBINATION,
        ),
        (
            "ValueError: torch.bfloat16 is not supported for quantization method awq.",
            Kind.UNSUPPORTED_COMBINATION,
        ),
    ],
)
def test_a_start_that_the_machine_or_the_model_forbids(text: str, kind: Kind) -> None:
    """A full disk, a broken GPU, a model that may not be read, options that do not go together."""
    failure = classify_exit(f"{PREFIX}{text}\n{GENERIC}", ending=Ending(1), phase="start")
    assert failure.kind is kind
    assert text[:60] in failure.message


def test_an_empty_log_is_a_crash_too() -> None:
    """Nothing printed at all is classified without trouble."""
    assert classify_exit("", ending=Ending(1), phase="start").kind is Kind.CRASH_AT_START


def test_an_unrecognised_cause_is_quoted() -> None:
    """What no rule knows is still shown: the last line that looks like a cause, not the generic."""
    log = f"{PREFIX}ModuleNotFoundError: No module named 'flashinfer'\n{GENERIC}"
    failure = classify_exit(log, ending=Ending(1), phase="start")
    assert failure.kind is Kind.CRASH_AT_START
    assert "ModuleNotFoundError: No module named 'flashinfer'" in failure.message
    assert "See root cause above" not in failure.message


@pytest.mark.parametrize(
    "line",
    [
        "INFO loading bigscience/bloom-560m into room 12",
        "WARNING Found ulimit of 20000: `OSError: [Errno 24] Too many open files`",
        "INFO Available KV cache memory: 5.10 GiB",
        "INFO Error in nothing; memory is fine",
        "INFO expandable_segments avoids out of memory situations",
        "INFO GPU KV cache size: 262,144 tokens",
        "usage: api_server.py [--kv-cache-memory-bytes BYTES] [--max-num-seqs N]",
    ],
)
def test_harmless_lines_are_no_cause(line: str) -> None:
    """Words like bloom, or talk about memory, never turn a crash into something else."""
    failure = classify_exit(f"{line}\n", ending=Ending(1), phase="start")
    assert failure.kind is Kind.CRASH_AT_START


def test_the_message_and_the_tail_stay_short() -> None:
    """A log of a megabyte gives one line and a page, not a megabyte."""
    noise = "INFO line\n" * 50_000
    cause = f"{PREFIX}torch.OutOfMemoryError: CUDA out of memory. {'x' * 5000}\n"
    failure = classify_exit(noise + cause + noise, ending=Ending(1), phase="load")
    assert failure.kind is Kind.OUT_OF_MEMORY_UNDER_LOAD
    assert len(failure.message) <= 400
    assert len(failure.log_tail.splitlines()) <= 40


@pytest.mark.parametrize("kind", list(Kind))
def test_every_kind_says_whose_fault_it_is(kind: Kind) -> None:
    """Infrastructure teaches the optimiser nothing; everything else is the settings' fault."""
    infrastructure = {
        Kind.START_WITHOUT_CAUSE,
        Kind.API_SERVER_LOST,
        Kind.ENGINE_CORE_LOST,
        Kind.DISK_FULL,
        Kind.GPU_FAILED,
        Kind.GPU_MEMORY_LEFT,
        Kind.MEMORY_IN_USE,
        Kind.PORT_TAKEN,
        Kind.STOP_FAILED,
        Kind.LIVE_CONTROL_LOST,
        Kind.METER_FAILED,
        Kind.METER_SATURATED,
        Kind.WORKER_LOST,
    }
    assert kind.is_settings_fault is (kind not in infrastructure)
    hopeless = {Kind.UNKNOWN_ARGUMENT, Kind.MODEL_NOT_FOUND, Kind.COMMAND_NOT_FOUND}
    assert kind.is_hopeless is (kind in hopeless)
    unclean = {Kind.STOP_FAILED, Kind.GPU_MEMORY_LEFT, Kind.GPU_FAILED}
    assert kind.is_unclean is (kind in unclean)


def test_a_core_that_dies_without_a_word_is_no_fault_of_the_settings() -> None:
    """Empty braces and no cause line: something outside vLLM, so it is tried again elsewhere."""
    log = (
        "INFO 11-29 16:22:01 [api_server.py:1] starting\n"
        "RuntimeError: Engine core initialization failed. See root cause above. "
        "Failed core proc(s): {}\n"
    )
    failure = classify_exit(log, ending=Ending(1), phase="start")
    assert failure.kind is Kind.START_WITHOUT_CAUSE
    assert not failure.kind.is_settings_fault


def test_memory_given_back_by_others_during_profiling_is_tried_again() -> None:
    """A memory assertion that a neighbour caused says nothing about the settings."""
    log = "AssertionError: Error in memory profiling. Initial free memory 70.1 GiB, current 75.2"
    failure = classify_exit(log, ending=Ending(1), phase="start")
    assert failure.kind is Kind.MEMORY_IN_USE
    assert not failure.kind.is_settings_fault
