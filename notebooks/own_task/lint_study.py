"""The study of own_task.md: four uses of ruff's messages, each with 128 judged answers.

    export PYTHONPATH=notebooks/own_task:.
    python -m lint_study                     # every run, then the tables; or with --model DIR
    python -m lint_study messages --task lint:LINT --seed 0    # one run, see baselines.py

Each arm has the rate of three whose answers on seed 10 are clean most often: they are one
function without a message. Two runs of one thread run at a time. A run that has a line in
lint_study.jsonl, beside this file, is skipped. To repeat it, remove the line and its directory.
"""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from statistics import fmean

from data import append_row, read_rows, run_script
from experiments import baselines, studies
from lint import FORM, LINT, code_of, lint
from measures.sandbox import add_outcomes
from report import table

ARMS = {"per token": "text2grad", "sum at the end": "end", "number of messages": "messages",
        "rejection": "rejection --rounds 4 --annotated_rows 128"}
RATES = ".0001 .0003 .001".split()
SEEDS = range(5)
MEASURES = "clean right messages parses truncated response_tokens".split()
RECORDS = Path(__file__).with_name("lint_study.jsonl")


def messages(text, offsets, review) -> list[float]:
    """minus the number of ruff's messages at the last token, as in arXiv 2605.30478"""
    return [0.0] * (len(offsets) - 1) + [-float(len(lint(code_of(text))))]


def is_clean(answer: str) -> bool:
    """Whether an answer is one function without a message."""
    return bool(FORM.fullmatch(answer.strip())) and not lint(code_of(answer))


def measures(out: str, name: str) -> dict:
    """Means over the answers `name` ("before" or "after") of the run in the directory out."""
    samples = add_outcomes(read_rows(f"{out}/{name}_samples.jsonl"), LINT)
    result, = read_rows(f"{out}/result.json")
    return {measure: result[name][measure] for measure in MEASURES[2:]} | {
        "clean": fmean(is_clean(row["response"]) for row in samples),
        "right": fmean(row["outcome"].startswith("All") for row in samples)}


def execute(run: tuple):
    """Execute a run (arm, rate, seed) and append its record."""
    arm, rate, seed = run
    out = f"runs/lint_study/{ARMS[arm].split()[0]}_{rate}_{seed}"
    words = (f"{ARMS[arm]} --task lint:LINT --dtype bfloat16 --seed {seed} --output_dir {out} "
             f"--learning_rate {rate} --value_rate_factor {.009 / float(rate):.0f}")
    with open(f"{out}.log", "w") as log:
        subprocess.run([sys.executable, "-m", "lint_study", *words.split(), *sys.argv[1:]],
                       check=True, stdout=log, stderr=log,
                       env=os.environ | {"OMP_NUM_THREADS": "1"})
    append_row(RECORDS, {"arm": arm, "rate": rate, "seed": seed,
                         "before": measures(out, "before"), "after": measures(out, "after"),
                         "commit": studies.code_commit()})


def read_records() -> dict[tuple, dict]:
    """The records by (arm, rate, seed)."""
    rows = read_rows(RECORDS) if RECORDS.exists() else []
    return {(row["arm"], row["rate"], row["seed"]): row for row in rows}


def main():
    """Execute the runs that are missing, and print the tables."""
    Path("runs/lint_study").mkdir(parents=True, exist_ok=True)
    execute_missing(product(ARMS, RATES, [10]))
    tuning = read_records()
    best = {arm: max(RATES, key=lambda rate: tuning[arm, rate, 10]["after"]["clean"])
            for arm in ARMS}
    execute_missing((arm, best[arm], seed) for arm in ARMS for seed in SEEDS)
    records = read_records()
    print("\n\n".join(study_tables({arm: [records[arm, best[arm], seed] for seed in SEEDS]
                                    for arm in ARMS})))


def execute_missing(runs):
    """Execute the runs that have no record."""
    runs = [run for run in runs if run not in read_records()]
    with ThreadPoolExecutor(studies.PROCESSES) as pool:
        list(pool.map(execute, runs))


def study_tables(records: dict[str, list[dict]]) -> list[str]:
    """A table of each measure; * marks what survives Holm's correction over all of them.

    records: those of each arm, in the order of SEEDS.
    """
    runs = {measure: {arm: [{"facts": row["after"][measure]} for row in rows]
                      for arm, rows in records.items()} for measure in MEASURES}
    differences = {measure: studies.differences(arms) for measure, arms in runs.items()}
    significant = studies.holm({(measure, arm): studies.p_value(values)
                                for measure, arms in differences.items()
                                for arm, values in arms.items()})
    tables = []
    for measure, arms in runs.items():
        before = fmean(row["before"][measure] for row in [*records.values()][0])
        lines = [["before", f"{before:.3f}", None]]
        for arm, rows in arms.items():
            values = differences[measure].get(arm)
            star = " *" if (measure, arm) in significant else ""
            lines.append([arm, studies.seed_interval([row["facts"] for row in rows]),
                          values and studies.seed_interval(values, "+") + star])
        tables.append(table([measure, "after", "minus first arm"], lines))
    return tables


if __name__ == "__main__":
    baselines.CHANGES["messages"] = messages
    baselines.NAMES["messages"] = messages.__doc__
    is_run = sys.argv[1:] and sys.argv[1] in baselines.NAMES
    run_script(baselines.main if is_run else main, "lint_study")
