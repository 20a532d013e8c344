import random

import pytest
from kimi_worker.handoff.plan import (
    READ_BACK_BYTES,
    READ_BACK_LIMIT,
    Copy,
    RegionLayout,
    Unit,
    digest_of_copies,
    digest_of_reservation,
    num_bytes,
    plan_copies,
    read_back_targets,
    transfer_bytes,
)
from kimi_worker.protocol.handoff import TransferKey, Write

PAGES, STATE = RegionLayout("pages", Unit.PAGE, 100), RegionLayout("state", Unit.SLOT, 7)
LAYOUT = (PAGES, STATE)
KEY = TransferKey("tcp://decode:1", 5, 1)


def write(local: list[int], remote: list[int], local_slot: int = 0, remote_slot: int = 0) -> Write:
    return Write(KEY, local, remote, local_slot, remote_slot)


def test_neighbours_on_both_sides_become_one_copy() -> None:
    copies = plan_copies(LAYOUT, write([4, 5, 6], [1, 2, 3], 2, 9))
    assert copies == [Copy(0, 400, 100, 300), Copy(1, 14, 63, 7)]


def test_neighbours_on_one_side_only_stay_apart() -> None:
    assert plan_copies((PAGES,), write([4, 5], [3, 1])) == [Copy(0, 400, 300, 100), Copy(0, 500, 100, 100)]


def test_neighbours_are_found_in_any_order() -> None:
    assert plan_copies((PAGES,), write([6, 4, 5], [12, 10, 11])) == [Copy(0, 400, 1000, 300)]


def test_no_pages_still_move_the_slot() -> None:
    assert plan_copies(LAYOUT, write([], [], 1, 1)) == [Copy(1, 7, 7, 7)]


def test_lists_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="2 local pages for 1 remote pages"):
        plan_copies(LAYOUT, write([1, 2], [1]))


@pytest.mark.parametrize(("local", "remote", "side"), [([1, 1], [1, 2], "local"), ([1, 2], [3, 3], "remote")])
def test_a_page_named_twice_is_refused(local: list[int], remote: list[int], side: str) -> None:
    with pytest.raises(ValueError, match=f"a {side} page appears twice"):
        plan_copies(LAYOUT, write(local, remote))


@pytest.mark.parametrize("seed", range(50))
def test_copies_move_each_byte_of_each_unit_once(seed: int) -> None:
    rng = random.Random(seed)
    count = rng.randint(0, 20)
    placed = write(rng.sample(range(24), count), rng.sample(range(24), count), rng.randrange(4), rng.randrange(4))
    source = [bytes(rng.randbytes(2400)), bytes(rng.randbytes(28))]
    target = [bytearray(2400), bytearray(28)]
    copies = plan_copies(LAYOUT, placed)
    for copy in copies:
        end = copy.local_offset + copy.num_bytes
        target[copy.region][copy.remote_offset : copy.remote_offset + copy.num_bytes] = source[copy.region][
            copy.local_offset : end
        ]
    for local, remote in zip(placed.local_pages, placed.remote_pages, strict=True):
        assert target[0][remote * 100 : remote * 100 + 100] == source[0][local * 100 : local * 100 + 100]
    assert (
        target[1][placed.remote_slot * 7 : placed.remote_slot * 7 + 7]
        == source[1][placed.local_slot * 7 : placed.local_slot * 7 + 7]
    )
    assert num_bytes(copies) == transfer_bytes(LAYOUT, count)
    assert digest_of_copies(copies) == digest_of_reservation(LAYOUT, placed.remote_pages, placed.remote_slot)


def test_digest_tells_other_places_apart() -> None:
    digests = {
        digest_of_reservation(LAYOUT, pages, slot) for pages in ([], [1], [1, 2], [1, 3], [2, 3]) for slot in (0, 1)
    }
    assert len(digests) == 10
    assert digest_of_reservation(LAYOUT, [2, 1], 0) == digest_of_reservation(LAYOUT, [1, 2], 0)


@pytest.mark.parametrize("num_pages", [1, 2, 63, 64, 65, 500])
def test_read_back_reaches_every_region_within_its_limit(num_pages: int) -> None:
    pages = [page * 2 for page in range(num_pages)]
    copies = plan_copies(LAYOUT, write(pages, pages))
    targets = read_back_targets(copies)
    assert {target.region for target in targets} == {0, 1}
    assert len(targets) <= READ_BACK_LIMIT
    assert len(targets) == len(set(targets))
    for target in targets:
        assert target.num_bytes == min(READ_BACK_BYTES, LAYOUT[target.region].bytes_per_unit)
    ends = {(copy.region, copy.remote_offset + copy.num_bytes) for copy in copies}
    assert {(target.region, target.remote_offset + target.num_bytes) for target in targets} <= ends
