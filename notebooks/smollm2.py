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
          "kl": "KL from the SFT policy, nats per response"}
MAIN = "R_φ"                                  # the runs of the figure and of the phases
WINDOW = 5                                    # iterations, of 16 rollouts each


def read_run(name: str, seed: int, run: Path) -> dict:
    """The record of a finished run."""
    metrics = read_rows(run / "metrics.jsonl")
    config, = read_rows(run / "config.json")
    result, = read_rows(run / "result.json")
    samples = {side: read_rows(run / f"{side}_samples.jsonl")[:10]
               for side in ("before", "after")}
    phases = [[row["phase"], round(row["seconds"])] for row in read_rows(run / "phases.jsonl")]
    return {"run": name, "seed": seed, **result,
            "kl_target": config["kl_target"], "phases": phases,
            "curves": {key: [row.get(key) for row in metrics] for key in CURVES},
            "posts": [row["prompt"].partition("Post: ")[2] for row in samples["before"]],
            "responses": {side: [row["response"] for row in rows]
                          for side, rows in samples.items()}}


def smooth(curve: list[float]) -> list[float]:
    """Means over WINDOW iterations."""
    return [fmean(curve[i - WINDOW : i]) for i in range(WINDOW, len(curve) + 1)]


def charts(records: list[dict]) -> list[str]:
    """A chart of each of CURVES, with a line per seed."""
    figures = []
    for key, title in CURVES.items():
        series = {f"seed {record['seed']}": smooth(record["curves"][key]) for record in records}
        iterations = range(WINDOW, len(records[0]["curves"][key]) + 1)
        figures.append(svg_line(title, [*iterations], series))
    return figures


def run_lines(records: list[dict]) -> list[list]:
    """A line of the table of runs for each record."""
    lines = [["rewards by", "seed", "iterations", "right facts", "last iterations; best",
              "repeated facts", "perplexity", "KL; target", "tokens", "minutes"]]
    for record in records:
        before = record["before"]
        after = record["after"]
        facts = smooth(record["curves"]["fact accuracy"])
        kl = smooth(record["curves"]["kl"])[-1]
        minutes = sum(seconds for _, seconds in record["phases"]) / 60

        def change(key, digits):
            return f"{before[key]:.{digits}f} → {after[key]:.{digits}f}"

        lines.append([
            record["run"], record["seed"], len(record["curves"]["kl"]),
            change("fact accuracy", 3),
            f"{facts[-1]:.3f}; {max(facts[len(facts) // 2:]):.3f}",
            change("repeated facts", 2), change("perplexity under the base", 1),
            f"{kl:.1f}; {record['kl_target'] or '–'}", change("response_tokens", 1),
            f"{minutes:.0f}"])
    return lines


def phase_lines(records: list[dict]) -> list[list]:
    """Seconds of each phase of the runs."""
    lines = [["phase", *(f"seed {record['seed']}" for record in records)]]
    for phases in zip(*(record["phases"] for record in records)):
        lines.append([phases[0][0], *(f"{seconds} s" for _, seconds in phases)])
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
    page.with_suffix(".svg").write_text(sheet(charts(main_runs)))
    first = {record["run"]: record for record in reversed(records)}      # the lowest seed
    stages = {"SFT": (first[MAIN], "before"), MAIN: (first[MAIN], "after"),
              "the annotator": (first["the annotator"], "after")}
    tables = {"runs": run_lines(records), "phases": phase_lines(main_runs),
              "responses": response_lines(stages)}
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
