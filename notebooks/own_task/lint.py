"""A task of your own (own_task.md): Python functions, and a linter as the critic, ruff."""

import re
import subprocess
from functools import cache
from itertools import permutations
from random import Random

from ruff import find_ruff_bin

from data import Task
from measures.sandbox import code_of

# What a function shall return, and Python that returns it. Every fourth job is held out.
JOBS = dict(job.split(" = ") for job in """\
the largest number in = max(xs); the sum of = sum(xs); the smallest number in = min(xs);
the mean of = sum(xs) / len(xs); the last number in = xs[-1]; the sorted list of = sorted(xs);
the even numbers in = [x for x in xs if x % 2 == 0]; the length of = len(xs);
the squares of = [x * x for x in xs]; the reverse of = xs[::-1];
twice each number in = [2 * x for x in xs]; the first number in = xs[0];
one more than each number in = [x + 1 for x in xs]; the set of = set(xs);
the largest minus the smallest of = max(xs) - min(xs);
the positive numbers in = [x for x in xs if x > 0]""".replace("\n", " ").split("; "))
NAMES = "prices ages scores years steps bills debts fees hours miles runs tips goals gaps wins"

# Errors, types, names of builtins, unused arguments, likely bugs, clumsy code, prints. With
# --ignore-noqa, the policy cannot switch the linter off by a comment.
RUFF = [find_ruff_bin(), *"check --isolated --ignore-noqa --quiet --exit-zero --select".split(),
        "E,F,W,ANN,A,ARG,B,C4,PIE,PLR,RET,SIM,UP,T20", "--output-format=concise", "-"]

# The chat. Two answers show the form. The first or the second has the TYPES that ruff wants.
TYPES = ")", ": list[int]) -> int"
CHAT = """\
system: Write Python functions of a list of integers.
user: solve(sizes): the third number in sizes
assistant: ```python
def solve(sizes{}:
    return sizes[2]
```
user: solve(codes): the first plus the last number in codes
assistant: ```python
def solve(codes{}:
    return codes[0] + codes[-1]
```
user: solve({}): {}"""
FORM = re.compile(r"```python\ndef .*\n((?:[ \t].*)?\n)*```")


def write_prompt(row: dict) -> list[dict]:
    """The chat, with the question of a row at its end."""
    types = sorted(TYPES, reverse=len(row["id"]) % 2)
    text = CHAT.format(*types, row["id"].split()[-1], row["id"])
    turns = [turn.split(": ", 1) for turn in re.split(r"\n(?=\w+: )", text)]
    return [{"role": role, "content": content} for role, content in turns]


def make_rows(split: str, n: int, seed: int) -> list[dict]:
    """n prompts in random order. The id is a job with a name, or with two if n is above 180."""
    jobs = [job for i, job in enumerate(JOBS) if (i % 4 == 3) == (split == "eval")]
    names = NAMES.split()
    names += map("_".join, permutations(names, 2)) if n > 180 else []
    rows = [{"id": f"{job} {name}"} for job in jobs for name in names]
    return Random(seed).sample(rows, min(n, len(rows)))


@cache
def lint(code: str) -> list[tuple[str, str]]:
    """ruff's messages about a program: [(number of a line, message)]. Raises if ruff fails."""
    found = subprocess.check_output(RUFF, input=code, encoding="utf-8")
    return re.findall(r"(?m)^-:(\d+):\d+: (.*)", found)


def critic(row: dict, response: str) -> dict:
    """ruff's messages as a critique, which quotes whole lines.

    Good are the fences and the first line of the function. If each line without a message were
    good, long answers would earn more. Poor are lines with a message, and all other text.
    """
    # Each line has the line break before it, so that the last "```" is found only once.
    lines = re.split("(?=\n)", response)
    form = FORM.match(response)
    end = form[0].count("\n") if form else -1                           # the last fence
    good = {0, 1, end} if form else set()
    poor = {i for i in range(end + 1, len(lines)) if lines[i].strip()}
    said = [] if form and not poor else ["One function in one code block was asked for."]
    for number, message in lint(code_of(response)):
        said.append(f"Line {number}: {message}.")
        if "invalid-syntax" in message:                  # then ruff checks no other line
            poor |= {*range(1, end)}
        elif int(number) < end:
            poor.add(int(number))
    return {"critique": " ".join(said) or "Clean.",
            "good_spans": [lines[i] for i in good - poor],
            "poor_spans": [lines[i] for i in poor]}


LINT = Task(
    "lint", write_prompt, ("id",), rows=make_rows,
    tests=lambda row: (
        "from solution import solve\nfor xs in [3, 1, -2, 8], [5, 4], [-7, 0, 2, 2, 9]:\n"
        f"    assert solve(xs[:]) == {JOBS[row['id'].rpartition(' ')[0]]}"),
    settings={"model": "HuggingFaceTB/SmolLM2-135M-Instruct", "critic": "annotator",
              "annotator_function": "lint:critic", "annotated_rows": 180,
              "max_new_tokens": 120, "iterations": 8, "learning_rate": 3e-4,
              "value_rate_factor": 30, "lam": 0.7},
    truth={"clean": lambda _, y: bool(FORM.fullmatch(y.strip()) and not lint(code_of(y))),
           "messages": lambda _, y: len(lint(code_of(y))),
           "parses": lambda _, y: "invalid-syntax" not in str(lint(code_of(y)))})
