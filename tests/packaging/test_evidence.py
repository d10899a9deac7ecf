"""What the studies' driver makes of runs: choices, intervals, verdicts; resuming, wider grids."""

import dataclasses
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from tests.packaging.repository import ROOT


@pytest.fixture
def evidence(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "reproduce"))
    import evidence

    return evidence


def runs(condition, by_rate, measure="error"):
    """Of values `{rate: [of each seed]}`."""
    return [
        {"condition": condition, "seed": seed, "rate": rate, "values": {measure: value}}
        for rate, values in by_rate.items()
        for seed, value in enumerate(values, 1)
    ]


def test_a_rate_is_never_chosen_by_the_seed_it_is_judged_by(evidence):
    # Seed 1 alone would take the first rate; the others take the second for it. Without seed 2
    # the first is best (0 + 3 against 4 + 1), without seed 3 the second is.
    found = runs({"a": 1}, {0.5: [0.0, 9.0, 3.0], 1.0: [4.0, 2.0, 1.0]})
    results = evidence.Results(found, (), "error")
    assert results.judged({"a": 1}, "error", [1, 2, 3]).tolist() == [4.0, 9.0, 1.0]
    assert results.best({"a": 1}) == (1.0,)
    assert results.edges({"a": 1}) == (True, True)


def test_what_is_tuned_is_chosen_with_the_rate(evidence):
    found = [
        *runs({"m": 4, "lambda": 1.0}, {0.5: [5, 5], 1.0: [4, 4], 2.0: [6, 6]}),
        *runs({"m": 4, "lambda": 3.0}, {0.5: [5, 5], 1.0: [3, 2], 2.0: [6, 6]}),
    ]
    results = evidence.Results(found, ("lambda",), "error")
    assert results.conditions() == [{"m": 4}]
    assert results.best({"m": 4}) == (3.0, 1.0)
    assert results.edges({"m": 4}) == (False, False)
    given = {"m": 4, "lambda": 1.0}
    assert results.settings(given) == [(1.0, 0.5), (1.0, 1.0), (1.0, 2.0)]
    assert results.judged(given, "error", [1, 2]).tolist() == [4.0, 4.0]
    assert results.judged({"m": 4}, "error", [1, 2]).tolist() == [3.0, 2.0]


def test_holm_is_that_of_a_book(evidence):
    # Four p in ascending order times 4, 3, 2, 1, and never less than the one before.
    assert evidence.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert evidence.holm([0.6, 0.9]) == [1.0, 1.0]


def test_an_interval_holds_the_mean_as_often_as_it_says(evidence):
    random = np.random.default_rng(0)
    inside = 0
    for _ in range(4000):
        _, low, high = evidence.interval(random.normal(3.0, 2.0, 6))
        inside += low < 3.0 < high
    assert inside / 4000 == pytest.approx(0.95, abs=0.015)  # 4 standard errors


def test_ranks_say_what_scipy_says(evidence):
    random = np.random.default_rng(1)
    for n in (2, 5, 9, 16):
        values = random.standard_t(2, n) + 0.3
        expected = stats.wilcoxon(values, alternative="greater", method="exact").pvalue
        assert evidence.one_sided_by_rank(values, 0.0) == pytest.approx(expected)
        assert evidence.one_sided_by_rank(values + 7, 7.0) == pytest.approx(expected)


def test_an_interval_by_rank_is_what_the_test_does_not_refuse(evidence):
    # Seconds of ten turns, two of which something else has disturbed.
    values = np.array([1.2, 1.3, 1.1, 1.25, 1.15, 1.22, 1.18, 1.28, 2.6, 2.5])
    median, low, high = evidence.interval_by_rank(values)
    assert 1.2 < median < 1.3  # the mean is 1.478
    refused = (1 - evidence.LEVEL) / 2
    for end, inward in ((low, 1e-9), (high, -1e-9)):
        sign = np.sign(inward)
        assert evidence.one_sided_by_rank(sign * values, sign * (end - inward)) < refused
        assert evidence.one_sided_by_rank(sign * values, sign * (end + inward)) >= refused
    assert evidence.interval_by_rank(np.array([3.0, 1.0])) == (2.0, 1.0, 3.0)


def test_a_cell_may_choose_its_rates_by_what_it_compares(evidence):
    by_rate = {0.5: (4.0, 9.0), 1.0: (6.0, 2.0)}
    found = [
        {
            "condition": {"side": "a"},
            "seed": seed,
            "rate": rate,
            "values": {"error": at_the_end, "error_1": early},
        }
        for rate, (at_the_end, early) in by_rate.items()
        for seed in (1, 2)
    ]
    results = evidence.Results(found, (), "error")
    for chosen_by, mean in ((None, 9.0), ("error_1", 2.0)):
        cell = evidence.Cell("", {"side": "a"}, 0.0, "<", "error_1", chosen_by=chosen_by)
        assert evidence.compared(results, cell).mean == mean


def outcome(evidence, differences, expected, **options):
    a = runs({"side": "a"}, {1.0: differences})
    b = runs({"side": "b"}, {1.0: [0.0] * len(differences)})
    cell = evidence.Cell("", {"side": "a"}, {"side": "b"}, expected, **options)
    return evidence.compared(evidence.Results([*a, *b], (), "error"), cell)


CLEAR, NOISY = [-1.0, -1.1, -0.9, -1.05], [-1.0, 1.2, -0.8, 0.9]


@pytest.mark.parametrize(
    ("differences", "expected", "margin", "word"),
    [
        (CLEAR, "<", 0.0, "as expected"),
        (CLEAR, ">", 0.0, "the opposite"),
        (NOISY, "<", 0.0, "cannot tell"),
        (CLEAR, "=", 2.0, "as expected"),
        (CLEAR, "=", 0.5, "the opposite"),
        (NOISY, "=", 0.5, "cannot tell"),
        (CLEAR, "=", 1.02, "cannot tell"),
        (CLEAR, "<=", 0.5, "as expected"),
        (NOISY, "<=", 0.5, "cannot tell"),
        ([-d for d in CLEAR], ">", 0.5, "as expected"),
        ([-d for d in CLEAR], ">", 1.02, "cannot tell"),
        ([-d for d in CLEAR], ">", 2.0, "the opposite"),
        ([-d for d in CLEAR], "<=", 0.5, "the opposite"),
        ([-d for d in CLEAR], "<=", 1.02, "cannot tell"),
        ([-d for d in CLEAR], "<=", 2.0, "as expected"),
    ],
)
def test_a_cell_says_only_what_is_sure(evidence, differences, expected, margin, word):
    found = outcome(evidence, differences, expected, margin=margin)
    ((_, said),) = evidence.said([found])
    assert said == word
    assert found.mean == pytest.approx(np.mean(differences))
    assert found.low < found.mean < found.high


def test_a_disturbed_turn_hides_little_from_ranks(evidence):
    times = [0.8, 0.82, 0.79, 0.81, 0.8, 0.83, 0.78, 0.81, 0.8, 6.0]
    differences = [1 - each for each in times]
    by_mean, by_rank = (
        outcome(evidence, differences, ">", by_rank=by_rank) for by_rank in (False, True)
    )
    assert by_mean.mean < 0 < by_rank.mean
    assert by_rank.p < 0.05 < 0.5 < by_mean.p


def test_one_comparison_says_what_its_interval_says(evidence):
    """As expected, if and only if the interval of 95 % leaves no difference out."""
    random = np.random.default_rng(1)
    seen = set()
    for _ in range(400):
        found = outcome(evidence, list(random.normal(-0.5, 1.0, 6)), "<")
        ((_, said),) = evidence.said([found])
        words = {found.high < 0.0: "as expected", found.low > 0.0: "the opposite"}
        assert said == words.get(True, "cannot tell")
        seen.add(said)
    assert "as expected" in seen and "cannot tell" in seen


def test_of_equal_means_the_smaller_rate_is_chosen(evidence):
    """The last seed chooses by the three others, which are the same at both rates."""
    small, large = [0.1, 0.2, 0.3, 0.6], [0.1, 0.2, 0.3, 1.6]
    others = [(sum(values) - values[-1]) / 3 for values in (small, large)]
    assert others[0] > others[1]  # by rounding
    results = evidence.Results(runs({"side": "a"}, {0.5: large, 0.25: small}), (), "error")
    assert results.choices({"side": "a"}, [1, 2, 3, 4])[-1] == (0.25,)


def test_a_difference_of_differences_and_a_ratio(evidence):
    sides = {"a": [9.0, 8.0], "b": [4.0, 4.0], "c": [2.0, 3.0], "d": [1.0, 1.0]}
    found = [run for side, values in sides.items() for run in runs({"s": side}, {1.0: values})]
    results = evidence.Results(found, (), "error")
    a, b, c, d = ({"s": side} for side in sides)
    cell = evidence.Cell("", a, b, ">", beside=(c, d))
    assert evidence.compared(results, cell).mean == pytest.approx(np.mean([9 - 4 - 1, 8 - 4 - 2]))
    ratio = evidence.compared(results, evidence.Cell("", b, a, "<", ratio=True))
    middle = np.sqrt((9 / 4) * (8 / 4))
    assert evidence.shown(ratio, 3).startswith(f"{middle:.3f} times (")
    assert evidence.compared(results, evidence.Cell("", a, {"s": "nobody"}, "<")) is None


def test_a_verdict_needs_every_cell(evidence):
    yes, no, unknown = evidence.YES, evidence.NO, evidence.UNKNOWN
    assert evidence.verdict([yes, yes]) == "reproduced"
    assert evidence.verdict([yes, unknown]) == evidence.verdict([yes, no]) == "partly"
    assert evidence.verdict([no, unknown]) == "not reproduced"
    assert evidence.verdict([unknown]) == "cannot tell"


def test_what_is_said_of_some_cell_needs_one(evidence):
    yes, no, unknown = evidence.YES, evidence.NO, evidence.UNKNOWN
    assert evidence.verdict([yes, no, no], some=True) == "reproduced"
    assert evidence.verdict([unknown, no], some=True) == "cannot tell"
    assert evidence.verdict([no, no], some=True) == "not reproduced"


def test_chance_seldom_reproduces_a_claim(evidence):
    """Where nothing is, a cell of four says something in at most 5 % of studies."""
    random = np.random.default_rng(1)
    false = 0
    for _ in range(1000):
        cells = [outcome(evidence, random.standard_normal(6).tolist(), "<") for _ in range(4)]
        false += any(word == evidence.YES for _, word in evidence.said(cells))
    assert false / 1000 < 0.08  # 0.05 and 4 standard errors


@pytest.fixture
def made(evidence, tmp_path):
    """A study whose error is the distance of a rate from 2^best, and its calls.

    `best` is of both conditions, or of each.
    """
    import driver
    import pages

    calls = []

    def make(best, **options):
        def run(condition, seeds, rates, _):
            calls.append((condition["a"], tuple(seeds), tuple(np.log2(rates).round(6))))
            exponent = best[condition["a"] - 1] if isinstance(best, tuple) else best
            distance = np.abs(np.log2(rates) - exponent)[:, None] + 0.01 * np.array(seeds)
            return {"error": distance.tolist()}

        given = {"together": 2, "seeds": 4, **options}
        return driver.Study(
            "made", [{"a": 1}, {"a": 2}], lambda _: (-2, 0), run, {"steps": (10, 1)}, **given
        )

    def play(study, *arguments):
        calls.clear()
        path = tmp_path / "made.json"
        record = driver.main(study, "A study.", ["--results", str(path), *arguments])
        return record, pages.loaded(path), list(calls)

    return make, play


def test_a_study_goes_on_where_it_was_cut_off(made):
    make, play = made
    study = make(-1)
    _, content, calls = play(study, "--seeds", "2")
    assert calls[:2] == [(1, (1, 2), (-2, -1, 0)), (2, (1, 2), (-2, -1, 0))]
    assert calls[2:] == [(1, (1, 2), (-1.5, -0.5)), (2, (1, 2), (-1.5, -0.5))]
    assert len(content["runs"]) == 20 and len(content["origins"]) == 1
    _, content, calls = play(study)
    again = (-2, -1.5, -1, -0.5, 0)
    assert calls == [(1, (3, 4), again), (2, (3, 4), again)]
    assert len(content["runs"]) == 40 and len(content["origins"]) == 2
    _, content, calls = play(study)
    assert calls == [] and len(content["origins"]) == 2


def test_a_grid_is_made_wider_until_the_best_is_inside(made):
    make, play = made
    record, _, calls = play(make(2), "--seeds", "2", "--only", '"a": 1')
    assert [rates for *_, rates in calls] == [(-2, -1, 0), (1, 2), (3, 4), (1.5, 2.5)]
    assert record.results().edges({"a": 1}) == (False, False)
    # It ends where no best is found, and then adds none beside the last.
    _, _, calls = play(make(99), "--seeds", "2", "--only", '"a": 2')
    assert list(itertools.chain(*(rates for *_, rates in calls))) == list(range(-2, 7))


def compare(monkeypatch, evidence, **options):
    """Claims of the study `made`: its two conditions are compared."""
    import pages

    cell = evidence.Cell("1 less 2", {"a": 1}, {"a": 2}, "<", **options)
    monkeypatch.setattr(pages, "CLAIMS", [evidence.Claim("made", "it", "", "less", (cell,))])


def test_both_sides_of_a_comparison_have_as_many_rates(made, evidence, monkeypatch):
    compare(monkeypatch, evidence)
    make, play = made
    record, _, calls = play(make((2, -1)), "--seeds", "2")
    found = {a: [rates for each, _, rates in calls if each == a] for a in (1, 2)}
    assert found[1] == [(-2, -1, 0), (1, 2), (3, 4), (1.5, 2.5)]
    assert found[2] == [(-2, -1, 0), (-1.5, -0.5), (-4, -3, 1, 2)]
    assert [len(record.results().settings({"a": a})) for a in (1, 2)] == [9, 9]
    # That nothing is missing now, and that it ends where no best is found.
    assert play(make((2, -1)), "--seeds", "2")[2] == []


def test_levelling_ends_where_one_side_finds_no_best(made, evidence, monkeypatch):
    compare(monkeypatch, evidence)
    make, play = made
    record, _, _ = play(make((99, -1)), "--seeds", "2")
    assert [len(record.results().settings({"a": a})) for a in (1, 2)] == [9, 9]


def test_what_is_compared_at_the_rate_of_one_is_run_at_it(made, evidence, monkeypatch):
    compare(monkeypatch, evidence, at={"a": 1})
    make, play = made
    record, _, _ = play(make((2, -1)), "--seeds", "2")
    rates = [{setting[-1] for setting in record.results().settings({"a": a})} for a in (1, 2)]
    # 2^2 is no rate of the other's own grid.
    assert [len(each) for each in rates] == [9, 6] and rates[1] >= {2.0**2}


def test_levelling_ends_where_a_rate_of_one_side_is_kept_too(made, evidence, monkeypatch):
    """Both claims widen the other's grid, as softsync's do."""
    import pages

    cells = [
        evidence.Cell("at 1's", {"a": 2}, 0.5, "<", at={"a": 1}),
        evidence.Cell("1 less 2", {"a": 1}, {"a": 2}, "<"),
    ]
    claims = [evidence.Claim("made", "it", "", "less", (cell,)) for cell in cells]
    monkeypatch.setattr(pages, "CLAIMS", claims)
    make, play = made
    record, _, _ = play(make((2, -1)), "--seeds", "2")
    counts = [len(record.results().settings({"a": a})) for a in (1, 2)]
    assert counts[0] == counts[1] < 13


def test_what_has_no_rate_to_choose_gets_none(made, evidence, monkeypatch):
    compare(monkeypatch, evidence)
    make, play = made
    grid = lambda condition: (-2, 0) if condition["a"] == 1 else (-1, -1)  # noqa: E731
    record, _, _ = play(dataclasses.replace(make((2, -1)), grid=grid), "--seeds", "2")
    assert [len(record.results().settings({"a": a})) for a in (1, 2)] == [9, 1]


def test_what_is_tuned_counts_among_the_settings(made, evidence, monkeypatch):
    """Two settings at each rate of one side, and rates twice as close on the other."""
    compare(monkeypatch, evidence)
    make, play = made
    conditions = [{"a": 1}, {"a": 2, "lambda": 1.0}, {"a": 2, "lambda": 3.0}]
    study = dataclasses.replace(
        make(-1),
        conditions=conditions,
        tuned=("lambda",),
        to_octave=lambda condition: 2 if condition["a"] == 1 else 1,
    )
    record, content, _ = play(study, "--seeds", "2")
    # Three rates and two more, with each of two settings.
    assert [len(record.results().settings({"a": a})) for a in (1, 2)] == [10, 10]
    rates = {run["rate"] for run in content["runs"] if run["condition"]["a"] == 1}
    first, more = [-2, -1.5, -1, -0.5, 0, 0.5], [-4, -3, 2, 3]
    assert sorted(np.log2(list(rates)).round(6)) == sorted([*first, *more])


def test_a_file_of_runs_is_read_as_it_was_written(evidence):
    found = [*runs({"a": 1}, {0.5: [1.0, 2.0], 1.0: [3.0, 4.0]}), *runs({"a": 2}, {0.5: [5.0]})]
    again = evidence.unpacked(evidence.packed(found))
    order = lambda run: (evidence.key(run["condition"]), run["seed"], run["rate"])  # noqa: E731
    assert sorted(again, key=order) == sorted(found, key=order)
    assert len(evidence.packed(found)) == 3


def test_results_of_other_sizes_are_not_mixed(made):
    make, play = made
    play(make(-1), "--seeds", "2")
    with pytest.raises(SystemExit, match=r"runs of other options.*--results"):
        play(make(-1), "--steps", "20")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seeds", "0"], "--seeds must be at least 1. Received: 0."),
        (["--steps", "-2"], "--steps must be at least 1. Received: -2."),
        (["--only", "zzz"], "--only finds no condition: 'zzz'. There are:\n  {\"a\": 1}"),
    ],
)
def test_wrong_arguments_of_a_study_are_named(made, capsys, arguments, message):
    make, play = made
    with pytest.raises(SystemExit):
        play(make(-1), *arguments)
    assert message in capsys.readouterr().err


def test_a_file_of_another_study_is_left_alone(made):
    make, play = made
    play(make(-1), "--seeds", "2")
    other = make(-1)
    with pytest.raises(SystemExit, match="has runs of 'made', not of 'other'"):
        play(dataclasses.replace(other, name="other"))


def test_runs_of_an_earlier_program_are_neither_gone_on_with_nor_taken_for_its_own(
    made, tmp_path, monkeypatch
):
    import pages

    make, play = made
    _, content, _ = play(make(-1), "--seeds", "2")
    assert content["program"] == pages.program(Path(__file__))
    earlier = json.loads((tmp_path / "made.json").read_text()) | {"program": "another"}
    (tmp_path / "made.json").write_text(json.dumps(earlier))
    with pytest.raises(SystemExit, match=r"earlier version of this program.*--same_program"):
        play(make(-1))
    _, content, calls = play(make(-1), "--seeds", "2", "--same_program")
    assert content["program"] == "another" and calls == []  # nothing was run, nothing written
    _, content, _ = play(make(-1), "--seeds", "3", "--same_program")
    assert content["program"] == pages.program(Path(__file__))
    monkeypatch.setattr(pages, "HERE", tmp_path)
    (tmp_path / "made.py").write_text("rate = 1\n")
    assert pages.origin(content).startswith("**By an earlier version of `made.py`.**")
    content["program"] = pages.program(tmp_path / "made.py")
    assert not pages.origin(content).startswith("**")


def test_runs_are_made_again_beside_those_of_the_file(made, tmp_path, capsys):
    make, play = made
    play(make(-1), "--seeds", "2")
    before = (tmp_path / "made.json").read_text()
    for best, differing in ((-1, 0), (-0.75, 20)):
        with pytest.raises(SystemExit) as ended:
            play(make(best), "--rerun", "20")  # all
        assert ended.value.code == bool(differing)
        said = capsys.readouterr().out
        assert f"{differing} of 20 runs differ" in said
        # At each of ten conditions and rates: two seeds are 0.01 apart, the two programs 0.25.
        assert said.count(", outside" if differing else ", within") == 10
    assert (tmp_path / "made.json").read_text() == before
    with pytest.raises(SystemExit):
        play(make(-1), "--rerun", "1")  # of one nothing can be said
    assert "published" not in capsys.readouterr().out


def test_a_program_is_also_what_studies_share(evidence, tmp_path, monkeypatch):
    import pages

    monkeypatch.setattr(pages, "HERE", tmp_path)
    texts = {"study": "import seeded\n", "seeded": "import teacher\n", "teacher": "rate = 1\n"}
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text(text)
    path = tmp_path / "study.py"
    before = pages.program(path)
    (tmp_path / "side_by_side.py").write_text("rate = 2\n")  # which it does not import
    assert pages.program(path) == before
    (tmp_path / "teacher.py").write_text("rate = 1  # a comment\n")
    assert pages.program(path) == before
    (tmp_path / "teacher.py").write_text("rate = 2\n")
    assert pages.program(path) != before


def test_a_program_is_what_it_does(evidence, tmp_path):
    import pages

    path = tmp_path / "study.py"

    def said(text):
        path.write_text(text)
        return pages.program(path)

    first = said(
        '"""What it is."""\nrate = 1  # a note\n\n\ndef f():\n    """Text."""\n    return "#"\n'
    )
    again = said('"""Said otherwise."""\nrate = 1\ndef f():\n    return (\n"#")\n')
    assert again != first  # parentheses are of the program
    assert said('"""Said otherwise."""\nrate = 1\ndef f():\n    return "#"\n') == first
    assert said('"""What it is."""\nrate = 2\ndef f():\n    return "#"\n') != first
