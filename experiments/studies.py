"""Studies of the paper's claims in the toy world, where the truth is known.

    python -m experiments.studies baselines       # or designs, reasoning, placement, advantages
    python -m experiments.studies                 # all of them

A study is a table of commands: an arm is the words after `python -m experiments.baselines`, so
it can be copied into a shell, with a seed in place of {seed}. Each arm runs with five seeds. A
run is a process of one thread, and --processes of them run at a time. Its record is one line of
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
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

from tqdm import tqdm

from data import InputError, append_row, read_rows, run_script, whole_rows
from experiments.baselines import split_names
from report import svg_line, table
from settings import flag, parse_flags

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
NO_COT = "text2grad --annotator_function experiments.designs:critique_{} --mode no_cot"
STUDIES = {
    "baselines": {
        "Text2Grad": "text2grad",
        "PPO": PPO,
        "PPO, R_φ's sum": f"end {R_PHI}",
        "PRM-PPO": "prm_ppo",
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
        "verdicts alone": NO_COT.format("no_cot"),
        "no prose": NO_COT.format("spans")},
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
LEAST_RIGHT = 0.7                       # accuracy of a scalar or step reward model


# ── Runs and records

ROOT = Path(__file__).parent.parent
RECORDS = Path(__file__).with_name("records.jsonl")


def read_records() -> dict[tuple, dict]:
    """The records by (words, seed). Raises InputError where the file is cut off."""
    if not RECORDS.exists():
        return {}
    if not RECORDS.read_text().endswith("\n"):
        raise InputError(f"{RECORDS}: the last line is cut off; remove it, and start the study "
                         f"again: it continues")
    return {(row["words"], row["seed"]): row for row in read_rows(RECORDS, ("words", "facts"))}


def code_commit() -> str:
    """The last commit that changed the code of a run, with a + if it was changed since."""
    files = "-- '*.py' toy ':!tests' ':!notebooks' ':!bench' ':!measures' ':!eval.py'"
    command = (f"git -C {shlex.quote(str(ROOT))} log -1 --format=%h {files}; "
               f"git -C {shlex.quote(str(ROOT))} diff --quiet HEAD {files} || echo +")
    return subprocess.getoutput(command).replace("\n", "")


def record_of(words: str, seed: int) -> dict:
    """The figures of a finished run."""
    out = ROOT / directory(words).format(seed=seed)
    result, = read_rows(out / "result.json")
    settings, = read_rows(out / "config.json")
    adapter = settings["reward_model"] or out / "reward" / "adapter"
    judge = {}
    for row in whole_rows(ROOT / Path(adapter).with_name("metrics.json")):
        judge = {name: row[name] for name in ("right", "poor_precision", "poor_recall")
                 if name in row}
    metrics = whole_rows(out / "metrics.jsonl")
    return {"words": words, "seed": seed, "commit": code_commit(), "judge": judge,
            "before": result["before"]["fact accuracy"],
            "facts": result["after"]["fact accuracy"],
            "curve": [round(row["fact accuracy"], 4) for row in metrics],
            "kl": metrics[-1]["kl"] if metrics else None,
            "seconds": sum(row["seconds"] for row in whole_rows(out / "phases.jsonl"))}


def start(words: str, seed: int) -> subprocess.Popen:
    """Start one run in a process of one thread; its output goes to DIRECTORY.log."""
    out = directory(words).format(seed=seed)
    log = ROOT / f"{out}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "experiments.baselines", *words.format(seed=seed).split(),
               "--seed", str(seed), "--output_dir", out]
    with open(log, "a") as file:
        return subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file,
                                env=os.environ | {"OMP_NUM_THREADS": "1"})


def run_all(runs: list[tuple], processes: int):
    """Execute runs (words, seed) and append their records.

    A run that fails stops no other one. Raises InputError at the end if one failed.
    """
    waiting = [*runs]
    running = {}
    problems = []
    progress = tqdm(total=len(runs), desc="runs", disable=not runs)
    try:
        while waiting or running:
            for words, seed in [*waiting]:
                needs = re.search(r"--reward_model (\S+)", words.format(seed=seed))
                if len(running) < processes and (not needs or (ROOT / needs[1]).exists()):
                    waiting.remove((words, seed))
                    running[words, seed] = start(words, seed)
            if not running:
                problems.append(f"{waiting[0][0]!r} needs the reward model of another run, "
                                f"which is missing: remove the records of that run from "
                                f"{RECORDS}, and start again")
                break
            time.sleep(0.2)
            for run in [run for run, process in running.items() if process.poll() is not None]:
                progress.update()
                log = ROOT / f"{directory(run[0])}.log".format(seed=run[1])
                if running.pop(run).returncode:
                    problems.append(f"{log.read_text().strip().splitlines()[-1]} (in {log})")
                    continue
                record = record_of(*run)
                append_row(RECORDS, record)
                right = record["judge"].get("right", 1)
                if right < LEAST_RIGHT:
                    problems.append(f"{log}: the reward model is right on {right:.3f} of the "
                                    f"held-out examples, and {LEAST_RIGHT} is needed")
    finally:
        for process in running.values():
            process.terminate()
    if problems:
        raise InputError(f"{len(problems)} of {len(runs)} runs have a problem; the first one: "
                         f"{problems[0]}")


# ── Statistics and tables

def interval(values: list[float], sign="") -> str:
    """Mean ± half of the 95 % interval over five seeds by Student's t."""
    half = 2.776 * stdev(values) / math.sqrt(len(values))
    return f"{fmean(values):{sign}.3f} ± {half:.3f}"


def p_value(differences: list[float]) -> float:
    """Two-sided p of a paired t test of five differences against 0 (4 degrees of freedom)."""
    error = stdev(differences) / math.sqrt(5)
    if error == 0:
        return float(fmean(differences) == 0)
    t = fmean(differences) / error
    share = t * t / (4 + t * t)
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
    firsts = {}
    result = {}
    for arm, words in STUDIES[name].items():
        group = arm.rpartition(": ")[0]
        first = firsts.setdefault(group, words)
        if words != first and all((one, seed) in records for one in (words, first)
                                  for seed in SEEDS):
            result[arm] = [records[words, seed]["facts"] - records[first, seed]["facts"]
                           for seed in SEEDS]
    return result


def study_table(name: str, records: dict) -> str:
    """The table of one study; * marks what survives Holm's correction over all studies."""
    p_values = {(study, arm): p_value(values) for study in STUDIES
                for arm, values in differences(study, records).items()}
    significant = holm(p_values)
    rows = []
    commits = []
    for arm, words in STUDIES[name].items():
        arm_records = [records[words, seed] for seed in SEEDS]
        commits += [record["commit"] for record in arm_records]
        difference = differences(name, records).get(arm)
        star = " *" if (name, arm) in significant else ""
        has_kl = arm_records[0]["kl"] is not None
        rows.append([arm, interval([record["facts"] for record in arm_records]),
                     difference and interval(difference, "+") + star,
                     fmean(record["kl"] for record in arm_records) if has_kl else None])
    header = [name, "facts", "minus first arm", "KL in nats"]
    lines = [table(header, rows), "", f"*: significant at 5 % after Holm's correction over the "
             f"{len(p_values)} comparisons of all studies."]
    now = code_commit()
    for commit in sorted({*commits} - {now}):
        lines.append(f"{commits.count(commit)} of {len(commits)} records are of commit "
                     f"{commit}; the code is now {now}.")
    return "\n".join(lines)


def study_figure(name: str, records: dict) -> str:  # Figure 5; Figure 6
    """One chart of the facts of the rollouts for each arm: mean and 95 % interval."""
    charts = []
    for arm, words in STUDIES[name].items():
        curves = [records[words, seed]["curve"] for seed in SEEDS]
        if curves[0]:
            points = [[*map(float, interval(point).split(" ± "))] for point in zip(*curves)]
            lines = {"mean": [mean for mean, _ in points],
                     "low": [mean - half for mean, half in points],
                     "high": [mean + half for mean, half in points]}
            charts.append(svg_line(arm, [*range(1, len(points) + 1)], lines))
    return sheet(charts)


def sheet(charts: list[str], across: int = 3) -> str:
    """One SVG of charts of `svg_line`, each 340 × 180. across: number of charts per row."""
    out = "".join(f'<svg x="{350 * (i % across)}" y="{190 * (i // across)}" width="340" '
                  f'height="180">{chart}</svg>' for i, chart in enumerate(charts))
    height = 190 * math.ceil(len(charts) / across)
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {350 * across} {height}" '
            f'color="#777">{out}</svg>\n')


# ── The command line

@dataclass
class StudyConfig:
    """Studies."""
    processes: int = flag(2, "runs at a time, of one thread each", least=1)
    output_dir: str = flag("runs/studies", "directory of the figures")


def main():
    """Execute the runs without a record, then print the tables and write the figures."""
    names, flags = split_names(sys.argv[1:], STUDIES)
    config = parse_flags(StudyConfig, __doc__, flags)
    names = names or [*STUDIES]
    runs = [(words, seed) for name in names for words in STUDIES[name].values()
            for seed in SEEDS]
    records = read_records()
    run_all([run for run in dict.fromkeys(runs) if run not in records], config.processes)
    records = read_records()
    for name in names:
        path = Path(config.output_dir, f"{name}.svg")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(study_figure(name, records))
        print(f"{study_table(name, records)}\nFigure: {path}\n")


if __name__ == "__main__":
    run_script(main, "studies")
