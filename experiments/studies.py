"""Studies of the paper's claims in the toy world, where the truth is known.

    python -m experiments.studies baselines       # or designs, reasoning, placement, advantages
    python -m experiments.studies                 # all of them

A study is a table of commands: an arm is the words after `python -m experiments.baselines`, so
it can be copied into a shell, with a seed in place of {seed}. Each arm runs with five seeds. A
run is a process of one thread, and two of them run at a time. Its record is one line of
records.jsonl, beside this file, with the commit of the code. Runs that have a record are
skipped, and a stopped run continues in its directory in runs/studies. To repeat a run, remove
both.

The figure is the mean accuracy of the facts in responses to held-out posts. Intervals are 95 %
intervals over seeds by Student's t; differences are paired by seed.

Paper: §3.6, §4.3, §4.5, Tables 1, 2, 3 and 11, Figures 5 and 6, Appendices I and N.
"""

import math
import os
import re
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean, stdev

from tqdm import tqdm

from data import InputError, append_row, git, read_rows, run_script, whole_rows
from experiments.baselines import split_names
from report import svg_line, table

# ── The arms

# The fourth version tuned the rates, each on two seeds that give no result here: it tried
# 3e-4, 1e-3 and 3e-3, then neighbours of the best one, until both neighbours were worse. The
# rate of V is always .007, so that its factor changes with the rate. Rates without a comment
# here, .001, are the default of the toy world.
RATE_3 = "--learning_rate .003 --value_rate_factor 2.333"
RATE_10 = "--learning_rate .01"                      # of SFT, also used for reflection
R_PHI = "--reward_model runs/studies/text2grad_{seed}/reward/adapter"
TRUE = f"--critic annotator {RATE_3}"
LONG = f"--task experiments.designs:LONG {TRUE}"
# Ten passes instead of four, tuned together with the rate of the scalar reward model, .001.
PPO = f"ppo {RATE_3} --reward_epochs 5"


def directory(words: str) -> str:
    """The run directory of an arm; the R_φ of another run is not part of its name."""
    name = re.sub(r"[^\w.]+", "_", words.partition(" --reward_model")[0])
    return f"runs/studies/{name}_{{seed}}"


SCALAR = f"--reward_model {directory(PPO)}/reward/adapter"
STUDIES = {
    "baselines": {
        "Text2Grad": "text2grad",
        "PPO": PPO,
        "PPO, R_φ's sum": f"end {R_PHI}",
        "GRPO": f"ppo grpo --responses_per_prompt 4 {RATE_3} {SCALAR}",
        "RLOO": f"ppo rloo --responses_per_prompt 4 {SCALAR}",
        "DPO": "dpo --learning_rate .0003",
        "SFT": f"sft {RATE_10}",
        "ILF": "ilf --learning_rate .003",
        "reflection": f"reflection {RATE_10} {R_PHI}"},
    "designs": {
        "spans": f"text2grad {TRUE}",
        "importance": f"importance {TRUE}",
        "linear decay": "linear_decay --critic annotator",
        "dense labels": f"text2grad {TRUE} --annotator_function "
                        "experiments.designs:critique_dense --mode experiments.modes:DENSE"},
    "reasoning": {
        "chain of thought": "text2grad",
        "verdicts alone": "text2grad --annotator_function experiments.designs:critique_no_cot "
                          "--mode no_cot",
        "no prose": "text2grad --annotator_function experiments.designs:critique_spans "
                    "--mode no_cot"},
    "placement": {
        "20 tokens: at its place": f"text2grad {TRUE}",
        "20 tokens: at the end": f"end {TRUE}",
        "80 tokens: at its place": f"text2grad {LONG}",
        "80 tokens: at the end": f"end {LONG}"},
    "advantages": {
        "at its place: Definition 1": f"definition_1 {TRUE}",
        "at its place: reward-to-go": f"reward_to_go {TRUE}",
        "at its place: GAE": f"text2grad {TRUE}",
        "one fact late: Definition 1": f"late definition_1 {TRUE}",
        "one fact late: reward-to-go": f"late reward_to_go {TRUE}",
        "one fact late: GAE": f"late {TRUE}"}}
SEEDS = range(5)
PROCESSES = 2


# ── Runs and records

ROOT = Path(__file__).parent.parent
RECORDS = Path(__file__).with_name("records.jsonl")


def read_records() -> dict[tuple, dict]:
    """The records by (words, seed). Raises InputError where the file is damaged or cut off."""
    if not RECORDS.exists():
        return {}
    return {(row["words"], row["seed"]): row for row in read_rows(RECORDS)}


def code_commit() -> str:
    """The last commit that changed the code of a run."""
    words = "log -1 --format=%h -- *.py toy :!tests :!notebooks :!bench :!measures"
    return git(*words.split()) or "unknown"


def record_of(words: str, seed: int) -> dict:
    """The figures of a finished run."""
    out = ROOT / directory(words).format(seed=seed)
    result, = read_rows(out / "result.json")
    settings, = read_rows(out / "config.json")
    adapter = settings["reward_model"] or out / "reward" / "adapter"
    judge = whole_rows(ROOT / Path(adapter).with_name("metrics.json"))
    metrics = whole_rows(out / "metrics.jsonl")
    return {"words": words, "seed": seed, "commit": code_commit(),
            "judge": judge[-1] if judge else {},
            "before": result["before"]["fact accuracy"],
            "facts": result["after"]["fact accuracy"],
            "curve": [round(row["fact accuracy"], 4) for row in metrics],
            "kl": metrics[-1]["kl"] if metrics else None,
            "seconds": sum(row["seconds"] for row in whole_rows(out / "phases.jsonl"))}


def execute(run: tuple) -> str | None:
    """Execute a run (words, seed) in a process of one thread, and append its record.

    Its output goes to DIRECTORY.log. Returns the path of this file if the run failed.
    """
    words, seed = run
    out = directory(words).format(seed=seed)
    log = ROOT / f"{out}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "experiments.baselines", *words.format(seed=seed).split(),
               "--seed", str(seed), "--output_dir", out]
    with open(log, "a") as file:
        process = subprocess.run(command, cwd=ROOT, stdout=file, stderr=file,
                                 env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False)
    if process.returncode:
        return str(log)
    append_row(RECORDS, record_of(words, seed))


def execute_all(runs: list[tuple]):
    """Execute runs; those that need a reward model of another run follow all others.

    A run that fails stops no other one. Raises InputError at the end if one failed.
    """
    logs = []
    with ThreadPoolExecutor(PROCESSES) as pool:
        for needs_another in (False, True):
            part = [run for run in runs if ("--reward_model" in run[0]) == needs_another]
            logs += filter(None, tqdm(pool.map(execute, part), "runs", len(part)))
    if logs:
        raise InputError(f"{len(logs)} of {len(runs)} runs failed; the reason is in the last "
                         f"line of {', '.join(logs)}")


# ── Statistics and tables

def seed_interval(values: list[float], sign="") -> str:
    """Mean ± half of the 95 % interval over five seeds by Student's t."""
    half = 2.776 * stdev(values) / math.sqrt(len(values))
    return f"{fmean(values):{sign}.3f} ± {half:.3f}"


def p_value(differences: list[float]) -> float:
    """Two-sided p of a paired t test of five differences against 0 (4 degrees of freedom)."""
    mean = fmean(differences)
    share = mean**2 / (mean**2 + 4 * stdev(differences)**2 / 5)        # t² / (t² + 4)
    # The distribution function of Student's t in closed form.
    return 1 - 1.5 * math.sqrt(share) * (1 - share / 3)


def holm(p_values: dict) -> set:
    """The comparisons that are significant at 5 % after Holm's correction."""
    significant = set()
    for i, name in enumerate(sorted(p_values, key=p_values.get)):
        if p_values[name] > 0.05 / (len(p_values) - i):
            break
        significant.add(name)
    return significant


def differences(name: str, records: dict) -> dict[str, list[float]]:
    """Facts of each arm minus those of the first arm of its group, paired by seed.

    The group is the part of an arm's name in front of a colon. Unfinished arms are left out.
    """
    arms = STUDIES[name]
    result = {}
    for arm, words in arms.items():
        group = arm.rpartition(": ")[0]
        first = next(arms[other] for other in arms if other.startswith(group))
        pairs = [(records.get((words, seed)), records.get((first, seed))) for seed in SEEDS]
        if words != first and all(map(all, pairs)):
            result[arm] = [run["facts"] - other["facts"] for run, other in pairs]
    return result


def study_table(name: str, records: dict) -> str:
    """The table of one study; * marks what survives Holm's correction over all studies.

    The lines below it say how right scalar reward models are, and of which commits the
    records are.
    """
    p_values = {(study, arm): p_value(values) for study in STUDIES
                for arm, values in differences(study, records).items()}
    significant = holm(p_values)
    rows = []
    commits = Counter()
    notes = f"\n\n*: significant at 5 %, corrected for {len(p_values)} comparisons.\n"
    for arm, words in STUDIES[name].items():
        runs = [records[words, seed] for seed in SEEDS]
        commits.update(run["commit"] for run in runs)
        difference = differences(name, records).get(arm)
        star = " *" if (name, arm) in significant else ""
        rows.append([arm, seed_interval([run["facts"] for run in runs]),
                     difference and seed_interval(difference, "+") + star])
        if "right" in runs[0]["judge"]:
            least = min(run["judge"]["right"] for run in runs)
            notes += f"{arm}: the worst reward model is right on {least:.3f} (needed: .7)\n"
    for commit, count in commits.items():
        notes += f"{count} records are of commit {commit}; the code is now {code_commit()}.\n"
    return table([name, "facts", "minus first arm"], rows) + notes


def study_figure(name: str, records: dict) -> str:  # Figure 5; Figure 6
    """The mean accuracy of the facts in the rollouts of each arm, as one SVG."""
    curves = {}
    for arm, words in STUDIES[name].items():
        points = zip(*(records[words, seed]["curve"] for seed in SEEDS))
        curve = list(map(fmean, points))
        if curve:                          # methods that train on fixed texts have none
            curves[arm] = curve
    iterations = max(map(len, curves.values()))
    return svg_line(name, list(range(1, iterations + 1)), curves)


# ── The command line

def main():
    """Execute the runs without a record, then print the tables and write the figures."""
    names, flags = split_names(sys.argv[1:], STUDIES)
    if flags:
        raise InputError(f"{flags[0]}: there are no flags; name {', '.join(STUDIES)}")
    names = names or [*STUDIES]
    runs = [(words, seed) for name in names for words in STUDIES[name].values()
            for seed in SEEDS]
    records = read_records()
    execute_all([run for run in dict.fromkeys(runs) if run not in records])
    records = read_records()
    for name in names:
        path = ROOT / f"runs/studies/{name}.svg"
        path.write_text(study_figure(name, records), "utf-8")
        print(f"{study_table(name, records)}\nFigure: {path}\n")


if __name__ == "__main__":
    run_script(main, "studies")
