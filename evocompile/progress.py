"""Progress of a compilation, told to people who wait."""

from __future__ import annotations

import sys
import threading
from types import TracebackType
from typing import Self


class Progress:
    """Tells on stderr what is being done, when that takes long: `progress("capturing")` begins a stage."""

    PATIENCE = 3.0  # seconds

    def __init__(self, *, shown: bool) -> None:
        self._shown = shown
        self._timer: threading.Timer | None = None

    def __call__(self, stage: str) -> None:
        self._stop()
        if self._shown:
            self._timer = threading.Timer(self.PATIENCE, lambda: print(f"evocompile: {stage} …", file=sys.stderr))
            self._timer.daemon = True
            self._timer.start()

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self._stop()
