"""Studies of the paper's claims, most of them in the toy world, where the truth is known.

    python -m experiments.studies critiques_20    # a name of STUDIES
    python -m experiments.studies                 # all of them

A study compares arms, which are methods or their settings, in one table. An arm has one or more
commands. A command is given by the words after `python -m experiments.baselines`; in a shell,
write a seed in place of {seed}. An arm with several commands is tuned: all of them run with the
TUNING_SEEDS, and the best one runs with the SEEDS. A run is a process of one thread, and two
of them run at a time. Its record is one line of records.jsonl, beside this file, with the
commit of the code. All records of a table have the same commit: the newest one that has all
runs of the study, or else the present one. Runs that have a record of the present commit are
skipped, and a stopped run continues in its directory in runs/studies. To repeat a run, remove
its record and its directory. Do not change the code of this clone before all runs are done: a
stopped run would be continued with the new code.

The result of a run, "facts", is the first measure of the task's truth: the mean accuracy of the
facts in responses to held-out posts, or, in the study `linter`, the share of clean answers.
Intervals are 95 % intervals over seeds by Student's t; differences are paired by seed.

A record also has the mean of this measure in the rollouts of each iteration (Figures 5 and 6)
and, if the run has trained a reward model, the metrics of that model.

Paper: §3.6, §4.3, §4.5, Tables 1, 2, 3 and 11, Appendices I and N.
"""

import math
import os
import re
import subprocess
import sys
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from statistics import fmean, stdev

from tqdm import tqdm

from data import (InputError, Task, append_row, get_task, git, read_log, read_rows,
                  run_script)
from experiments.baselines import split_names
from measures.sandbox import add_outcomes
from report import svg_line, table

# ── The arms

LINT = "--task lint:LINT --dtype bfloat16"
# (--learning_rate, --value_rate_factor) of the toy world and of SmolLM2. The product, V's rate,
# is about .007 and .009.
GRIDS = (((".001", "7"), (".003", "2.333"), (".01", ".7")),
         ((".0001", "90"), (".0003", "30"), (".001", "9")))


def tuned(*commands: str) -> list[str]:
    """Each command with the three rates of its grid."""
    grid = GRIDS[LINT in commands[0]]
    return [f"{words.strip()} --learning_rate {rate} --value_rate_factor {factor}"
            for words in commands for rate, factor in grid]


def directory(words: str) -> str:
    """The run directory of a command, with "{seed}". It leaves out the paths of other runs."""
    name = re.sub(r"(runs/\S+|[^\w.])+", "_", words).strip("_")
    return f"runs/studies/{name}_{{seed}}"


LONG = "--task experiments.designs:LONG"
MIDDLE_RATE = "--learning_rate .003 --value_rate_factor 2.333"
LONG_RUN = f"text2grad {LONG} {MIDDLE_RATE}"
FEW = "--annotated_rows 400"
NOISE = "--annotator_function experiments.designs:critique_noise"
# Two annotators that give no reasons (§4.5)
VERDICTS = "--annotator_function experiments.designs:critique_no_cot --mode no_cot"
NO_PROSE = "--annotator_function experiments.designs:critique_spans --mode no_cot"
# `fit_scores` doubles it: ten epochs, as tuned in the fourth version (notebooks/studies.md).
SCALAR = "ppo --reward_epochs 5"
PROSE = "--task notebooks.prose:UNSEEN --dtype bfloat16 --eval_rows 162"
SFT = f"sft --iterations 12 {PROSE}"
AFTER_SFT = f"{PROSE} --adapter {directory(SFT)}/policy"
# Runs whose reward model, or whose policy, other runs use. They run before all others.
MAKERS = (SFT, "text2grad", f"text2grad {FEW}", LONG_RUN, f"text2grad {VERDICTS}",
          f"text2grad {NO_PROSE}", SCALAR, f"{SCALAR} {FEW}")


def with_model(words: str, flags: str = "", maker: str = "text2grad") -> list[str]:
    """The `tuned` arm "words flags", with the reward model of the run "maker flags"."""
    path = directory(f"{maker} {flags}")
    return tuned(f"{words} --reward_model {path}/reward/adapter {flags}")


JUDGED = 72, 288, 1152                  # numbers of responses that the annotator judges


def critiques(task: str, **more: str) -> dict[str, list[str]]:
    """The arms of the study: how much is learned from how many judged responses?

    more: further arms that train on rollouts, as name=words.
    """
    arms = {}
    on_rollouts = {"Text2Grad": "text2grad", "Definition 1": "definition_1",
                   "sum at the end": "end"}
    for count in JUDGED:
        # There was no time to run `more` with the largest number of responses.
        further = more if count < JUDGED[-1] else {}
        for name, words in (on_rollouts | further).items():
            flags = f"{task} --critic annotator --iterations 18 --batch_size {count // 18}"
            # A reward at the end must reach the first token, so λ = 1 may suit it better.
            choices = [words, "end --lam 1"] if words == "end" else [words]
            arms[f"{count}: {name}"] = tuned(*[f"{choice} {flags}" for choice in choices])
        rows = f"{task} --iterations 18 --annotated_rows {count}"
        arms[f"{count}: rejection, once"] = tuned(f"best_tenth {rows}")
        arms[f"{count}: rejection, iterated"] = tuned(f"best_tenth {rows} --rounds 2",
                                                      f"best_tenth {rows} --rounds 4")
    return arms


def baselines(flags: str = "") -> dict[str, list[str]]:
    """The arms of the study: is a critique worth more than other feedback (Tables 2, 3)?"""
    return {
        "Text2Grad": with_model("text2grad", flags),
        "R_φ's sum": with_model("end", flags),
        "PPO": with_model("ppo", flags, SCALAR),
        "GRPO": with_model("ppo grpo --responses_per_prompt 4", flags, SCALAR),
        "DPO": tuned(f"dpo {flags}"),
        "rejection": tuned(f"best_tenth {flags}", f"best_tenth --rounds 4 {flags}")}


TOY = critiques("--task toy")
WRONG = f"best_tenth --annotated_rows 1152 {NOISE}"
TRUE = f"--critic annotator {MIDDLE_RATE}"
STUDIES = {
    "critiques_20": TOY,
    "critiques_80": critiques(LONG, **{"reward-to-go": "reward_to_go"}),
    "baselines": baselines(),
    "few": baselines(FEW),
    "references": {
        "SFT": tuned("sft"),
        "SFT, as wrong as the base": tuned("sft --task experiments.designs:DRAFTS"),
        "ILF": tuned("ilf"),
        "reflection": with_model("reflection")},
    # R_φ needs a quarter of an hour. So there is no tuning here: each arm has the rate, λ and
    # number of rounds that were best in critiques_80 with 1,152 responses.
    "long": {
        "Text2Grad": [LONG_RUN],
        "R_φ's sum": [f"end {LONG} --lam 1 --learning_rate .001 --value_rate_factor 7 "
                      f"--reward_model {directory(LONG_RUN)}/reward/adapter"],
        "rejection": [f"best_tenth --rounds 4 {LONG} {MIDDLE_RATE}"]},
    "reasoning": {
        "chain of thought": with_model("text2grad"),
        "verdicts alone": with_model("text2grad", VERDICTS),
        "no prose": with_model("text2grad", NO_PROSE)},
    "noise": {
        "true labels: Text2Grad": tuned("text2grad --critic annotator"),
        "true labels: rejection": TOY["1152: rejection, once"]
                                  + TOY["1152: rejection, iterated"],
        "20 % wrong: Text2Grad": tuned(f"text2grad --critic annotator {NOISE}"),
        "20 % wrong: rejection": tuned(WRONG, f"{WRONG} --rounds 2",
                                       f"{WRONG} --rounds 4")},
    "second_round": {
        "one round": ["text2grad"],
        "two rounds": [f"text2grad --adapter {directory('text2grad')}/policy"]},
    "advantages": {
        "one fact late: Definition 1": tuned("late definition_1 --critic annotator"),
        "one fact late: reward-to-go": tuned("late reward_to_go --critic annotator"),
        "one fact late: GAE": tuned("late --critic annotator")},
    # The page smollm2.md
    "smollm2": {
        "SFT": [SFT],
        "R_φ": [f"text2grad {AFTER_SFT}"],
        "annotator": [f"text2grad {AFTER_SFT} --critic annotator"]},
    # 128 answers of SmolLM2, judged by ruff. It needs PYTHONPATH=notebooks/own_task.
    "linter": {
        "token rewards": tuned(f"text2grad {LINT}"),
        "sum at the end": tuned(f"end {LINT}", f"end --lam 1 {LINT}"),
        "minus faults": tuned(f"minus_faults {LINT}", f"minus_faults --lam 1 {LINT}"),
        "rejection": tuned(f"rejection --rounds 4 --annotated_rows 128 {LINT}")},
    # This study cannot be run with the present code, which lacks two of the arms. Its records
    # are of an older commit. Its learning rates are those of the fourth version.
    "designs": {
        "spans": [f"text2grad {TRUE}"],
        "importance": [f"importance {TRUE}"],
        "linear decay": ["linear_decay --critic annotator"],
        "dense labels": [f"text2grad {TRUE} --annotator_function "
                         "experiments.designs:critique_dense --mode experiments.modes:DENSE"]}}
SEEDS = range(5)
TUNING_SEEDS = 10, 11
PROCESSES = 2


# ── Runs and records

ROOT = Path(__file__).parent.parent
RECORDS = Path(__file__).with_name("records.jsonl")
RECORD = Task("record", "{words:s} {seed:d} {commit:s} {facts:f} {seconds:f}".format_map)


def read_records() -> dict[str, dict[tuple, dict]]:
    """{commit: {(words, seed): record}}, in the order of the file: the oldest commit first.

    Raises InputError, which names the line, if a record is cut off or has another form.
    """
    records = defaultdict(dict)
    for row in read_rows(RECORDS, task=RECORD):
        records[row["commit"]][row["words"], row["seed"]] = row
    return records


def code_commit() -> str:
    """The last commit that changed code that a run uses; "unknown" without git."""
    words = "log -1 --format=%h -- *.py toy :!tests :!notebooks :!bench :!measures"
    return git(*words.split()) or "unknown"


def best_words(commands: list[str], records: dict) -> str | None:
    """The command of an arm with the most right facts in its tuning runs, or its only command.

    A command without all records of its tuning runs is not chosen. If no command has
    all of them, the result is None.
    """
    if len(commands) == 1:
        return commands[0]
    facts = {words: fmean(records[words, seed]["facts"] for seed in TUNING_SEEDS)
             for words in commands if all((words, seed) in records for seed in TUNING_SEEDS)}
    return max(facts, key=facts.get, default=None)


def complete_runs(name: str, records: dict) -> dict[str, list[dict]] | None:
    """The records of each arm of a study, in the order of SEEDS, all of one commit.

    It is the newest commit that has all of them. The result is None if there is no such commit.
    """
    for of_commit in reversed(records.values()):
        runs = {arm: [of_commit.get((best_words(commands, of_commit), seed)) for seed in SEEDS]
                for arm, commands in STUDIES[name].items()}
        if all(map(all, runs.values())):
            return runs
    return None


def record_of(words: str, seed: int) -> dict:
    """The record of a finished run, from the files in its directory."""
    out = ROOT / directory(words).format(seed=seed)
    result, = read_rows(out / "result.json")
    after = result["after"]
    task = get_task(read_rows(out / "config.json")[0]["task"])
    if task.tests:
        samples = add_outcomes(read_rows(out / "after_samples.jsonl"), task)
        after["right"] = fmean(row.get("outcome", "").startswith("All tests")
                               for row in samples)             # an empty answer has no outcome
    metrics = read_log(out / "metrics.jsonl")
    measure = next(iter(task.truth))
    return {"words": words, "seed": seed, "commit": code_commit(),
            "judge": read_log(out / "reward" / "metrics.json")[-1:],    # if one is trained
            "before": result["before"][measure], "facts": after[measure], "after": after,
            "curve": [round(row[measure], 4) for row in metrics],
            "seconds": sum(row["seconds"] for row in read_log(out / "phases.jsonl"))}


def execute(run: tuple) -> str | None:
    """Execute a run (words, seed) in a process of one thread, and append its record.

    Its output goes to DIRECTORY.log. Returns the path of this file if the run failed.
    """
    words, seed = run
    out = directory(words).format(seed=seed)
    log = ROOT / f"{out}.log"
    command = [sys.executable, "-m", "experiments.baselines", *words.format(seed=seed).split(),
               "--seed", str(seed), "--output_dir", out]
    with open(log, "a") as file:
        process = subprocess.run(command, cwd=ROOT, stdout=file, stderr=file,
                                 env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False)
    if process.returncode:
        return str(log)
    append_row(RECORDS, record_of(words, seed))


def missing_runs(names: list[str], records: dict, failed: dict) -> list[tuple]:
    """The runs (words, seed) of studies that come next: without a record, and not failed.

    The MAKERS come first, because other runs use their models. Then come the tuning runs, and
    last the runs with SEEDS, whose words are known only after the tuning.
    """
    runs = []
    for commands in [arm for name in names for arm in STUDIES[name].values()]:
        if len(commands) > 1:
            runs += product(commands, TUNING_SEEDS)
        runs += product(filter(None, [best_words(commands, records)]), SEEDS)
    runs += [(maker, seed) for maker in MAKERS for words, seed in runs
             if f"{directory(maker)}/" in words]
    runs = [run for run in dict.fromkeys(runs) if run not in records and run not in failed]
    makers = [(words, seed) for words, seed in runs if words in MAKERS]
    tuning = [(words, seed) for words, seed in runs if seed in TUNING_SEEDS]
    return makers or tuning or runs


def execute_all(names: list[str]):
    """Execute all runs of studies that have no record of the present commit.

    A run that fails stops no other one. Raises InputError at the end if one failed.
    """
    commit = code_commit()
    failed = {}                                                        # run → path of its log
    while runs := missing_runs(names, read_records()[commit], failed):
        with ThreadPoolExecutor(PROCESSES) as pool:
            logs = [*tqdm(pool.map(execute, runs), "runs", len(runs))]
        failed |= {run: log for run, log in zip(runs, logs) if log}
    if failed:
        raise InputError(f"{len(failed)} runs failed; the reason is in the last line of "
                         f"{', '.join(failed.values())}")


# ── Statistics and tables

def half_interval(values: list[float]) -> float:
    """Half of the 95 % interval over five seeds by Student's t."""
    return 2.776 * stdev(values) / math.sqrt(len(values))


def seed_interval(values: list[float], sign="") -> str:
    """Mean ± half of the interval over five seeds."""
    return f"{fmean(values):{sign}.3f} ± {half_interval(values):.3f}"


def p_value(differences: list[float]) -> float:
    """Two-sided p of a paired t test of five differences against 0 (4 degrees of freedom).

    It is 1 if all differences are 0, or if there are none.
    """
    if not any(differences):
        return 1.0
    mean = fmean(differences)
    share = mean**2 / (mean**2 + 4 * stdev(differences)**2 / 5)        # t² / (t² + 4)
    # The distribution function of Student's t with 4 degrees of freedom, in closed form.
    return 1 - 1.5 * math.sqrt(share) * (1 - share / 3)


def holm(p_values: dict) -> set:
    """The comparisons that are significant at 5 % after Holm's correction."""
    names = sorted(p_values, key=p_values.get)
    count = 0
    while count < len(names) and p_values[names[count]] <= 0.05 / (len(names) - count):
        count += 1
    return {*names[:count]}


def differences(runs: dict[str, list[dict]]) -> dict[str, list[float]]:
    """Facts of each arm minus those of the first arm of its group, paired by seed.

    runs: see `complete_runs`. The group is the part of an arm's name in front of a colon.
    """
    first = {}                                                         # group → its first arm
    result = {}
    for arm in runs:
        other = first.setdefault(arm.rpartition(": ")[0], arm)
        if other != arm:
            result[arm] = [run["facts"] - other_run["facts"]
                           for run, other_run in zip(runs[arm], runs[other])]
    return result


def study_table(name: str, records: dict) -> str:
    """The table of a complete study; * means significant, corrected by Holm over all studies.

    The lines below it have the command of each arm and the commit of the records.
    """
    # A study that is not complete has p = 1. When it is completed, no other star disappears.
    p_values = {}
    for study in STUDIES:
        runs = complete_runs(study, records) or dict.fromkeys(STUDIES[study], ())
        p_values |= {(study, arm): p_value(values)
                     for arm, values in differences(runs).items()}
    significant = holm(p_values)
    runs = complete_runs(name, records)
    rows = []
    notes = f"\n\n*: significant at 5 %, corrected for {len(p_values)} comparisons.\n"
    for arm, arm_runs in runs.items():
        difference = differences(runs).get(arm)
        star = " *" if (name, arm) in significant else ""
        rows.append([arm, seed_interval([run["facts"] for run in arm_runs]),
                     difference and seed_interval(difference, "+") + star])
        notes += f"{arm}: {arm_runs[0]['words']}\n"
    notes += (f"All records are of commit {arm_runs[0]['commit']}; the code is now "
              f"{code_commit()}.\n")
    return table([name, "facts", "minus first arm"], rows) + notes


def critiques_figure(name: str, runs: dict[str, list[dict]]) -> str:
    """The mean right facts of each arm by the number of judged responses, as SVG.

    A vertical stroke is the interval over seeds. name: critiques_20 or critiques_80. runs: its
    runs, see `complete_runs`.
    """
    curves = defaultdict(list)
    for arm, arm_runs in runs.items():
        facts = [run["facts"] for run in arm_runs]
        mean, half = fmean(facts), half_interval(facts)
        curves[arm.rpartition(": ")[2]] += [mean, mean - half, mean + half, mean]
    counts = [count for count in JUDGED for _ in range(4)]
    return svg_line(name, counts, curves, "judged responses")


def curves_figure(name: str, runs: dict[str, list[dict]]) -> str:
    """The mean of "facts" in the rollouts of each iteration (Figures 5 and 6), as SVG.

    An arm without rollouts has no curve. runs: see `complete_runs`.
    """
    curves = {arm: [*map(fmean, zip(*[run["curve"] for run in arm_runs]))]
              for arm, arm_runs in runs.items()}
    count = max(map(len, curves.values()))
    return svg_line(name, [*range(1, count + 1)] or [0], curves)


# ── The command line

def main():
    """Execute the runs that are missing, then print the tables and write the figures."""
    names, flags = split_names(sys.argv[1:], STUDIES)
    if flags:
        raise InputError(f"{flags[0]}: there are no flags; name {', '.join(STUDIES)}")
    names = names or [*STUDIES]
    (ROOT / "runs/studies").mkdir(parents=True, exist_ok=True)
    records = read_records()
    execute_all([name for name in names if not complete_runs(name, records)])
    records = read_records()
    for name in names:
        print(study_table(name, records))
        draw = critiques_figure if name.startswith("critiques") else curves_figure
        path = ROOT / f"runs/studies/{name}.svg"
        path.write_text(draw(name, complete_runs(name, records)), "utf-8")
        print(f"Figure: {path}\n")


if __name__ == "__main__":
    run_script(main, "studies")
