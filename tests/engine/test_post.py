"""Messages between workers, whatever befalls those: random histories, in milliseconds."""

import collections

import pytest

from tests.engine.post_world import Gone, World
from tf_dsgd.membership.mailboxes import Mailboxes

HISTORIES = 40


@pytest.mark.parametrize("first", range(0, 4 * HISTORIES, HISTORIES))
def test_each_mini_batch_counts_once_in_every_copy_and_nobody_waits_without_end(first):
    seen = collections.Counter()
    for seed in range(first, first + HISTORIES):
        world = World(seed)
        try:
            world.run()
        except (AssertionError, KeyError, RuntimeError, Gone) as error:
            raise AssertionError(f"World({seed})") from error
        seen.update(world.seen)
    assert min(seen.values()) > 0, seen  # all of it has happened


def test_after_an_error_copies_are_equal():
    """With what whole workers had not sent in them, and without what failed."""
    sent = collections.Counter()
    for seed in range(1000, 1000 + HISTORIES):
        world = World(seed, errors=True)
        try:
            world.run()
        except (AssertionError, KeyError, RuntimeError, Gone) as error:
            raise AssertionError(f"World({seed}, errors=True)") from error
        sent.update(world.sent_after_errors)
    assert sent[True] > 10 and sent[False] > 10, sent


def one_posted(workers):
    """Mailboxes of so many, all of whom have begun, and the key of a message of the first."""
    boxes = Mailboxes()
    for m in range(workers):
        boxes.joins(m, 0, 0)
        boxes.begins(m)
    key = boxes.key()
    boxes.posted(0, key)
    return boxes, key


def test_a_message_counts_when_all_have_it():
    """By hand: three workers, of whom the third is lost while it has not got the first message."""
    boxes, key = one_posted(3)
    assert boxes.missing(key) == [1, 2]
    boxes.arrived(1, boxes.entry(1), key)
    with pytest.raises(RuntimeError, match=r"missing: \[2\]"):
        boxes.number(key)
    assert boxes.due(1).messages == ()
    boxes.leaves(2)
    assert boxes.number(key) == 1
    assert boxes.due(1).messages == boxes.due(0).messages == ((key, 1),)


def test_a_message_whose_sender_is_lost_is_thrown_away():
    boxes, key = one_posted(3)
    boxes.arrived(1, boxes.entry(1), key)
    boxes.leaves(0)
    assert boxes.due(1).thrown == (key,) and boxes.due(2).thrown == ()
    boxes.arrived(2, boxes.entry(2), key)  # which was on its way
    due = boxes.due(2)
    assert due.thrown == (key,) and due.messages == ()
    boxes.took(2, due)
    assert boxes.due(2).thrown == ()


def test_who_joins_lacks_what_came_before_and_after_its_model():
    """Of three messages its model has one; the third was sent to it, as to all."""
    boxes = Mailboxes()
    boxes.joins(0, 0, 0)
    boxes.begins(0)
    for n in (1, 2):
        key = boxes.key()
        boxes.posted(0, key)
        assert boxes.number(key) == n
    boxes.joins(1, 0, 1)
    third = boxes.key()
    boxes.posted(0, third)
    assert boxes.missing(third) == [1]
    boxes.arrived(1, boxes.entry(1), third)
    boxes.number(third)
    assert boxes.lacks(1) == [2]
    with pytest.raises(RuntimeError, match=r"Worker 1 lacks"):
        boxes.begins(1)
    boxes.arrived(1, boxes.entry(1), 2)
    boxes.begins(1)
    assert boxes.due(1).messages == ((2, 2), (3, 3)) and boxes.due(1).version == 3


def test_what_came_for_an_earlier_mailbox_is_not_in_this_one():
    boxes, key = one_posted(2)
    before = boxes.entry(1)
    boxes.joins(1, 0, 0)
    boxes.arrived(1, before, key)
    assert boxes.missing(key) == [1]


def test_all_is_sent_to_who_has_not_begun_and_can_give_it():
    """Of two workers one goes on alone and is lost: the other has it all, and a third gets it."""
    boxes = Mailboxes()
    boxes.begin_anew(5, {0: 0, 1: 3})
    boxes.begins(0)
    key = boxes.key()
    boxes.posted(0, key)
    assert boxes.missing(key) == [1] and boxes.is_full(1, 3) and not boxes.has_begun(1)
    boxes.arrived(1, boxes.entry(1), key)
    assert boxes.number(key) == 6
    assert boxes.giver(1) == 0
    boxes.leaves(0)
    assert boxes.giver(1) is None and boxes.giver(2) == 1
    boxes.joins(2, 0, boxes.taken(1))
    assert boxes.taken(2) == 5 and boxes.lacks(2) == [key]
    assert boxes.due(1).messages == ((key, 6),)
