"""What capture refuses: errors that name the model's line, the reason and the way out."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from evocompile.capture import capture
from evocompile.errors import CaptureError, InputError
from tests.captured_model import Asserting, assert_same_state, llama

HERE = __file__


def line_of(marker: str) -> int:
    """Line of this file that contains a marker comment."""
    lines = inspect.getsource(inspect.getmodule(line_of)).splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.endswith(f"# {marker}"))


class Faulty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("average", torch.zeros(4))


class Branch(Faulty):
    def forward(self, x):
        if x.sum() > 0:  # branch
            return self.linear(x)
        return x


class Item(Faulty):
    def forward(self, x):
        return self.linear(x) * x.sum().item()  # item


class Loop(Faulty):
    def forward(self, x):
        for _ in range(int(x[0, 0])):  # loop
            x = self.linear(x)
        return x


class Select(Faulty):
    def forward(self, x):
        return self.linear(x[x > 0].sum() * x)  # select


class Break(Faulty):
    def forward(self, x):
        torch._dynamo.graph_break()  # break
        return self.linear(x)


class Print(Faulty):
    def forward(self, x):
        print("hello")  # print
        return self.linear(x)


class Raise(Faulty):
    def forward(self, x):
        raise ValueError(f"no {x.shape[0]} rows")  # raise


class NoTensor(Faulty):
    def forward(self, x):
        return self.linear(list(x.shape))  # no-tensor


class Shape(Faulty):
    def forward(self, x):
        return self.linear(x.t())  # shape


class Memory(Faulty):
    def forward(self, x):
        return self.linear(x)[1:].as_strided((2,), (1,))  # memory


class WriteParameter(Faulty):
    def forward(self, x):
        with torch.no_grad():
            self.linear.weight.view(-1).mul_(2)  # write-parameter
        return self.linear(x)


class WriteLeaf(Faulty):
    def forward(self, x):
        self.linear.weight.mul_(2)  # write-leaf
        return self.linear(x)


class WriteAverage(Faulty):
    def forward(self, x):
        y = self.linear(x)
        self.average.add_(y.mean(0))  # write-average
        return y.sum()


@pytest.mark.parametrize(
    ("module", "marker", "says"),
    [
        (Branch(), "branch", "torch.where"),
        (Item(), "item", "depends on the values of a tensor"),
        (Loop(), "loop", "values of a tensor"),
        (Select(), "select", "shape of this tensor depends on the values"),
        (Break(), "break", "graph break"),
        (Print(), "print", "print"),
        (Raise(), "raise", "ValueError('no 2 rows')"),
        (NoTensor(), "no-tensor", "must be Tensor, not"),
        (Shape(), "shape", "must have same reduction dim"),
        (Memory(), "memory", "call it on the whole tensor"),
        (WriteParameter(), "write-parameter", "parameter 'linear.weight' is written to in place"),
        (WriteLeaf(), "write-leaf", "leaf Variable"),
        (WriteAverage(), "write-average", "Detach the value"),
    ],
)
def test_row_14_errors_name_the_line_the_reason_and_no_stack(module, marker, says):
    """Row 14 of PAINS: an error names the user's line and the way out, and comes from no depth of the compiler."""
    before = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    with pytest.raises(CaptureError) as caught:
        capture(module.forward, module, (torch.ones(2, 4),), {})
    message = str(caught.value)
    assert f"{HERE}:{line_of(marker)}" in message.splitlines()[0]
    assert says in message
    assert "Traceback" not in message and "Dynamo" not in message and len(message.splitlines()) == 3
    assert_same_state(before, module)


def test_an_assertion_that_fails():
    module = Asserting()
    with pytest.raises(CaptureError, match=r"in forward: assert x.shape\[0\] > 2\n .*: this assertion fails\.\n"):
        capture(module.forward, module, (torch.ones(2, 4),), {})


def test_an_input_that_is_written_to():
    class WriteInput(Faulty):
        def forward(self, x):
            x[:, 0] += 1  # write-input
            return self.linear(x)

    module = WriteInput()
    with pytest.raises(InputError, match=rf"(?s):{line_of('write-input')} .*input 'x' is written to in place"):
        capture(module.forward, module, (), {"x": torch.ones(2, 4)})


def test_an_input_that_requires_grad():
    module = Faulty()
    x = torch.ones(2, 4, requires_grad=True)
    with pytest.raises(InputError, match=r"'args\[0\]' requires grad"):
        capture(module.linear.forward, module.linear, (x,), {})
    with torch.no_grad():
        capture(module.linear.forward, module.linear, (x,), {})


def test_a_tensor_that_requires_grad_and_is_no_parameter():
    class Loose(Faulty):
        def __init__(self):
            super().__init__()
            self.loose = [torch.ones(4, requires_grad=True)]

        def forward(self, x):
            return self.linear(x) * self.loose[0]

    module = Loose()
    with pytest.raises(CaptureError, match=r"model\.loose\[0\] requires grad"):
        capture(module.forward, module, (torch.ones(2, 4),), {})


def test_a_call_without_tensors():
    module = Faulty()
    with pytest.raises(CaptureError, match="no tensor operation"):
        capture(lambda: 1, module, (), {})


def test_an_error_inside_a_library_names_the_users_line_and_the_librarys():
    module = llama(False)
    ids = torch.randint(0, 64, (2, 16))

    def step(model, ids):
        return model(input_ids=ids, attention_mask=torch.ones(3, 7, 5)).logits  # library

    with pytest.raises(CaptureError) as caught:
        capture(step, module, (module, ids), {})
    first = str(caught.value).splitlines()[0]
    assert f"{HERE}:{line_of('library')}" in first and "transformers" in first
