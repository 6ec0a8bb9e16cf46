"""The studies: their commands, records, statistics, and the page of SmolLM2."""

import math
import random
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from data import InputError, append_row, load_object, write_rows
from experiments import studies
from experiments.baselines import METHODS, NAMES, split_names
from experiments.studies import SEEDS, STUDIES, directory
from helpers import error_message
from settings import Config, parse_flags

DECIMALS = re.compile(r"\d*(\.\d+)")

ARMS = {words: arm for study in STUDIES.values() for arm, words in study.items()}


# ── Arms

@pytest.mark.parametrize("words", ARMS, ids=ARMS.values())
def test_an_arm_is_a_command_that_can_be_copied(words):
    """Its names and flags exist. A reward model of another run is one that an arm trains."""
    names, flags = split_names(words.format(seed=3).split(), NAMES)
    config = parse_flags(Config, argv=flags)
    assert names and callable(load_object("", config.annotator_function))
    if config.reward_model:
        makers = {directory(maker).format(seed=3): maker for maker in ARMS}
        maker = makers[config.reward_model.removesuffix("/reward/adapter")]
        assert (maker.split()[0] == "ppo") == (names[0] == "ppo")
        assert config.reward_lora_r == parse_flags(Config, argv=[]).reward_lora_r


def test_every_run_has_its_own_directory():
    names = [directory(words).format(seed=seed) for words in ARMS for seed in SEEDS]
    assert len({*names}) == len(names) and max(map(len, names)) < 250
    assert {words.split()[0] for words in ARMS} >= {*METHODS} - {"score"}


# ── Runs

@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A study of two arms in an empty directory; the second one uses R_φ of the first."""
    arms = {"a": "text2grad", "b": "end --reward_model runs/studies/text2grad_{seed}/reward"}
    monkeypatch.setattr(studies, "STUDIES", {"small": arms})
    monkeypatch.setattr(studies, "ROOT", tmp_path)
    monkeypatch.setattr(studies, "RECORDS", tmp_path / "records.jsonl")
    monkeypatch.setattr(studies, "code_commit", lambda: "new")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def pretend(tmp_path, monkeypatch, code=0, right=0.9):
    """Replace processes by one that writes the files of a run; return the started commands."""
    def start(command, cwd, stdout, **_):
        words = command[3:]
        started.append(words)
        out = tmp_path / words[words.index("--output_dir") + 1]
        (out / "reward" / "adapter").mkdir(parents=True)
        seed = int(words[words.index("--seed") + 1])
        facts = 0.5 + 0.01 * seed + 0.2 * ("end" not in words)
        write_rows(out / "result.json", [{"before": {"fact accuracy": 0.5},
                                          "after": {"fact accuracy": facts}}])
        write_rows(out / "config.json", [{"reward_model": None}])
        write_rows(out / "reward" / "metrics.json", [{"right": right}])
        write_rows(out / "metrics.jsonl", [{"fact accuracy": 0.5 + facts * i, "kl": 2.0}
                                           for i in range(2)])
        stdout.write("one line\nthe reason\n")
        return SimpleNamespace(poll=lambda: code, returncode=code, terminate=lambda: None)

    started = []
    monkeypatch.setattr(studies.subprocess, "Popen", start)
    return started


def test_a_study_continues_and_names_records_of_other_commits(folder, monkeypatch, capsys):
    """Two runs are recorded by an older commit; the others start, an R_φ before its use."""
    monkeypatch.setattr(sys, "argv", ["studies", "small"])
    for seed in (0, 1):
        append_row(studies.RECORDS, {"words": "text2grad", "seed": seed, "commit": "old",
                                     "facts": 0.7, "curve": [0.5, 0.7], "kl": 1.0})
        (folder / f"runs/studies/text2grad_{seed}/reward").mkdir(parents=True)
    started = pretend(folder, monkeypatch)
    studies.main()
    output = capsys.readouterr().out
    assert [words[0] for words in started].count("text2grad") == 3
    assert [words[0] for words in started].count("end") == 5
    assert len(studies.read_records()) == 10
    for number, words in enumerate(started):
        if words[0] == "end":
            maker = words[words.index("--reward_model") + 1].removesuffix("/reward")
            assert (folder / maker).exists()
            assert any(maker in other for other in started[:number]) or maker[-1] in "01"
    assert "2 of 10 records are of commit old; the code is now new" in output
    assert "0.520 ± 0.020" in output and "-0.198 ± 0.006 *" in output
    assert (folder / "runs/studies/small.svg").read_text().count("<title>") == 2
    started.clear()
    studies.main()
    assert not started


@pytest.mark.parametrize("code, right, message", [
    (1, 0.9, "the reason .in .*/text2grad_0.log"),
    (0, 0.69, "right on 0.690 of the held-out examples, and 0.7 is needed")])
def test_a_run_that_fails_or_has_a_poor_reward_model_is_named_after_the_others(
        folder, monkeypatch, code, right, message):
    started = pretend(folder, monkeypatch, code, right)
    with pytest.raises(InputError, match=f"2 of 2 runs have a problem; .*{message}"):
        studies.run_all([("text2grad", 0), ("text2grad", 1)], 1)
    assert len(started) == 2 and len(studies.read_records()) == 2 * (1 - code)


def test_a_missing_reward_model_is_named(folder):
    with pytest.raises(InputError, match="needs the reward model of another run"):
        studies.run_all([(studies.STUDIES["small"]["b"], 0)], 2)


def test_records_that_are_cut_off_and_wrong_names_are_one_line(folder, monkeypatch):
    studies.RECORDS.write_text('{"words": "text2grad", "se')
    with pytest.raises(InputError, match="the last line is cut off; remove it"):
        studies.read_records()
    studies.RECORDS.write_text('{"words": "text2\n')
    with pytest.raises(InputError, match="records.jsonl, line 1: not rows of JSON"):
        studies.read_records()
    assert "unknown name 'none'" in error_message("experiments.studies", "none")


def test_the_commit_of_the_code_does_not_change_with_a_record():
    assert re.fullmatch(r"[0-9a-f]{7,}\+?", studies.code_commit())


# ── Statistics

def test_the_interval_holds_95_percent_of_students_t():
    """The half width gives the quantile of 4 degrees of freedom, by an integrated density."""
    values = [random.Random(i).random() for i in range(5)]
    centre, half = map(float, studies.interval(values).split(" ± "))
    quantile = half / (np.std(values, ddof=1) / math.sqrt(5))
    x = np.linspace(0, quantile, 200_001)
    density = (1 + x ** 2 / 4) ** -2.5 * math.gamma(2.5) / math.sqrt(4 * math.pi)
    assert centre == pytest.approx(np.mean(values), abs=5e-4)
    assert 2 * np.trapezoid(density, x) == pytest.approx(0.95, abs=2e-4)


def test_differences_are_paired_with_the_first_arm_of_a_group(monkeypatch):
    arms = {"20: a": "A", "20: b": "B", "80: a": "C", "80: b": "D", "alone": "A"}
    monkeypatch.setattr(studies, "STUDIES", {"small": arms})
    records = {(words, seed): {"facts": ord(words) * (seed + 1)}
               for words in "ABC" for seed in SEEDS}
    assert studies.differences("small", records) == {"20: b": [1, 2, 3, 4, 5]}


# t with 4 degrees of freedom at p = .1, .05, .01 and .001: from printed tables.
@pytest.mark.parametrize("t, p", [(2.1318, .1), (2.7764, .05), (4.6041, .01), (8.6103, .001)])
def test_p_of_a_paired_t_test(t, p):
    x = np.array([-2, -1, 0, 1, 2]) / np.std([-2, -1, 0, 1, 2], ddof=1)
    assert studies.p_value(x + t / math.sqrt(5)) == pytest.approx(p, abs=1e-5)
    assert studies.p_value([0.0] * 5) == 1 and studies.p_value([0.1] * 5) < 1e-6


def test_holm_by_hand():
    """Holm 1979: sorted, p₁ ≤ .05/4, p₂ ≤ .05/3, …; the first that fails ends it."""
    assert studies.holm({"a": .01, "b": .04, "c": .03, "d": .005}) == {"a", "d"}
    assert studies.holm({"a": .01, "b": .02}) == {"a", "b"}
    assert studies.holm({"a": .03, "b": .001, "c": .03}) == {"b"} and not studies.holm({})
