"""The study of own_task.md: baselines.py with one more design, `messages`.

    export PYTHONPATH=notebooks/own_task:.
    python -m lint_study text2grad --task lint:LINT --seed 0     # ruff's lines, per token
    python -m lint_study end --task lint:LINT --seed 0           # their sum at the last token
    python -m lint_study messages --task lint:LINT --seed 0      # minus the number of messages
    python -m lint_study rejection --rounds 4 --annotated_rows 128 --task lint:LINT --seed 0

Each arm has 128 judged answers. None of these commands has been run to its end.
"""

from data import run_script
from experiments import baselines
from lint import code_of, lint


def messages(text, offsets, review) -> list[float]:
    """minus the number of ruff's messages at the last token, as in arXiv 2605.30478"""
    return [0.0] * (len(offsets) - 1) + [-float(len(lint(code_of(text))))]


if __name__ == "__main__":
    baselines.CHANGES["messages"] = messages
    baselines.NAMES["messages"] = messages.__doc__
    run_script(baselines.main, "lint_study")
