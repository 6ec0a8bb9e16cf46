"""The studies: their commands, records, statistics and table."""

import math
import sys

import pytest
from data import InputError, append_row, load_object, write_rows
from experiments import studies
from experiments.baselines import NAMES, split_names
from experiments.studies import SEEDS, STUDIES, directory
from settings import Config, parse_flags

ARMS = {words: arm for study in STUDIES.values() for arm, words in study.items()}


def test_an_arm_is_a_command_that_can_be_copied():
    """Names and flags exist; a reward model of another run is one that an arm trains."""
    makers = {directory(words).format(seed=3): words for words in ARMS}
    assert len(makers) == len(ARMS)
    for words in ARMS:
        names, flags = split_names(words.format(seed=3).split(), NAMES)
        config = parse_flags(Config, argv=flags)
        assert names and callable(load_object("", config.annotator_function))
        if config.reward_model:
            maker = makers[config.reward_model.removesuffix("/reward/adapter")]
            assert (maker.split()[0] == "ppo") == (names[0] == "ppo")


def test_a_study_continues_and_names_records_of_other_commits(tmp_path, monkeypatch, capsys):
    """Two runs have a record; the second arm uses R_φ of the first; a run fails at first."""
    def run(command, stdout, **_):
        out = tmp_path / command[command.index("--output_dir") + 1]
        started.append(out.name)
        seed = int(out.name[-1])
        after = 0.5 + 0.01 * seed + (0.2 + 0.001 * seed) * ("end" not in command)
        write_rows(out / "result.json", [{"before": {"fact accuracy": 0.5},
                                          "after": {"fact accuracy": after}}])
        write_rows(out / "config.json", [{"reward_model": None}])
        write_rows(out / "reward" / "metrics.json", [{"right": 0.9}])
        write_rows(out / "metrics.jsonl", [{"fact accuracy": 0.5, "kl": 2.0}] * 2)
        code = failing.pop() if failing else 0
        return type("Process", (), {"returncode": code})

    monkeypatch.setattr(studies, "STUDIES", {"small": {
        "a": "text2grad", "b": "end --reward_model runs/studies/text2grad_{seed}/adapter"}})
    monkeypatch.setattr(studies, "ROOT", tmp_path)
    monkeypatch.setattr(studies, "RECORDS", tmp_path / "records.jsonl")
    monkeypatch.setattr(studies, "code_commit", lambda: "new")
    monkeypatch.setattr(studies.subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", ["studies", "small"])
    started, failing = [], [1]
    for seed in (0, 1):
        append_row(studies.RECORDS, {
            "words": "text2grad", "seed": seed, "commit": "old", "facts": 0.7 + 0.011 * seed,
            "curve": [0.5, 0.7], "kl": 1.0, "judge": {"right": 0.8}})
    with pytest.raises(InputError, match="1 of 8 runs failed.*text2grad_[234].log"):
        studies.main()
    assert sorted(started[:3]) == ["text2grad_2", "text2grad_3", "text2grad_4"]
    started.clear()
    studies.main()
    output = capsys.readouterr().out
    assert len(started) == 1 and len(studies.read_records()) == 10
    assert "2 records are of commit old; the code is now new" in output
    assert "0.520 ± 0.020" in output and "-0.202 ± 0.002 *" in output
    assert "a: the worst reward model is right on 0.800" in output
    assert (tmp_path / "runs/studies/small.svg").read_text().count("<path") >= 2
    studies.RECORDS.write_text('{"words": "text2\n')
    with pytest.raises(InputError, match="records.jsonl, line 1: not rows of JSON"):
        studies.read_records()


@pytest.mark.parametrize("name", STUDIES)
def test_the_page_has_the_table_of_the_records(name):
    records = studies.read_records()
    page = (studies.ROOT / "notebooks" / "studies.md").read_text("utf-8")
    for line in studies.study_table(name, records).splitlines():
        assert line in page or "records are of commit" in line or line.startswith("*: ")
    figure = studies.study_figure("baselines", records)
    assert (studies.ROOT / "notebooks" / "studies.svg").read_text("utf-8") == figure


# t with 4 degrees of freedom at p = .1, .05, .01 and .001: from printed tables.
@pytest.mark.parametrize("t, p", [(2.1318, .1), (2.7764, .05), (4.6041, .01), (8.6103, .001)])
def test_p_and_interval_of_a_paired_t_test(t, p):
    values = [t / math.sqrt(5) + x / math.sqrt(2.5) for x in (-2, -1, 0, 1, 2)]
    assert studies.p_value(values) == pytest.approx(p, abs=1e-5)
    assert studies.seed_interval(values).endswith(f"± {2.776 / math.sqrt(5):.3f}")


def test_groups_and_holm_by_hand(monkeypatch):
    """Differences are those from the first arm of a group. Holm 1979: p₁ ≤ .05/4, p₂ ≤ .05/3"""
    arms = {"20: a": "A", "20: b": "B", "80: a": "C", "80: b": "D"}
    monkeypatch.setattr(studies, "STUDIES", {"small": arms})
    records = {(words, seed): {"facts": ord(words) * (seed + 1)}
               for words in "ABC" for seed in SEEDS}
    assert studies.differences("small", records) == {"20: b": [1, 2, 3, 4, 5]}
    assert studies.holm({"a": .01, "b": .04, "c": .03, "d": .005}) == {"a", "d"}
    assert studies.holm({"a": .03, "b": .001, "c": .03}) == {"b"} and not studies.holm({})
