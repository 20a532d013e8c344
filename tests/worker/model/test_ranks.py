"""The arithmetic of ranks."""

import pytest
from kimi_worker.parallel.ranks import ParallelError, RankPlace, place
from kimi_worker.settings import ParallelSettings

GROUP = ParallelSettings(nodes_per_group=2, ranks_per_node=8, tensor_parallel=2)


def test_every_rank_has_one_place() -> None:
    places = [place(GROUP, ordinal, local) for ordinal in range(2) for local in range(8)]
    assert [here.rank for here in places] == list(range(16))
    assert [(here.ordinal, here.local) for here in places] == [(i // 8, i % 8) for i in range(16)]
    assert [here.lane for here in places] == [i // 2 for i in range(16)]
    assert [here.local_lane for here in places] == [i % 8 // 2 for i in range(16)]
    assert [here.leader for here in places if here.is_leader] == list(range(0, 16, 2))
    assert places[0].num_lanes == 8
    for here in places:
        assert here.rank in here.lane_ranks(here.lane)
        assert here.lane_ranks(here.lane)[here.tp_rank] == here.rank


def test_experts_and_heads_are_shared_out_once() -> None:
    places = [place(GROUP, ordinal, local) for ordinal in range(2) for local in range(8)]
    assert [expert for here in places for expert in here.experts(896)] == list(range(896))
    assert [head for here in places[:2] for head in here.share(96, "heads")] == list(range(96))


@pytest.mark.parametrize(("ordinal", "local"), [(2, 0), (-1, 0), (0, 8), (0, -1)])
def test_ranks_outside_the_group_are_refused(ordinal: int, local: int) -> None:
    with pytest.raises(ParallelError, match="outside"):
        place(GROUP, ordinal, local)


def test_uneven_shares_are_refused() -> None:
    with pytest.raises(ParallelError, match="num_experts 10 is not a multiple of the group's 16 ranks"):
        place(GROUP, 0, 0).experts(10)
    with pytest.raises(ParallelError, match="heads 5 is not a multiple of tensor_parallel 2"):
        RankPlace(0, 2, 2, 2).share(5, "heads")
