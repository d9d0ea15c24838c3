"""The simulator on programs that can be worked out by hand: seconds on the wire, shared links, order within a group."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from evocompile.cli import main
from evocompile.collectives import Event
from evocompile.simulate import Span, Work, simulate


def start(seconds: float, group: str = "all:0,1", name: str = "gather") -> Work:
    return Work(name, seconds, Event("all_gather", name, group, size=1))


def send(seconds: float, to: int, source: int, sent: int = 4, received: int = 4) -> Work:
    sides = ((to, sent),) if to >= 0 else (), ((source, received),) if source >= 0 else ()
    return Work("exchange", seconds, Event("exchange", "exchange", "cp:0,1,2", sent=sides[0], received=sides[1]))


def wait(position: int) -> Work:
    return Work("wait", start=position)


def compute(seconds: float) -> Work:
    return Work("compute", seconds)


@pytest.mark.parametrize(
    ("work", "seconds", "exposed"),
    [
        ([start(5), wait(0), compute(10)], 15, 5),  # nothing hidden
        ([start(5), compute(10), wait(0)], 10, 0),  # all of it
        ([start(12), compute(10), wait(0)], 12, 2),  # longer than what hides it
        ([start(5), start(5), compute(4), wait(0), wait(1)], 10, 6),  # one group carries one after the other
        ([start(5), start(5, "b:0,1"), compute(4), wait(0), wait(1)], 10, 6),  # two share the link
    ],
)
def test_one_after_the_other_or_beside(work: list[Work], seconds: float, exposed: float) -> None:
    for timeline in (simulate([work, work]), simulate([work], alone=1)):
        assert timeline.seconds == pytest.approx(seconds)
        assert timeline.exposed == pytest.approx([exposed] * len(timeline.exposed))


def test_an_urgent_communication_is_slowed_by_a_bulky_one_beside_it() -> None:
    """4 s and 20 s share the link: the short one takes 8 s."""
    work = [start(20, "params:0,1"), start(4, "ulysses:0,1"), wait(1), compute(30), wait(0)]
    timeline = simulate([work, work])
    assert timeline.exposed == pytest.approx([8, 8])
    assert timeline.seconds == pytest.approx(38)


def test_a_late_rank_makes_the_others_wait() -> None:
    late = [compute(7), start(2), wait(1)]
    timeline = simulate([[start(2), wait(0)], late])
    assert timeline.seconds == pytest.approx(9)
    assert timeline.exposed == pytest.approx([9, 2])
    assert timeline.of_starts(0)[0] == pytest.approx((2, 9))  # on the wire only when both are there


def test_exchanges_meet_by_direction_and_use_each_direction_of_a_link_once() -> None:
    """A ring of three: all send at once and at full speed, and an uneven message takes its own time."""
    ring = [[send(3, (rank + 1) % 3, (rank - 1) % 3), wait(0)] for rank in range(3)]
    assert simulate(ring).seconds == pytest.approx(3)
    chain = [[send(3, 1, -1), wait(0)], [send(3, -1, 0), wait(0), send(3, 2, -1), wait(2)], [send(3, -1, 1), wait(0)]]
    assert simulate(chain).seconds == pytest.approx(6)
    uneven = [[send(4, 1, 1, 4, 1), wait(0)], [send(4, 0, 0, 1, 4), wait(0)]]
    of_rank = simulate(uneven)
    assert of_rank.seconds == pytest.approx(4)
    assert sorted(span.end for span in of_rank.spans if span.track.startswith("cp")) == pytest.approx([1, 1, 4, 4])


def test_ranks_that_block_one_another_are_found() -> None:
    with pytest.raises(AssertionError, match="block one another"):
        simulate([[start(1), wait(0)], [compute(1)]])


def test_the_trace_opens_in_a_viewer() -> None:
    work = [start(5), compute(2), wait(0), compute(1)]
    trace = json.loads(json.dumps(simulate([work, work]).chrome_trace()))
    complete = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {(event["pid"], event["tid"]) for event in complete} == {
        (rank, track) for rank in (0, 1) for track in ("compute", "wait", "all:0,1")
    }
    (waited,) = [event for event in complete if event["tid"] == "wait" and event["pid"] == 0]
    assert (waited["ts"], waited["dur"]) == pytest.approx((2e6, 3e6))


def test_measured_and_predicted_stand_side_by_side() -> None:
    timeline = simulate([[start(5), compute(2), wait(0)]] * 2)
    trace = timeline.chrome_trace(measured=[Span(1, "compute", "compute", 0.0, 2.5, 1)])
    names = {each["pid"]: each["args"]["name"] for each in trace["traceEvents"] if each["ph"] == "M"}
    assert names == {0: "rank 0, predicted", 2: "rank 1, predicted", 3: "rank 1, measured"}
    (measured,) = [each for each in trace["traceEvents"] if each["ph"] == "X" and each["pid"] == 3]
    assert measured["dur"] == pytest.approx(2.5e6)


def test_a_plan_is_simulated_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.json"
    assert main(["simulate", "--demo-model", "--ranks", "2", "--seq", "48", "--trace", str(trace)]) == 0
    printed = capsys.readouterr().out
    assert "a step takes" in printed
    header = next(line for line in printed.splitlines() if line.startswith("rank"))
    assert header.split()[:4] == ["rank", "computes", "waits", "done"]
    events = json.loads(trace.read_text())["traceEvents"]
    assert {each["pid"] for each in events} == {0, 1}
    assert {"compute", "wait"} < {each["tid"] for each in events if each["ph"] == "X"}
