"""What a model does at its first call only: libraries install hooks and fill tables then, often under a lock.

A tracer cannot enter a lock. An eager first call can, and the second call no longer does; so the start of the first
call is run here, on fakes, up to where the function that holds the lock returns.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any


class _Reached(BaseException):
    """Not an Exception: the model's own handlers must let it pass."""


def set_up_lazily(call: Callable[[], Any], place: traceback.FrameSummary) -> None:
    """Runs `call` until the function that contains `place` returns for the first time, and leaves the call there.

    An error of the call itself is left to whoever traces it next, who can say more about it.
    """
    before = sys.getprofile()

    def watch(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "return" and (code.co_filename, code.co_name) == (place.filename, place.name):
            sys.setprofile(before)
            raise _Reached

    sys.setprofile(watch)
    try:
        call()
    except (_Reached, Exception):
        pass
    finally:
        sys.setprofile(before)
