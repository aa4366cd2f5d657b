"""The page of peers follows from the measurements, and says where megaframe is not the fastest."""

from pathlib import Path

import compare_peers
import train_cpu


def test_the_page_is_made_of_the_results_that_are_there():
    assert {comparison.script for comparison in compare_peers.list_measured()} == {
        comparison.script for comparison in compare_peers.COMPARISONS
    }
    assert compare_peers.PAGE.read_text(encoding="utf-8") == compare_peers.format_page()


def test_the_table_of_processors_is_made_of_all_results():
    page = compare_peers.ROOT / "benchmarks/README.md"
    assert train_cpu.format_processor_table() in page.read_text(encoding="utf-8")


def test_a_peer_is_compared_with_the_one_of_ours_above_it():
    def row(name, speed):
        spread = {"median": speed, "low": speed, "high": speed}
        return {"name": name, "speed": spread, "peak_rss_bytes": 1e9}

    rows = [row("megaframe 1", 300.0), row("one", 200.0), row("megaframe 2", 90.0), row("two", 100)]
    lines = compare_peers.format_table("2xfp32", rows).splitlines()
    assert [line.split("|")[-2].strip() for line in lines[2:]] == ["", "1.50", "", "0.90"]
    assert compare_peers.find_fastest(rows, ours=False)["name"] == "one"


def test_each_comparison_is_called_with_the_peers_that_it_takes():
    """The guide of each comparison exists, too."""
    for comparison in compare_peers.COMPARISONS:
        script = (compare_peers.ROOT / "benchmarks" / comparison.script).read_text(encoding="utf-8")
        for peer in comparison.peers:
            assert f"--{peer.replace('_', '-')}" in script, (comparison.script, peer)
        assert (Path(compare_peers.PAGE).parent / comparison.guide).exists()
