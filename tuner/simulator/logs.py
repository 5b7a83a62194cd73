"""Log lines in the shape of vLLM's: process, level, time, text."""

import logging
import os
import sys
import time

VERSION = "0.32.0+simulated"
API_SERVER = "APIServer"
ENGINE_CORE = "EngineCore"
_PLAIN = "plain"


class _Formatter(logging.Formatter):
    """`(EngineCore pid=7) INFO 11-29 16:41:30 [simulator] text`, on every line of the text."""

    def format(self, record: logging.LogRecord) -> str:
        process = record.name.rpartition(".")[2]
        text = record.getMessage()
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        if process == _PLAIN:
            return text
        moment = time.strftime("%m-%d %H:%M:%S", time.localtime(record.created))
        head = f"({process} pid={os.getpid()}) {record.levelname} {moment} [simulator] "
        return "\n".join(head + line for line in text.split("\n"))


def set_up_logs() -> None:
    """Send the engine's log to stdout, as vLLM does."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(_Formatter())
    logger = logging.getLogger("vllm_simulated")
    logger.handlers = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False


def engine_log(process: str) -> logging.Logger:
    """Return the log of a process of the engine: `API_SERVER` or `ENGINE_CORE`."""
    return logging.getLogger(f"vllm_simulated.{process}")


def web_log() -> logging.Logger:
    """Return the log for lines that vLLM's web server prints without a process name."""
    return logging.getLogger(f"vllm_simulated.{_PLAIN}")
