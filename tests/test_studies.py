"""The studies: their commands, records, statistics and table."""

import math
import sys

import pytest

from data import InputError, append_row, load_object, write_rows
from experiments import studies
from experiments.baselines import NAMES, split_names
from experiments.studies import MAKERS, SEEDS, STUDIES, TUNING_SEEDS, directory, tuned
from report import svg_line
from settings import Config, parse_flags

ARMS = {words for study in STUDIES.values() for arm in study.values() for words in arm}


def test_an_arm_is_a_command_that_can_be_copied(monkeypatch):
    """Names and flags exist; each run has its directory; another run's model is one that it
    trains, and it is made with the same flags."""
    monkeypatch.syspath_prepend(studies.ROOT / "notebooks/own_task")
    assert len({*map(directory, ARMS | {*MAKERS})}) == len(ARMS | {*MAKERS})
    makers = {directory(words).format(seed=3): words for words in MAKERS}
    used = set()
    for words in (ARMS | {*MAKERS}) - {words for arm in STUDIES["designs"].values()
                                       for words in arm}:             # of an older commit
        names, flags = split_names(words.format(seed=3).split(), NAMES)
        config = parse_flags(Config, argv=flags)
        assert names and callable(load_object("", config.annotator_function))
        assert "  " not in words and config.iterations == (
            8 if "lint:" in words else 12 if words in MAKERS and "prose" in words else
            40 if "prose" in words else 18)
        if config.adapter:
            used.add(makers[config.adapter.removesuffix("/policy")])
        if config.reward_model:
            maker = makers[config.reward_model.removesuffix("/reward/adapter")]
            used.add(maker)
            assert (maker.split()[0] == "ppo") == (names[0] == "ppo")
            made = parse_flags(Config, argv=split_names(maker.split(), NAMES)[1])
            for name in ("task", "annotated_rows", "annotator_function", "mode"):
                assert getattr(made, name) == getattr(config, name), words
    assert used == {*MAKERS} and not {*SEEDS} & {*TUNING_SEEDS}


def record(words, seed, facts, commit="new"):
    return {"words": words, "seed": seed, "commit": commit, "facts": facts, "seconds": 1.0,
            "curve": [0.5, 0.7], "judge": {}}


@pytest.fixture()
def small(tmp_path, monkeypatch):
    """A study with a tuned arm and one that needs R_φ of a maker; its runs, in order."""
    def run(command, **_):
        out = tmp_path / command[command.index("--output_dir") + 1]
        started.append(out.name)
        *words, seed = out.name.split("_")
        after = 0.5 + 0.01 * int(seed) + (0.2 + 0.001 * int(seed)) * (".003" in words)
        write_rows(out / "result.json", [{"before": {"fact accuracy": 0.5},
                                          "after": {"fact accuracy": after}}])
        write_rows(out / "config.json", [{"task": "toy"}])
        write_rows(out / "reward" / "metrics.json", [{"right": 0.9}])
        write_rows(out / "metrics.jsonl", [{"fact accuracy": 0.5, "kl": 2.0}] * 2)
        return type("Process", (), {"returncode": int(".01" in words)})

    started = []
    monkeypatch.setattr(studies, "STUDIES", {"small": {
        "a": tuned("dpo"), "b": ["end --reward_model runs/studies/text2grad_{seed}/adapter"]}})
    monkeypatch.setattr(studies, "ROOT", tmp_path)
    monkeypatch.setattr(studies, "RECORDS", tmp_path / "records.jsonl")
    monkeypatch.setattr(studies, "code_commit", lambda: "new")
    monkeypatch.setattr(studies.subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", ["studies", "small"])
    return started


def test_a_study_tunes_continues_and_never_mixes_commits(small, monkeypatch, capsys):
    """Makers run first, then the grid, then the best command; .01 always fails. A maker and
    two grid runs of this commit have a record; those of another commit do not count."""
    grid = tuned("dpo")
    for row in [record("text2grad", 0, .5), record(grid[0], 10, .6), record(grid[0], 11, .6),
                *(record(words, seed, .9, "old") for words in grid for seed in range(12))]:
        append_row(studies.RECORDS, row)
    with pytest.raises(InputError, match=r"2 runs failed.*dpo_learning_rate_.01.*_1[01].log"):
        studies.main()
    stages = small[:4], small[4:8], small[8:]
    assert [{name[:3] for name in stage} for stage in stages] == [{"tex"}, {"dpo"},
                                                                  {"dpo", "end"}]
    assert sorted(small[:4]) == [f"text2grad_{seed}" for seed in range(1, 5)]
    assert len(small) == 18 and all(".01" in name or ".003" in name for name in small[4:8])
    assert all(".003" in name or "end" in name for name in small[8:])
    small.clear()
    capsys.readouterr()
    monkeypatch.setattr(studies, "code_commit", lambda: "newer")
    studies.main()
    output = capsys.readouterr().out
    assert not small and "All records are of commit new; the code is now newer" in output
    assert "0.520 ± 0.020" in output and "-0.202 ± 0.002 *" in output
    assert f"a: {grid[1]}\n" in output


def test_a_study_of_an_older_commit_prints_its_table_without_git(small, monkeypatch, capsys):
    monkeypatch.setattr(studies, "STUDIES", {"small": {"a": ["dpo"], "b": ["sft"]},
                                             "open": {"c": ["ilf"], "d": ["end"]}})
    write_rows(studies.RECORDS, [record(words, seed, .01 * seed, commit)
                                 for commit in ("older", "old") for words in ("dpo", "sft")
                                 for seed in SEEDS] + [record("dpo", 0, .1, "incomplete")])
    studies.main()
    assert "commit old;" in capsys.readouterr().out and not small


@pytest.mark.parametrize("line, message", [
    ('{"words": "text2\n', "line 2: not rows of JSON"), ("3\n", "line 2: expected a JSON obj"),
    ('{"words": "dpo", "seed": 1}\n', "line 2: the row does not fit.*'commit'"),
    ('{"words": "dpo", "seed": 1, "commit": "a", "facts": "high", "seconds": 1}\n',
     "line 2: the row does not fit the task record")])
def test_a_record_that_is_cut_off_or_of_another_form_is_named(small, line, message):
    append_row(studies.RECORDS, record("dpo", 0, .5))
    with open(studies.RECORDS, "a") as file:
        file.write(line)
    with pytest.raises(InputError, match=f"records.jsonl, {message}"):
        studies.main()



@pytest.mark.parametrize("name", STUDIES)
def test_the_page_has_the_table_and_the_figure_of_the_records(name):
    records = studies.read_records()
    runs = studies.complete_runs(name, records)
    if not runs:
        assert not (studies.ROOT / "notebooks" / f"{name}.svg").exists()
        pytest.skip(f"{name} has no complete records of one commit")
    folder = studies.ROOT / "notebooks"
    page = "".join((folder / f"{place}.md").read_text("utf-8")
                   for place in ("studies", "own_task"))
    for line in studies.study_table(name, records).split("\n\n")[0].splitlines():
        assert line in page
    if name != "designs":
        draw = studies.critiques_figure if "critiques" in name else studies.curves_figure
        assert (folder / f"{name}.svg").read_text("utf-8") == draw(name, runs)


def test_the_page_of_smollm2_has_the_runs_that_are_recorded():
    page = (studies.ROOT / "notebooks/smollm2.md").read_text("utf-8")
    arms = {words: arm for arm, (words,) in STUDIES["smollm2"].items()}
    runs = [run for runs in studies.read_records().values() for run in runs.values()
            if run["words"] in arms]
    for run in runs:
        means = [f"{run['after'][key]:.3f}".lstrip("0")
                 for key in ("fact accuracy", "supported words", "repeated facts")]
        cells = [arms[run["words"]], str(run["seed"]), *means, f"{run['seconds'] / 60:.0f}"]
        assert f"| {' | '.join(cells)} |" in page
    assert runs


# t with 4 degrees of freedom at p = .1, .05, .01 and .001: from printed tables.
@pytest.mark.parametrize("t, p", [(2.1318, .1), (2.7764, .05), (4.6041, .01), (8.6103, .001)])
def test_p_and_interval_of_a_paired_t_test(t, p):
    values = [t / math.sqrt(5) + x / math.sqrt(2.5) for x in (-2, -1, 0, 1, 2)]
    assert studies.p_value(values) == pytest.approx(p, abs=1e-5)
    assert studies.p_value([0.0] * 5) == studies.p_value([]) == 1
    assert studies.seed_interval(values).endswith(f"± {2.776 / math.sqrt(5):.3f}")


def test_groups_figure_and_holm_by_hand():
    """Differences are those from the first arm of a group. Holm 1979: p₁ ≤ .05/4, p₂ ≤ .05/3"""
    facts = {"72: a": 1, "72: b": 2, "288: a": 3, "288: b": 3, "1152: a": 4, "1152: b": 6}
    runs = {arm: [{"facts": value * (seed + 1)} for seed in SEEDS]
            for arm, value in facts.items()}
    assert studies.differences(runs) == {
        "72: b": [1, 2, 3, 4, 5], "288: b": [0] * 5, "1152: b": [2, 4, 6, 8, 10]}
    svg = studies.critiques_figure("critiques_20", runs)
    assert svg.count('class="curve"') == 2 and ">72<" in svg and ">1152<" in svg
    assert ">1.04<" in svg and ">29.8<" in svg       # the ends of the intervals, 3 ± 2.776 / √2
    runs = {"a": [{"curve": [0, 1]}, {"curve": [1, 2]}], "b": [{"curve": []}] * 2}
    assert studies.curves_figure("x", runs) == svg_line("x", [1, 2], {"a": [.5, 1.5], "b": []})
    assert studies.holm({"a": .015, "b": .04, "c": .03, "d": .005}) == {"a", "d"}
    assert studies.holm({"a": .03, "b": .001, "c": .03}) == {"b"} and not studies.holm({})
