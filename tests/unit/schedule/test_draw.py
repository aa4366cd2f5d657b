"""Drawings: they parse, and show every action once, where the timeline has it."""

import json
import re
from collections import Counter, defaultdict
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from random_schedules import draw_schedules, schedule_of

from megaframe.schedule import lower
from megaframe.schedule.costs import ActionCosts, parse_costs
from megaframe.schedule.draw_svg import draw_svg
from megaframe.schedule.draw_text import draw_text
from megaframe.schedule.draw_trace import draw_trace
from megaframe.schedule.simulate import simulate

few = settings(deadline=None, max_examples=40)
SVG = "{http://www.w3.org/2000/svg}"


def count_names(timeline):
    return Counter(str(interval.action) for intervals in timeline.compute for interval in intervals)


def test_a_column_is_a_unit_of_time():
    schedule = schedule_of("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1")
    assert draw_text(simulate(schedule, ActionCosts(1, 2, 1))).splitlines() == [
        "from 0 s",
        "rank 0 F0 F1 .  .  .  B0------ .  B1------",
        "rank 1 .  F0 B0------ F1 B1------ .  .  .",
    ]


def test_long_grids_are_cut_into_bands_and_longer_ones_scaled():
    schedule = schedule_of("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1")
    bands = draw_text(simulate(schedule, parse_costs("F=1,B=4,W=4")), width=37)
    assert [line for line in bands.splitlines() if "from" in line] == [
        "from 0 s",
        "from 10 s",
        "from 20 s",
    ]
    scaled = draw_text(simulate(schedule, parse_costs("F=1,B=4,W=4.01")), width=27).splitlines()
    assert scaled[1:] == ["rank 0 F......BBBBBB.BBBBBB", "rank 1 .BBBBBBFBBBBBB......"]


@given(draw_schedules())
@few
def test_text_names_every_action_that_takes_time_once(schedule):
    timeline = simulate(schedule, ActionCosts().divide_by_chunks(1))
    text = draw_text(timeline, width=400)
    several = len(schedule.rank_of) > len(schedule.ranks)
    labels = Counter()
    for line in text.splitlines():
        match = re.fullmatch(r"rank (\d+) (.*)", line)
        if match:
            cells = match[2].replace("-", " ").replace(".", " ").split()
            labels.update(cell if several else match[1] + cell for cell in cells)
    if several:
        assert labels == count_names(timeline)
    else:
        stage = {str(schedule.rank_of[s]): s for s in range(len(schedule.rank_of))}
        renamed = Counter({f"{stage[key[0]]}{key[1:]}": n for key, n in labels.items()})
        assert renamed == count_names(timeline)


@given(draw_schedules())
@few
def test_svg_shows_every_action_once_within_the_frame(schedule):
    timeline = simulate(schedule, ActionCosts(1, 1.5, 0.5, comm=0.25))
    root = ElementTree.fromstring(draw_svg(timeline, "file:<a&b>"))
    assert root.find(f"{SVG}title").text.startswith("file:<a&b>: ")
    groups = [group for group in root.iter(f"{SVG}g") if group.get("class") == "action"]
    assert Counter(g.find(f"{SVG}title").text.split(":")[0] for g in groups) == count_names(
        timeline
    )
    width, height = float(root.get("width")), float(root.get("height"))
    rows = defaultdict(list)
    for group in groups:
        box = group.find(f"{SVG}rect")
        left, top = float(box.get("x")), float(box.get("y"))
        rows[top].append((left, left + float(box.get("width"))))
        assert 0 <= left <= rows[top][-1][1] < width and 0 <= top < height
    assert len(rows) == len(schedule.ranks)
    for boxes in map(sorted, rows.values()):
        assert all(end <= start for (_, end), (start, _) in pairwise(boxes))


def test_svg_is_self_contained_and_knows_both_grounds():
    text = draw_svg(simulate(schedule_of("0F0 0B0"), ActionCosts()), "gpipe")
    assert "<script" not in text and "href" not in text and "url(" not in text
    assert "prefers-color-scheme: dark" in text
    assert "backward, both gradients" in text and "weight gradient" not in text
    assert "time 3, bubble 0.00%" in text


@given(draw_schedules())
@few
def test_trace_has_a_slice_per_action_and_transfer_and_arrows_between(schedule):
    timeline = simulate(lower(schedule), ActionCosts(1, 2, 1, comm=0.5))
    events = json.loads(draw_trace(timeline))["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    compute = [event for event in slices if event["tid"] == 0]
    assert Counter(event["name"] for event in compute) == count_names(timeline)
    lowered = Counter(str(a) for actions in lower(schedule).ranks for a in actions)
    sent = Counter(event["name"] for event in slices if event["cat"] in ("SEND", "RECV"))
    assert sent == Counter({n: c for n, c in lowered.items() if re.search("SEND|RECV", n)})
    lanes = defaultdict(list)
    for event in slices:
        lanes[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for spans in map(sorted, lanes.values()):
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert named == set(lanes)
    arrows = defaultdict(dict)
    for event in events:
        if event["ph"] in "stf":
            arrows[event["id"]][event["ph"]] = event
            starts = [start for start, _ in lanes[event["pid"], event["tid"]]]
            assert event["ts"] in starts
    assert len(arrows) == len(timeline.transfers)
    for arrow in arrows.values():
        assert arrow["s"]["ts"] == arrow["t"]["ts"] < arrow["f"]["ts"]
        assert arrow["s"]["pid"] != arrow["t"]["pid"] == arrow["f"]["pid"]


@pytest.mark.parametrize("draw", [draw_text, lambda t: draw_svg(t, "x"), draw_trace])
def test_a_step_that_takes_no_time_can_be_drawn(draw):
    assert draw(simulate(schedule_of("0F0 0B0"), ActionCosts(0, 0, 0)))
