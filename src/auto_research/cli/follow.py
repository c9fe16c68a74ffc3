"""Follow a running Snakemake call: which stage, how far, what is left.

Snakemake's own output goes to a log file; a person sees finished jobs, the progress of running ones (read from the
progress files of the training state) and every error in full.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path

from auto_research.runtime.errors import EXIT_CODES

USER_MISTAKE = 2
STEPS = re.compile(r"^(\d+) of (\d+) steps \(\d+%\) done")
STARTED = re.compile(r"^(?:local)?(?:rule|checkpoint) (\w+):")
MESSAGE = re.compile(r"^Job \d+: (.*)")


class Follower:
    """Run one Snakemake command and show where it stands.

    Parameters
    ----------
    command: argument list of the Snakemake call.
    environment: environment of the child.
    interval: seconds between two progress lines.
    """

    def __init__(self, command: list[str], environment: dict[str, str], interval: float = 5.0):
        self.command = command
        self.environment = environment
        self.interval = interval
        self.done, self.total = 0, 0
        self.started_at = time.time()
        self.tail: deque[str] = deque(maxlen=60)
        self.errors = False
        self.last_line = ""

    def run(self) -> int:
        """Return Snakemake's exit code; SIGINT reaches Snakemake through the terminal's process group."""
        log = Path("results/requests/snakemake.log")
        log.parent.mkdir(parents=True, exist_ok=True)
        codes = log.with_name(f"exit-codes-{os.getpid()}.txt")
        self.environment[EXIT_CODES] = str(codes.resolve())
        process = subprocess.Popen(
            self.command,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        ticker = threading.Thread(target=self._tick, args=(process,), daemon=True)
        ticker.start()
        previous = signal.getsignal(signal.SIGINT)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        try:
            with log.open("w", encoding="utf-8") as sink:
                for line in process.stdout:
                    sink.write(line)
                    sink.flush()
                    self._line(line.rstrip("\n"))
            code = process.wait()
        finally:
            signal.signal(signal.SIGINT, previous)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            failed = codes.read_text(encoding="ascii").split() if codes.is_file() else []
            codes.unlink(missing_ok=True)
        if code and not self.errors:
            print("\n".join(self.tail), file=sys.stderr)
        if code and failed and set(failed) == {str(USER_MISTAKE)}:
            code = USER_MISTAKE
        if code and code != USER_MISTAKE:
            print(f"stopped with exit code {code}; full log: {log}; the same command resumes", file=sys.stderr)
        return code

    def _line(self, line: str) -> None:
        self.tail.append(line)
        if match := STEPS.match(line):
            self.done, self.total = int(match[1]), int(match[2])
            self._say(f"{self.done}/{self.total} jobs done")
        elif match := MESSAGE.match(line):
            self._say(match[1])
        elif line.startswith(("error: ", "note: ")):
            self.errors |= line.startswith("error: ")
            print(line, file=sys.stderr, flush=True)

    def _say(self, text: str) -> None:
        elapsed = int(time.time() - self.started_at)
        line = f"[{elapsed // 60:02d}:{elapsed % 60:02d}] {text}"
        if text != self.last_line:
            self.last_line = text
            print(line, file=sys.stderr, flush=True)

    def _tick(self, process: subprocess.Popen) -> None:
        while process.poll() is None:
            time.sleep(self.interval)
            running = list(self.running())
            if running:
                self._say("; ".join(running))

    def running(self):
        """Yield one short text for each training whose progress file moved in the last 20 seconds."""
        for path in sorted(Path("results/state").glob("**/progress.json")):
            try:
                if time.time() - path.stat().st_mtime > 20:
                    continue
                facts = json.loads(path.read_text(encoding="utf-8"))
            except (OSError, ValueError):
                continue
            text = f"{facts.get('stage', path.parent.name[:12])} {facts.get('done', 0)}/{facts.get('total', '?')}"
            values = [f"{k} {facts[k]:.4g}" for k in ("loss", "validation") if isinstance(facts.get(k), (int, float))]
            yield " ".join([text, *values])
