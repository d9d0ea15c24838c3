"""Messages of a failed capture: the model's source line, the reason, the way out."""

from __future__ import annotations

import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from .errors import CaptureError
from .torch_private import Explanation, TraceError, explain, new_fake_mode

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (.+)\n\s*(.*)')

_WAYS_OUT = {
    "data-dependent branching": (
        "Compute both sides and choose with torch.where, or pass the decision into the call as a Python argument."
    ),
    "data-dependent": (
        "Keep the value as a tensor, or compute the number outside of the call and pass it as a Python argument."
    ),
    "raise": "Call the uncompiled model with the same arguments to debug it.",
    "runtime": "Call the uncompiled model with the same arguments to debug it.",
}
_WAY_OUT = "Rewrite this line with tensor operations, or move it out of the call."


def untraceable(error: TraceError) -> CaptureError:
    """The error for a call that Dynamo could not trace."""
    explanation = explain(error)
    way_out = explanation.way_out or _WAYS_OUT.get(explanation.kind.lower(), _WAY_OUT)
    return CaptureError(_message(place(explanation.frames), _plain(explanation), way_out))


def underivable(error: RuntimeError) -> CaptureError:
    """The error for a graph of which AOTAutograd could not derive the backward."""
    text = str(error)
    reason = next((line.strip().rstrip(".") for line in text.splitlines() if line.strip()), type(error).__name__)
    return CaptureError(_message(place(_frames(text)), reason, _WAY_OUT))


def _plain(explanation: Explanation) -> str:
    """The reason in words that do not need Dynamo's vocabulary."""
    if explanation.kind == "Data-dependent branching":
        return "a branch depends on the values of a tensor"
    if explanation.kind == "data-dependent":
        return "a Python number is made from the values of a tensor"
    return re.sub(r"\bDynamo\b", "torch's tracer", explanation.reason.rstrip("."))


def refuse_data_dependence(graph: fx.Graph) -> None:
    """Shapes and Python numbers that depend on a tensor's values cannot be the same on every rank."""
    for node in graph.nodes:
        value = node.meta.get("example_value")
        values = value if isinstance(value, (tuple, list)) else (value,)
        if any(map(_is_data_dependent, values)):
            of = "the shape of this tensor depends" if isinstance(values[0], Tensor) else "this Python number depends"
            raise CaptureError(
                _message(node_place(node), f"{of} on the values of a tensor", _WAYS_OUT["data-dependent"])
            )


def _is_data_dependent(value: Any) -> bool:
    numbers = value.shape if isinstance(value, Tensor) else (value,)
    return any(isinstance(number, (torch.SymInt, torch.SymFloat, torch.SymBool)) for number in numbers)


def written_to(what: str, node: fx.Node | None, way_out: str) -> str:
    """The message for an input that the model writes to."""
    where = "the model" if node is None else node_place(node)
    return _message(where, f"{what} is written to in place", way_out)


class _WriteFinder(fx.Interpreter):
    """Runs a graph and remembers the first node after which `watched` has another version."""

    def __init__(self, graph_module: fx.GraphModule, watched: Tensor) -> None:
        super().__init__(graph_module)
        self.watched = watched
        self.found: fx.Node | None = None

    def run_node(self, n: fx.Node) -> Any:
        before = self.watched._version
        result = super().run_node(n)
        if self.found is None and self.watched._version != before:
            self.found = n
        return result


def find_write(graph_module: fx.GraphModule, index: int) -> fx.Node | None:
    """The first node of Dynamo's graph that writes to input `index`, directly or through a view."""
    values = [node.meta["example_value"] for node in graph_module.graph.find_nodes(op="placeholder")]
    with new_fake_mode(), torch.no_grad():
        inputs = [torch.empty(tuple(value.shape), dtype=value.dtype, device=value.device) for value in values]
        finder = _WriteFinder(graph_module, inputs[index])
        finder.run(*inputs)
    return finder.found


def node_place(node: fx.Node) -> str:
    """ "file.py:12 in forward: code" of the line of the model that made a node."""
    return place(_frames(node.meta.get("stack_trace") or "")) or f"graph node {node.name}"


def _frames(stack: str) -> list[traceback.FrameSummary]:
    """The frames of a stack trace that was kept as text."""
    found = _FRAME.findall(stack)
    return [traceback.FrameSummary(file, int(line), name, line=code.strip()) for file, line, name, code in found]


def place(frames: Sequence[traceback.FrameSummary]) -> str:
    """The innermost line of the user's own code; what it called of a model library is added in parentheses."""
    visible = [
        frame for frame in frames if not _inside(frame.filename, _package_of("torch"), os.path.dirname(__file__))
    ]
    if not visible:
        return ""
    own = [frame for frame in visible if not _is_library(frame.filename)]
    inner = visible[-1]
    if own and own[-1] is not inner:
        return f"{_line(own[-1])} (which runs {inner.filename}:{inner.lineno} in {inner.name}: {inner.line})"
    return _line(inner)


def _line(frame: traceback.FrameSummary) -> str:
    return f"{frame.filename}:{frame.lineno} in {frame.name}: {frame.line}"


def _is_library(file: str) -> bool:
    paths = sysconfig.get_paths()
    return _inside(file, _package_of("transformers"), paths["purelib"], paths["platlib"], paths["stdlib"])


def _package_of(name: str) -> str | None:
    module = sys.modules.get(name)
    return os.path.dirname(module.__file__) if module and module.__file__ else None


def _inside(file: str, *folders: str | None) -> bool:
    return any(folder and file.startswith(folder + os.sep) for folder in folders)


def _message(where: str, reason: str, way_out: str) -> str:
    return f"{where or 'the model'}\n  cannot be captured: {reason}.\n  {way_out}"
