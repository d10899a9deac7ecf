"""Which batches of the workers' pipelines go to whom, when workers are lost."""

import pytest

from tf_dsgd.strategies.pipelines import Progress, Segment

pytestmark = pytest.mark.beside_others


def taken(progress, worker, count, lost=()):
    return progress.draw(worker, min(count, progress.limit(worker, lost)), lost)


def test_each_worker_has_its_own_pipeline():
    progress = Progress([None, None], [5, 3])
    assert taken(progress, 0, 4) == Segment(0, 0, 4)
    assert taken(progress, 1, 4) == Segment(1, 0, 3)
    assert progress.limit(1, ()) == 0
    assert taken(progress, 0, 4) == Segment(0, 4, 1)
    assert progress.limit(0, ()) == 0


def test_what_a_lost_worker_had_and_left_goes_to_another():
    progress = Progress([None, None], [4, 10])
    first, second = taken(progress, 1, 3), taken(progress, 1, 2)
    assert taken(progress, 0, 4, [1]) == Segment(0, 0, 4)
    progress.give_back([first, second])
    got = []
    while progress.limit(0, [1]):
        got.append(taken(progress, 0, 2, [1]))
    assert got == [
        Segment(1, 0, 2),
        Segment(1, 2, 1),
        Segment(1, 3, 2),
        Segment(1, 5, 2),
        Segment(1, 7, 2),
        Segment(1, 9, 1),
    ]


def test_a_worker_that_is_back_goes_on_with_its_own():
    progress = Progress([None, None], [2, 6])
    taken(progress, 1, 2)
    assert taken(progress, 0, 2) == Segment(0, 0, 2)
    assert progress.limit(0, ()) == 0
    assert taken(progress, 0, 3, [1]) == Segment(1, 2, 3)
    assert taken(progress, 1, 3) == Segment(1, 5, 1)


def test_tokens_are_as_many_as_batches():
    progress = Progress([None, None], [2, 1])
    assert [progress.take() for _ in range(4)] == [True, True, True, False]
    assert progress.at_end()


def test_more_than_there_is():
    progress = Progress([None], [2])
    with pytest.raises(RuntimeError, match="cannot take 3"):
        progress.draw(0, 3, ())
