"""Stamps that are handed on when an extent leaves, against ones that are written down at once."""

from __future__ import annotations

import random

import pytest

from kvcm.metaindex.book import Book
from kvcm.metaindex.entry import Entry
from kvcm.metaindex.order import EvictionOrder
from kvcm.metaindex.policy import Policy
from kvcm.metaindex.records import Phase, Run
from tests.metaindex.test_order import POLICIES, entry


class Eager:
    """A book, and beside it the stamps as a touch of every ancestor would make them."""

    def __init__(self, policy: Policy, seed: int) -> None:
        self.chance = random.Random(seed)
        self.book = Book(EvictionOrder(policy))
        self.stamps: dict[Entry, int] = {}
        self.parent: dict[Entry, Entry | None] = {}
        self.now_ms = 0

    def path(self, last: Entry) -> list[Entry]:
        """The chain that ends with an extent, from its head on."""
        chain: list[Entry] = []
        at: Entry | None = last
        while at is not None:
            chain.append(at)
            at = self.parent[at]
        return chain[::-1]

    def used(self, chain: list[Entry]) -> None:
        self.now_ms += 1
        for one in chain:
            self.stamps[one] = self.now_ms

    def grow(self) -> None:
        living = list(self.stamps)
        parent = self.chance.choice(living) if living and self.chance.random() < 0.9 else None
        depth = parent.depth + 1 if parent is not None else 0
        new = entry(len(self.parent), at_ms=self.now_ms + 1, depth=depth)
        self.parent[new] = parent
        self.book.add(new, (parent,) if parent is not None else ())
        chain = self.path(new)
        self.used(chain)
        self.book.touch_chain(chain, self.now_ms, write=True)

    def read(self) -> None:
        chain = self.path(self.chance.choice(list(self.stamps)))
        self.used(chain)
        if self.chance.random() < 0.5:
            self.book.touch_chain(chain, self.now_ms)
        else:
            self.book.touch((chain[-1],), self.now_ms)

    def evict(self) -> Entry:
        (victim,) = self.book.order.coldest(1)
        victim.phase = Phase.RETIRED
        self.book.leave(victim, Phase.SETTLED)
        return victim


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(8))
def test_what_leaves_was_last_used_when_its_last_descendant_was(policy: Policy, seed: int) -> None:
    model = Eager(policy, seed)
    for _ in range(400):
        if len(model.stamps) < 5 or model.chance.random() < 0.4:
            model.grow()
        elif model.chance.random() < 0.5:
            model.read()
        else:
            victim = model.evict()
            assert victim.stamp_ms == model.stamps.pop(victim)
    assert model.book.last_uses(model.stamps) == model.stamps


def test_a_touch_writes_down_one_extent_however_long_the_chain() -> None:
    book = Book(EvictionOrder(POLICIES[0]))
    chain: list[Entry] = []
    for number in range(50):
        chain.append(entry(number, at_ms=1, depth=number))
        book.add(chain[-1], chain[-2:-1])
    book.touch_chain(chain, 2)
    assert list(book.dirty) == chain[-1:]


def test_what_hands_its_stamp_on_has_it_stored() -> None:
    book = Book(EvictionOrder(POLICIES[0]))
    head, tail = entry(1, at_ms=1), entry(2, at_ms=5, depth=1)
    book.add(head)
    book.add(tail, (head,))
    tail.phase = Phase.RETIRED
    book.leave(tail, Phase.SETTLED)
    assert head.stamp_ms == 5
    assert list(book.dirty) == [head]


def test_a_request_shows_a_new_parent_at_once_when_the_old_one_left() -> None:
    book = Book(EvictionOrder(POLICIES[0]))
    gone, tail = entry(1), entry(2, depth=1)
    book.add(gone)
    book.add(tail, (gone,))
    gone.phase = Phase.RETIRED
    book.leave(gone, Phase.SETTLED)
    again = entry(3)
    book.add(again)
    # No eviction came between, which is when the orphans are told.
    book.touch_chain([again, tail], 5)
    assert tail.parents == (again,)
    book.order.coldest(0)
    assert not tail.orphan
    assert book.use_of(tail).parents == (again.extent_id,)


def test_a_request_shows_the_copy_that_is_used_beside_one_that_cannot_be_reached() -> None:
    book = Book(EvictionOrder(POLICIES[0]))
    away, tail, copy = entry(1, storage="away"), entry(2, depth=1), entry(3)
    book.add(away)
    book.add(tail, (away,))
    book.add(copy)
    book.touch_chain([copy, tail], 5, write=True)
    assert tail.parents == (away,)
    book.touch_chain([copy, tail], 5)
    assert tail.parents == (away, copy)
    assert book.order.coldest(3) == [tail]
    book.dirty.clear()
    book.touch_chain([copy, copy, tail, tail], 5)
    assert tail.parents == (away, copy)
    assert book.use_of(tail).parents == (copy.extent_id,)


def test_a_parent_that_a_request_showed_is_known_after_the_book_is_read_again() -> None:
    book = Book(EvictionOrder(POLICIES[0]))
    head, gone, tail = entry(1), entry(2, depth=1), entry(3, depth=2)
    book.add(head)
    book.add(gone, (head,))
    book.add(tail, (gone,))
    gone.phase = Phase.RETIRED
    book.leave(gone, Phase.SETTLED)
    again = entry(4, depth=1)
    book.add(again, (head,))
    book.order.coldest(0)
    assert tail.orphan
    book.touch_chain([head, again, tail], 5)
    use = book.use_of(tail)
    assert use.parents == (again.extent_id,)

    read = Book(EvictionOrder(POLICIES[0]))
    lost = (Run(0, 2, gone.extent_id, 0),)
    read.add_unlinked(tail2 := entry(3, at_ms=5, depth=2), lost, (), use.parents)
    read.add_unlinked(again2 := entry(4, at_ms=1, depth=1), (Run(0, 1, head.extent_id, 0),))
    read.add_unlinked(head2 := entry(1, at_ms=1), ())
    for step in (read.link_up, read.follow_up, read.admit):
        for one in (tail2, again2, head2):
            step(one)
    gone_in_order = []
    while victims := read.order.coldest(1):
        victims[0].phase = Phase.RETIRED
        read.leave(victims[0], Phase.SETTLED)
        gone_in_order += victims
    assert gone_in_order == [tail2, again2, head2]


def test_deadlines_that_have_passed_are_counted_but_for_entries_that_are_over() -> None:
    book = Book(EvictionOrder(POLICIES[0]))
    for n in range(40):
        opened = entry(n)
        opened.phase = Phase.OPEN
        book.add(opened)
        book.expect(opened, float(n))
    assert [book.overdue_count(now) for now in (-1.0, 0.0, 9.5, 100.0)] == [0, 1, 10, 40]
    book.forget(entry(5).extent_id)
    assert book.overdue_count(9.5) == 9
