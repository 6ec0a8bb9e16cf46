"""Write the figure and the tables of smollm2.md from the records in smollm2.jsonl:

    python notebooks/smollm2.py                        # from the committed records
    python notebooks/smollm2.py "R_φ" 0 runs/prose     # first adds the record of a finished run

A record has the figures of one run: its held-out means before and after training, some metrics
of each iteration, its phases, and its first ten held-out responses. A new record replaces the
old one of the same name and seed.
"""

import sys
from pathlib import Path
from statistics import fmean

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from data import read_rows, write_rows  # noqa: E402
from experiments.studies import sheet  # noqa: E402
from report import svg_line  # noqa: E402

PAGE = ROOT / "notebooks" / "smollm2.md"
CURVES = {"fact accuracy": "right facts", "repeated facts": "repeated facts per response",
          "kl": "KL from the SFT policy, nats per response",
          "true_delta": "mean δ per token, by the annotator"}
JUDGED = "good_precision", "good_recall", "poor_precision", "poor_recall"
MAIN = "R_φ"                                  # the runs of the figure and of the phases
WINDOW = 5                                    # iterations, of 16 rollouts each


def read_run(name: str, seed: int, run: Path) -> dict:
    """The record of a finished run."""
    metrics = read_rows(run / "metrics.jsonl")
    result, = read_rows(run / "result.json")
    samples = {side: read_rows(run / f"{side}_samples.jsonl")[:10]
               for side in ("before", "after")}
    phases = [[row["phase"], round(row["seconds"]), round(row["GB"], 1)]
              for row in read_rows(run / "phases.jsonl")]
    return {"run": name, "seed": seed, **result,
            "kl_target": metrics[-1].get("kl_target", 0), "phases": phases,
            "curves": {key: [row.get(key) for row in metrics] for key in (*CURVES, *JUDGED)},
            "posts": [row["prompt"].partition("Post: ")[2] for row in samples["before"]],
            "responses": {side: [row["response"] for row in rows]
                          for side, rows in samples.items()}}


def smooth(curve: list[float]) -> list[float]:
    """Means over WINDOW iterations."""
    return [fmean(curve[i - WINDOW : i]) for i in range(WINDOW, len(curve) + 1)]


def charts(records: list[dict]) -> list[str]:
    """A chart of each of CURVES, with a line per seed; the annotator's δ has ten points."""
    figures = []
    for key, title in CURVES.items():
        series = {}
        for record in records:
            curve = record["curves"][key]
            series[f"seed {record['seed']}"] = curve if None in curve else smooth(curve)
        length = len(next(iter(series.values())))
        start = 1 if length == len(records[0]["curves"][key]) else WINDOW
        figures.append(svg_line(title, [*range(start, start + length)], series))
    return figures


def run_lines(records: list[dict]) -> list[list]:
    """A line of the table of runs for each record."""
    lines = [["rewards by", "seed", "iterations", "right facts", "last iterations; best",
              "repeated facts", "perplexity", "KL; target", "tokens", "minutes; GB"]]
    for record in records:
        before = record["before"]
        after = record["after"]
        facts = smooth(record["curves"]["fact accuracy"])
        kl = smooth(record["curves"]["kl"])[-1]
        minutes = sum(seconds for _, seconds, _ in record["phases"]) / 60
        memory = max(gigabytes for _, _, gigabytes in record["phases"])

        def change(key, digits):
            return f"{before[key]:.{digits}f} → {after[key]:.{digits}f}"

        lines.append([
            record["run"], record["seed"], len(record["curves"]["kl"]),
            change("fact accuracy", 3),
            f"{facts[-1]:.3f}; {max(facts[len(facts) // 2:]):.3f}",
            change("repeated facts", 2), change("perplexity under the base", 1),
            f"{kl:.1f}; {record['kl_target'] or '–'}", change("response_tokens", 1),
            f"{minutes:.0f}; {memory}"])
    return lines


def judged_lines(records: list[dict]) -> list[list]:
    """Precision and recall of R_φ against the annotator, on rollouts of each run's halves."""
    lines = [["seed", "iterations", "good tokens, precision / recall",
              "poor tokens, precision / recall"]]
    for record in records:
        middle = len(record["curves"]["kl"]) // 2
        for half, part in (("first half", slice(middle)), ("second half", slice(middle, None))):
            means = []
            for key in JUDGED:
                values = [x for x in record["curves"][key][part] if x is not None]
                means.append(f"{fmean(values):.3f}" if values else "–")
            lines.append([record["seed"], half, " / ".join(means[:2]), " / ".join(means[2:])])
    return lines


def phase_lines(records: list[dict]) -> list[list]:
    """Seconds and peak memory of each phase of the runs."""
    lines = [["phase", *(f"seed {record['seed']}" for record in records)]]
    for phases in zip(*(record["phases"] for record in records)):
        cells = [f"{seconds} s; {gigabytes} GB" for _, seconds, gigabytes in phases]
        lines.append([phases[0][0], *cells])
    return lines


def response_lines(stages: dict[str, tuple[dict, str]]) -> list[list]:
    """The first ten held-out responses of each stage: name → (record, "before" or "after")."""
    posts = next(iter(stages.values()))[0]["posts"]
    assert all(record["posts"] == posts for record, _ in stages.values()), "the same posts"
    columns = [record["responses"][side] for record, side in stages.values()]
    return [["post", *stages], *zip(posts, *columns)]


def markdown(lines: list[list]) -> str:
    """A Markdown table; the first line is its header."""
    rows = [" | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in line)
            for line in lines]
    rule = "|".join("---" for _ in lines[0])
    return "\n".join([f"| {rows[0]} |", f"|{rule}|", *(f"| {row} |" for row in rows[1:])])


def write_page(page: Path):
    """Write the figure, and the tables between their markers in the page."""
    records = read_rows(page.with_suffix(".jsonl"))
    main_runs = [record for record in records if record["run"] == MAIN]
    page.with_suffix(".svg").write_text(sheet(charts(main_runs), across=2))
    first = {record["run"]: record for record in reversed(records)}      # the lowest seed
    stages = {"SFT": (first[MAIN], "before"), MAIN: (first[MAIN], "after"),
              "the annotator": (first["the annotator"], "after")}
    tables = {"runs": run_lines(records), "judged": judged_lines(main_runs),
              "phases": phase_lines(main_runs), "responses": response_lines(stages)}
    text = page.read_text()
    for name, lines in tables.items():
        before, start, rest = text.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition("<!-- end -->")
        assert start and end, f"{page}: the markers of the table {name} are missing"
        text = f"{before}{start}{markdown(lines)}\n{end}{after}"
    page.write_text(text)


def main(arguments: list[str], page: Path = PAGE):
    """Add the record of a run, if one is named, and write the page."""
    if arguments:
        name, seed, run = arguments
        path = page.with_suffix(".jsonl")
        records = read_rows(path) if path.exists() else []
        records = [record for record in records
                   if (record["run"], record["seed"]) != (name, int(seed))]
        records.append(read_run(name, int(seed), Path(run)))
        order = list(dict.fromkeys(record["run"] for record in records))
        records.sort(key=lambda record: (order.index(record["run"]), record["seed"]))
        write_rows(path, records)
    write_page(page)


if __name__ == "__main__":
    main(sys.argv[1:])
