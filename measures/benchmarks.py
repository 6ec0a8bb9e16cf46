"""HumanEval, MBPP and their + versions (Table 3).

    problems = read_problems("HumanEvalPlus.jsonl.gz")       # unchanged published files
    programs = [extract_code(write(code_prompt(problem)), problem) for problem in problems]
    code_scores(execute(problems, programs))   # {"id", "pass@1", "plus pass@1"} of each task

Paper: §4.4, Table 3. The paper does not say how code is extracted from answers and run.

The + files of evalplus contain inputs, but no outputs. On each input, the sandbox runs the
program and the reference solution, and compares their outputs with evalplus' tolerance. The +
files on the Hugging Face hub contain tests, which are run unchanged. For MBPP+, the hub's file
is the better choice. Its inputs have types that JSON lacks, such as tuples, and its tests allow
for tasks with several right outputs.

Departures: one time limit covers all base inputs of a task, and one all + inputs, both with the
reference solution; evalplus limits each input. As in evalplus, only the imports of an answer
and what the tested function needs are kept. But evalplus takes the longest valid run of lines;
here, code in Markdown fences comes first. If an answer defines the function twice, the last
definition counts; in evalplus, the first. Statements that fill a needed variable are kept. A
function with a syntax error is not cut until the rest is valid. An answer may omit the
imports and helpers of HumanEval's prompt, or be only a function's body. If it does not define
the function, all of its code is run.
"""

import ast
import dis
import inspect
import marshal
import re
import textwrap
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from tqdm import tqdm

from data import InputError, read_rows
from measures.sandbox import INVALID, code_of, python_in, run_python

# ── Reading the published files

@dataclass(frozen=True)
class Problem:
    """A programming task (Table 3).

    prompt: description of the task for the model. head: beginning of the program, which an
    answer may omit; "" in MBPP. solution: the reference program. base, plus: the base tests
    and the + tests, as code; plus is None if the file has no + tests.
    """
    task_id: str
    prompt: str
    head: str
    solution: str
    base: str
    plus: str | None = None


def read_problems(path) -> list[Problem]:
    """Problems of HumanEval, MBPP (full or sanitized) or a + file of evalplus.

    The fields of a row identify the benchmark. Raises InputError if a row has another format.
    """
    problems = []
    for number, row in enumerate(read_rows(path, [("task_id",)]), 1):
        try:
            problems.append(_mbpp(row) if "code" in row else _humaneval(row))
        except (LookupError, TypeError, AttributeError) as error:
            raise InputError(f"{path}, row {number}: this is not a task of HumanEval, MBPP or "
                             f"evalplus ({error!r}); use a published file") from error
    return problems


def _humaneval(row: dict) -> Problem:
    """The problem of a row of HumanEval or evalplus. MBPP+ has only a docstring as prompt."""
    prompt = row["prompt"]
    name = row["entry_point"]
    if "plus_input" in row:
        base = _input_tests(row, "base_input")
        plus = _input_tests(row, "plus_input")
    else:
        base = f"{row['test']}\ncheck({name})\n"
        plus = None
    head = prompt.rstrip() + "\n" if f"def {name}(" in prompt else ""
    solution = prompt + row["canonical_solution"]
    return Problem(row["task_id"], prompt, head, solution, base, plus)


def _mbpp(row: dict) -> Problem:
    """The problem of a row of MBPP, or of the hub's MBPP+, where `test` holds the + tests."""
    tests = "\n".join(row["test_list"])
    setup = "\n".join([*row.get("test_imports", []), row.get("test_setup_code", "")])
    prompt = f"{row.get('text') or row['prompt']}\nIt must pass these tests:\n{tests}"
    return Problem(f"Mbpp/{row['task_id']}", prompt, "", row["code"], f"{setup}\n{tests}",
                   row.get("test"))


# Tasks of MBPP+ whose reference solution needs types that JSON lacks.
TUPLES = "Mbpp/106", "Mbpp/580", "Mbpp/720"
COMPLEX = "Mbpp/124", "Mbpp/252"


def _restored(task: str, value):
    """A value of an input, as a tuple or a complex number if its task needs one."""
    if task in TUPLES and isinstance(value, list):
        return tuple(_restored(task, item) for item in value)
    return complex(value) if task in COMPLEX else value


def _input_tests(row: dict, field: str) -> str:
    """Tests that compare the outputs of a program with those of the reference solution."""
    name = row["entry_point"]
    inputs = [[_restored(row["task_id"], value) for value in args] for args in row[field]]
    # Unlike JSON, marshal keeps tuples and complex numbers.
    return f"""import marshal
import solution
{inspect.getsource(_check_outputs)}
right = {{}}
exec({row["prompt"] + row["canonical_solution"]!r}, right)
inputs, fresh = map(marshal.loads, [{marshal.dumps(inputs)!r}] * 2)
_check_outputs({name!r}, solution.{name}, right[{name!r}], inputs, fresh, {row["atol"]})
"""


def _check_outputs(name: str, function, reference, inputs: list, fresh: list, atol: float):
    """Assert that both functions have the same outputs, with the tolerance of evalplus.

    The source of this function is run in the sandbox. name: name of the tested function. fresh:
    a copy of the inputs for the reference, because the function may modify its arguments.
    """
    for number, (args, fresh_args) in enumerate(zip(inputs, fresh)):
        out = function(*args)
        expected = reference(*fresh_args)
        if name == "find_zero":                           # any root of the polynomial is right
            out = sum(x * out ** power for power, x in enumerate(fresh_args[0]))
            expected = 0.0
        if name in ("check_str", "text_match_three", "text_starta_endb"):  # a match or None
            out = bool(out)
            expected = bool(expected)
        items = expected if isinstance(expected, (list, tuple)) else [expected]
        if set(map(type, items)) == {float}:
            atol = atol or 1e-6
        is_right = out == expected
        if not is_right and atol and type(out) is type(expected):
            from numpy import allclose, shape
            is_right = shape(out) == shape(expected) and allclose(out, expected, 1e-7, atol)
        assert is_right, f"input {number}: {out!r} instead of {expected!r}"[:400]


# ── Prompt, answer and execution

def code_prompt(problem: Problem) -> str:
    """The prompt for a chat model: to complete HumanEval's function, or to write MBPP's.

    The wording is ours.
    """
    task = (f"Complete this Python function.\n\n```python\n{problem.prompt}```" if problem.head
            else f"Write a Python function for this task.\n\n{problem.prompt}")
    return f"{task}\n\nAnswer with the whole program in one code block: imports, helpers and " \
           f"the function."


def extract_code(response: str, problem: Problem) -> str:
    """The part of a chat model's answer that the tested function needs.

    HumanEval's prompt is put in front of this part, so the answer may omit the imports and
    helpers of the prompt, or be only the body of the function. If the answer does not define
    the function, all of its code is kept.
    """
    answer = response.rpartition("</think>")[2]
    code = code_of(answer)
    head = problem.head and f"{problem.head}    pass\n\n"
    body = textwrap.indent(textwrap.dedent(code), "    ")
    # HumanEval tests the last function of the head; those before it are helpers.
    called = (re.findall(r"def (\w+)", problem.head)[-1:]
              or re.findall(r"(\w+)\(", f"{problem.base}{problem.plus}"))
    # The last two texts take the code as the function's body. Either all of its lines have
    # lost the same indentation, or only the first line has lost its indentation.
    for text in (code, answer, problem.head + body, f"{problem.head}    {code.lstrip()}"):
        if program := needed_code(text, called):
            return head + program
    return head + code


def needed_code(text: str, called) -> str:
    """The functions in `called`, the statements that they need, and all imports of a text.

    Imports from __future__ are left out. A statement is needed if it defines or mentions a
    global name that the functions use, directly or through other functions. Statements that
    only test or call the functions, or read input, are left out. Returns "" if the text defines
    none of the functions.
    """
    statements = []              # [(statement, its text, its code object, names that it binds)]
    known = {"setrecursionlimit"}
    for node in ast.parse(python_in(text)).body:
        with suppress(*INVALID):                     # such as a `return` outside of functions
            code = compile(ast.Module([node], []), "answer", "exec")
            bound = {step.argval for step in dis.get_instructions(code)
                     if step.opname == "STORE_NAME"}
            statements.append((node, ast.unparse(node), code, bound))
            known |= bound
    functions = known.intersection(called)
    needed = {"setrecursionlimit", *functions}
    size = 0
    while size < len(needed):             # until a round finds no more names
        size = len(needed)
        kept = []
        for node, source, code, bound in statements:
            names = set(code.co_names)
            is_import = hasattr(node, "names")
            is_used = names & needed and not isinstance(node, ast.Assert)
            is_check = names & {"__name__", "input", *functions} and not bound & needed
            if "__future__" not in names and (is_import or is_used and not is_check):
                kept.append(source)
                inner = [] if is_import else [code]
                for block in inner:       # the statement, then each function inside of it
                    needed |= known.intersection(block.co_names)
                    inner += [value for value in block.co_consts if hasattr(value, "co_code")]
    return "\n".join(kept) if functions else ""


def execute(problems: list[Problem], programs: list[str], workers: int = 2,
            timeout: float = 10.0, unsafe: bool = False) -> list[dict]:
    """Rows {id, base, plus, status, stderr}, one for each pair of problem and program.

    If a problem has several programs, it stands in `problems` once for each. timeout: CPU
    seconds for the base tests of a program, and as many again for its + tests. base, plus:
    whether the base tests and the + tests passed. plus is False if the base tests failed, and
    None if the file has no + tests.
    """
    def run(problem: Problem, program: str) -> dict:
        result = base = run_python(program, problem.base, timeout, unsafe=unsafe)
        if base.passed and problem.plus:
            result = run_python(program, problem.plus, timeout, unsafe=unsafe)
        return {"id": problem.task_id, "base": base.passed,
                "plus": result.passed if problem.plus else None,
                "status": result.status, "stderr": result.stderr[-1000:]}

    with ThreadPoolExecutor(workers) as pool:
        return list(tqdm(pool.map(run, problems, programs), "run the tests", len(problems)))


def code_scores(rows: list[dict]) -> dict[str, list]:  # Table 3
    """{"pass@1": whether each row of `execute` passed}, and "plus pass@1" with + tests."""
    scores = {"pass@1": [row["base"] for row in rows]}
    if rows[0]["plus"] is not None:
        scores["plus pass@1"] = [row["plus"] for row in rows]
    return scores
