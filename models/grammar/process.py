"""The process in which grammars are tried (see `trial`): started when it is needed first, and again after it has ended."""

from __future__ import annotations

import json
import subprocess
from dataclasses import asdict

from ..hardware.child import command
from .source import GrammarError, Source


class TrialProcess:
    """One grammar at a time. Call `close` at the end."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def define(self, source: Source) -> str:
        """Return llguidance's grammar for a source, which compiles in bounded time. Raises GrammarError."""
        process = self._process = self._process or _start()
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(asdict(source)) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:
            line = ""
        if not line:
            self.close()
            raise GrammarError("it takes too much time or memory: make it simpler")
        answer = json.loads(line)
        if "error" in answer:
            raise GrammarError(answer["error"])
        return answer["grammar"]

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def _start() -> subprocess.Popen[str]:
    trial = command("models.grammar.trial")
    return subprocess.Popen(trial, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
