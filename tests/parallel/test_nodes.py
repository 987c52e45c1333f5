"""Several nodes with ranks, caches and networks of their own, which read from one server."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.bench import harness, nodes


@pytest.mark.guarantee("nodes-vanish")
def test_nodes_fetch_their_own_part_once_and_a_run_goes_on_after_nodes_vanish() -> None:
    """Killed, come back with damaged or lost caches, and joined. Where the machine allows it, each node
    has a network namespace.
    """
    program = Path(nodes.__file__)
    results = harness.run_side(
        [program, "--size", "small", "--json", "--figures", "egress", "vanishing"]
    )
    [(plain, cached, filled)] = results["egress"].values()
    assert 1.0 <= plain < 1.02
    assert 1.0 <= cached < 1.08
    assert filled < 0.02
    vanishing = results["vanishing"]
    assert vanishing["same"] == vanishing["samples"] == vanishing["places"] > 2000
