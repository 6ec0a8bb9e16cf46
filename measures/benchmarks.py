"""HumanEval, MBPP and their + versions (Table 3) by execution, ARC-Challenge (Table 4) by log-likelihood.

    problems = read_problems("HumanEvalPlus.jsonl.gz")             # the published files as they are
    samples = [{"task_id": p.task_id, "solution": extract_code(write(code_prompt(p)), p)} for p in problems]
    scores = code_scores(execute(problems, samples))               # {"id", "pass@1", "plus pass@1"} of a task

Paper: §4.4 and §4.5, Tables 3 and 4; it says nothing of how answers are taken apart and run.

Samples are what evalplus reads and writes. Its + files hold inputs and no outputs: once a sample's function has given
its output for an input, the reference solution is asked for its own, in the same sandbox; until then it exists nowhere.
They are compared as evalplus 0.3 does, with its exceptions (HumanEval/32; Mbpp/164, 295, 558, 581; eight tasks as sets,
three by whether anything was found). Departures: one time limit for all inputs of a task, not one for each; an answer
need not repeat HumanEval's prompt. ARC is asked as lm-evaluation-harness asks, zero-shot and without a chat template,
except that the tokenizer's BOS stands first.
"""

from __future__ import annotations

import ast
import inspect
import marshal
import math
import re
import textwrap
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Iterator

from tqdm import tqdm

from data import InputError, iter_rows
from measures.metrics import answer_logprobs, pass_at_k
from measures.sandbox import run_python

# ── Reading the published files ─────────────────────────────────────────────────────────────────────────

_FUNCTION = {"task_id": str, "prompt": str, "entry_point": str, "canonical_solution": str}
SCHEMAS = {"evalplus": _FUNCTION | {"base_input": list, "plus_input": list, "atol": (int, float)},
           "HumanEval": _FUNCTION | {"test": str},
           "MBPP": {"task_id": (int, str), "text": str, "code": str, "test_list": list},
           "sanitized MBPP": {"task_id": (int, str), "prompt": str, "code": str, "test_list": list}}


@dataclass(frozen=True)
class Problem:
    """prompt: what the model is told. head: the program's beginning, which an answer may take for granted ("" in MBPP).
    solution: a whole right program. tests: statements for the sandbox; of evalplus "", with inputs (base, plus) whose
    outputs are compared with the solution's, to atol."""
    task_id: str
    prompt: str
    entry_point: str
    head: str
    solution: str
    tests: str
    inputs: tuple[list, list] | None = None
    atol: float = 0.0


def _rows(path) -> Iterator[tuple[str, dict]]:
    """(place, row) of JSON lines or of one JSON array, gzipped or not, whatever the name says."""
    for number, row in enumerate(iter_rows(path), 1):
        yield f"{path}, row {number}", row


def _check_fields(place: str, row: dict, fields: dict, form: str):
    for name, kind in fields.items():
        if not isinstance(row.get(name), kind) or row[name] in ("", []) and name != "plus_input":
            found = f"holds {str(row[name])[:40]!r}" if name in row else f"is missing among {', '.join(map(repr, row))}"
            raise InputError(f"{place}: field {name!r} {found}; a row of {form} has {', '.join(fields)}")


def read_problems(path) -> list[Problem]:
    """HumanEval, MBPP (all of it or sanitized) or a + file of evalplus; the first row's fields say which.

    Raises InputError with file, row and field for another schema, a missing field, a task that comes twice.
    """
    problems, schema = {}, None
    for place, row in _rows(path):
        schema = schema or min(SCHEMAS, key=lambda name: len(SCHEMAS[name].keys() - row.keys()))
        _check_fields(place, row, SCHEMAS[schema], schema)
        try:
            problem = (_mbpp if "MBPP" in schema else _humaneval)(row)
        except (SyntaxError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise InputError(f"{place}: not a task of {schema} ({type(error).__name__}: {error})") from error
        if problem.task_id in problems:
            raise InputError(f"{place}: task {problem.task_id} has come before")
        problems[problem.task_id] = problem
    return list(problems.values())


def _humaneval(row: dict) -> Problem:
    """A row of HumanEval or of evalplus; MBPP+ too, whose prompt is a docstring and begins no function."""
    task_id, prompt, name = row["task_id"], row["prompt"], row["entry_point"]
    head = prompt.rstrip() + "\n" if re.search(rf"^def {name}\b", prompt, re.M) else ""
    tests = f"{row['test']}\ncheck({name})\n" if "test" in row else ""
    inputs = tuple([_restored(task_id, args) for args in row.get(key, [])] for key in ("base_input", "plus_input"))
    asked = head or prompt.strip().removeprefix('"""').removesuffix('"""').strip()
    return Problem(task_id, asked, name, head, prompt + row["canonical_solution"], tests, None if tests else inputs,
                   row.get("atol", 0))


def _mbpp(row: dict) -> Problem:
    """A row of MBPP; its function is the first name in the asserts that the code defines."""
    code, tests = row["code"].replace("\r\n", "\n"), "\n".join(row["test_list"])
    names = [node.id for node in ast.walk(ast.parse(tests)) if isinstance(node, ast.Name)]
    name = next((name for name in names if re.search(rf"^(def|class) +{name}\b", code, re.M)), None)
    if name is None:
        raise ValueError("its asserts call nothing that its code defines")
    before = "\n".join([*row.get("test_imports", []), row.get("test_setup_code", "").replace("\r\n", "\n")])
    prompt = f"{row.get('text') or row['prompt']}\nIt must pass these tests:\n{tests}"
    return Problem(f"Mbpp/{row['task_id']}", prompt, name, "", code, f"{before}\n{tests}")


_EACH, _FIRST = (lambda f: lambda *args: [f(arg) for arg in args]), (lambda f: lambda first, *rest: [f(first), *rest])
_DEEP = lambda value: tuple(map(_DEEP, value)) if isinstance(value, list) else value
_LISTED = lambda value: [tuple(item) for item in value]
_RESTORE = [    # MBPP+ tasks whose arguments JSON cannot hold, and how tuples, sets, complex numbers are made again
    ("2 116 132 143 222 261 273 394 399 421 424 429 470 560 579 596 616 630 726 740 744 809", _EACH(tuple)),
    ("63 64 70 94 120 237 272 299 400 409 417 438 473 614 780", _EACH(_LISTED)), ("75 413 444 753", _FIRST(_LISTED)),
    ("250 307 405 446 617 720 763 808", _FIRST(tuple)), ("106 750", lambda first, second: [first, tuple(second)]),
    ("259 278 401 445 580 615 791", _EACH(_DEEP)), ("124", lambda first, second: [float(first), complex(second)]),
    ("115", _EACH(lambda value: [set(item) if item else {} for item in value])), ("252", _EACH(complex)),
    ("722", _FIRST(lambda value: {key: tuple(item) for key, item in value.items()}))]


def _restored(task_id: str, args: list) -> list:
    """The arguments of one call as Python values."""
    number = task_id.removeprefix("Mbpp/")                         # HumanEval/… is in no list
    return next((restore(*args) for tasks, restore in _RESTORE if number in tasks.split()), args)


# ── Prompt and answer ───────────────────────────────────────────────────────────────────────────────────

def code_prompt(problem: Problem) -> str:
    """What a chat model is asked, in our own words: to complete HumanEval's function, to write MBPP's."""
    task = (f"Complete this Python function.\n\n```python\n{problem.prompt}```" if problem.head else
            f"Write a Python function for this task.\n\n{problem.prompt}")
    return f"{task}\n\nAnswer with the whole program in one code block: imports, helpers and the function."


def _parsed(text: str) -> list[tuple[str, ast.stmt]]:
    """The statements of the longest beginning of a text that is Python, each with its source (without comments)."""
    lines = text.split("\n")
    while lines:
        try:
            with warnings.catch_warnings(action="ignore"):         # of "\d" in the code
                return [(ast.unparse(node), node) for node in ast.parse("\n".join(lines)).body]
        except SyntaxError as error:
            del lines[min(error.lineno or 1, len(lines)) - 1:]
        except (ValueError, RecursionError, MemoryError):          # a null byte; absurdly deep
            break
    return []


def _binds(node: ast.stmt) -> set[str]:
    """The names that a statement gives a value; `table` by `table[i] = 1` too."""
    nodes = [node] if hasattr(node, "name") else list(ast.walk(node))       # what is inside a function stays there
    stored = [getattr(n, "value", n) for n in nodes if isinstance(getattr(n, "ctx", None), ast.Store)]
    named = [getattr(n, "asname", None) or n.name for n in nodes if getattr(n, "name", None)]
    return {n.id for n in stored if isinstance(n, ast.Name)} | {name.split(".")[0] for name in named}


def _program(main: list, others: list, needed: set[str]) -> str:
    """What is needed of both, and what that needs in turn; a name that `main` binds is taken from there."""
    bound = {name for _, node in main for name in _binds(node)}
    kept, size = [part for part in others if not _binds(part[1]) & bound] + main, 0
    needed = needed | {"annotations", "*"}                         # from __future__, and what a star may bring
    while len(needed) > size:
        size = len(needed)
        needed |= {n.id for _, node in kept if _binds(node) & needed for n in ast.walk(node) if isinstance(n, ast.Name)}
    kept.sort(key=lambda part: not part[0].startswith("from __future__"))
    return "".join(source + "\n" for source, node in kept if _binds(node) & needed)


def extract_code(response: str, problem: Problem) -> str:
    """The program in a chat model's answer; "" where nothing there can be the function, which is a failed sample.

    Looked for in turn: the first fenced block that defines the function; an answer without fences, prose around it left
    out; the function's body alone, as a base model completes HumanEval. As in evalplus what the function needs is kept,
    from other blocks and the prompt's head too, and calls, prints, asserts beside it are not. Nothing is executed.
    """
    text, name = response.replace("\r\n", "\n").rpartition("</think>")[2], problem.entry_point
    fences = re.findall(r"^[ \t]*(`{3,}|~{3,}).*\n([^\0]*?)(?:^[ \t]*\1|\Z)", text, re.M)
    blocks = [textwrap.dedent(block) for _, block in fences]
    starts = re.finditer(r"^(?:import|from|def|async|class|@|\w+ *=)", text, re.M)
    used = [node for node in ast.walk(ast.parse(problem.tests)) if isinstance(node, ast.Name)]
    needed = {name} | {n.id for n in used} - {n.id for n in used if isinstance(n.ctx, ast.Store)}
    for whole in blocks or [text[start.start():] for start in starts]:
        main = _parsed(whole) if re.search(rf"\b(?:def|class|as) +{name}\b|\b{name} *[:=]", whole) else []
        if any(name in _binds(node) for _, node in main):
            head = _parsed(problem.head + "    pass") if problem.head else []
            return _program(main, [*head, *(part for block in blocks if block is not whole for part in _parsed(block))],
                            needed)
    found = {0: ""}                                                # where the function ends → program
    for body in (blocks or [text]) if problem.head else []:
        indented = re.match(r"\n*[ \t]", body)
        for whole in [body] if indented else ["    " + body, textwrap.indent(body, "    ")]:
            main = _parsed(problem.head + whole)
            last = max([0] + [node.end_lineno for _, node in main if name in _binds(node)])
            if last > problem.head.count("\n"):
                found[last] = _program(main, [], needed)
    return found[max(found)]


# ── Execution ───────────────────────────────────────────────────────────────────────────────────────────

def _compare(task: str, solve, reference, inputs: list, fresh: list, atol: float):
    """Runs in the sandbox, from its source: the outputs of `solve` against those of `reference`, by evalplus' rules.

    task: the function's name. fresh: the inputs once more, since a solution may change its own.
    """
    import cmath
    import math

    def close(out, expected):                                      # numpy.allclose with rtol=1e-7
        if isinstance(expected, (list, tuple)):
            return len(out) == len(expected) and all(map(close, out, expected))
        finite = cmath.isfinite(out) and cmath.isfinite(expected)
        return out == expected or finite and abs(out - expected) <= atol + 1e-7 * abs(expected)

    def also_right(out, given):                                    # tasks that can be read in two ways
        if task == "surface_Area":
            base, height = given
            return abs(out - round(base ** 2 + 2 * base * math.sqrt((base / 2) ** 2 + height ** 2))) <= atol
        if task == "digit_distance_nums":
            width = max(len(str(number)) for number in given)
            return out == sum(abs(int(a) - int(b)) for a, b in zip(*(str(number).zfill(width) for number in given)))
        return task == "are_equivalent" or task == "sum_div" and out == 0

    as_sets = ["similar_elements", "find_char_long", "common_in_nested_lists", "extract_singly", "larg_nnum",
               "intersection_array", "find_dissimilar", "Diff"]
    for number, (given, again) in enumerate(zip(inputs, fresh)):
        out = solve(*given)
        if task == "find_zero":                                    # any root of the polynomial
            zero = sum(factor * math.pow(out, power) for power, factor in enumerate(again[0]))
            assert abs(zero) <= atol, f"input {number}: the polynomial is {zero} there"
            continue
        expected = reference(*again)
        if task in ("check_str", "text_match_three", "text_starta_endb"):                  # found or not
            out, expected = out if isinstance(out, bool) else out is not None, expected is not None
        right = set(out) == set(expected) if task in as_sets else out == expected or also_right(out, again)
        items = expected if isinstance(expected, (list, tuple)) else [expected]
        if atol == 0 and items and all(isinstance(item, float) for item in items):
            atol = 1e-6                                            # and so for the inputs that follow
        if not right and atol != 0:
            right = type(out) is type(expected) and close(out, expected)
        assert right, f"input {number}: {repr(out)[:200]} instead of {repr(expected)[:200]}"


def test_program(problem: Problem, plus: bool = False) -> str:
    """Tests for `run_python`: the benchmark's own, or (plus) those that evalplus adds."""
    if problem.inputs is None:
        assert not plus, f"{problem.task_id} comes from a file without + tests"
        return problem.tests
    values = marshal.dumps(problem.inputs[plus])                   # keeps tuples, sets, infinities; repr does not
    return (f"{inspect.getsource(_compare)}\ndef test_outputs():\n    import marshal, solution\n    right = {{}}\n"
            f"    exec({problem.solution!r}, right)\n    inputs, fresh = map(marshal.loads, [{values!r}] * 2)\n"
            f"    _compare({problem.entry_point!r}, solution.{problem.entry_point}, right[{problem.entry_point!r}], "
            f"inputs, fresh, {problem.atol!r})\n")


def read_samples(path, problems: list[Problem]) -> list[dict]:
    """Rows {task_id, solution} as evalplus writes them; HumanEval's own {task_id, completion} go on from the prompt.

    Raises InputError with file, row and field.
    """
    heads, samples = {problem.task_id: problem.head for problem in problems}, []
    for place, row in _rows(path):
        _check_fields(place, row, {"task_id": str}, "samples")
        key = "completion" if "completion" in row and "solution" not in row else "solution"
        if not isinstance(row.get(key), str):                      # empty it may be: an answer without code
            raise InputError(f"{place}: field 'solution' is missing or no text")
        head = heads.get(row["task_id"], "") if key == "completion" else ""
        samples.append({"task_id": row["task_id"], "solution": head + row[key]})
    return samples


def execute(problems: list[Problem], samples: list[dict], workers: int = 2, timeout: float = 10.0,
            unsafe: bool = False) -> list[dict]:
    """Rows {id, sample, base, plus, status, stderr} of samples {task_id, solution}, in the order of the problems.

    timeout: seconds for all tests of a sample.
    base, plus: passed or not; plus counts where base has passed too, and is None where a file has no + tests.
    Raises InputError for a task that is unknown or has no sample, so none is left out of a mean.
    """
    found = {problem.task_id: [] for problem in problems}
    for sample in samples:
        found.setdefault(sample["task_id"], []).append(sample["solution"])
    unknown, missing = [*found][len(problems):], [task for task, solutions in found.items() if not solutions]
    if unknown or missing:
        raise InputError(f"the samples do not fit the benchmark's {len(problems)} tasks: {len(missing)} have no sample "
                         f"{missing[:5]}, {len(unknown)} sampled tasks are unknown {unknown[:5]}; an answer without "
                         f"code is a sample too, with an empty solution")

    def run(job) -> dict:
        problem, number, code = job
        for plus in range(1 + (problem.inputs is not None)):
            result = run_python(code, test_program(problem, bool(plus)), timeout, unsafe=unsafe)
            if not result.passed:
                break
        return {"id": problem.task_id, "sample": number, "base": result.passed or plus == 1,
                "plus": None if problem.inputs is None else result.passed, "status": result.status,
                "stderr": result.stderr[-1000:]}

    jobs = [(problem, number, code) for problem in problems for number, code in enumerate(found[problem.task_id])]
    pool = ThreadPoolExecutor(workers)
    try:
        return list(tqdm(pool.map(run, jobs), total=len(jobs), desc="run the tests"))
    finally:
        pool.shutdown(cancel_futures=True)


def code_scores(rows: list[dict], ks=(1,)) -> list[dict]:  # Table 3
    """{id, "pass@k", "plus pass@k"} of each task, from `execute`'s rows. Raises InputError for too few samples."""
    tasks = {}
    for row in rows:
        tasks.setdefault(row["id"], []).append(row)
    return [{"id": task} | {f"{name}pass@{k}": pass_at_k(len(found), sum(row[key] for row in found), k)
                            for key, name in (("base", ""), ("plus", "plus ")) if found[0][key] is not None for k in ks}
            for task, found in tasks.items()]


# ── ARC-Challenge ───────────────────────────────────────────────────────────────────────────────────────

def read_arc(path) -> list[dict]:
    """Rows {id, question, choices: texts, answer: index} of AI2's files: any number of choices, labels A–E or 1–5.

    Raises InputError with file, row and field.
    """
    rows = []
    for place, row in _rows(path):
        _check_fields(place, row, {"id": str, "question": dict, "answerKey": str}, "ARC")
        _check_fields(place, row["question"], {"stem": str, "choices": list}, "ARC's 'question'")
        choices = [choice if isinstance(choice, dict) else {} for choice in row["question"]["choices"]]
        for choice in choices:
            _check_fields(place, choice, {"text": str, "label": str}, "ARC's 'choices'")
        labels = [choice["label"] for choice in choices]
        answer = row["answerKey"]
        if answer not in labels or len(set(labels)) != len(labels) or len(labels) < 2:
            raise InputError(f"{place}: the answerKey {answer!r} is not one of several different labels {labels}")
        rows.append({"id": row["id"], "question": row["question"]["stem"], "answer": labels.index(answer),
                     "choices": [choice["text"] for choice in choices]})
    return rows


def choice_logprobs(model, tokenizer, rows: list[dict], adapter: str | None = None, batch_size: int = 16):
    """log p(" " + choice | "Question: …\\nAnswer:") in nats, a list for each row; InputError for one too long."""
    from sampling import context_length
    encode = lambda text: tokenizer(text, add_special_tokens=False).input_ids
    bos, asked = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id], []
    for row in rows:
        context = f"Question: {row['question']}\nAnswer:"
        start = len(encode(context))
        for whole in [encode(f"{context} {choice}") for choice in row["choices"]]:     # cut where the harness cuts
            if not start < len(whole) <= context_length(model) - len(bos):
                raise InputError(f"row {row['id']} of ARC: {len(whole)} tokens, {start} of the question, where "
                                 f"the model's context is {context_length(model)}; take the row out")
            asked.append((bos + whole[:start], whole[start:]))
    each = iter(answer_logprobs(model, asked, adapter, batch_size, "ARC"))
    return [[sum(next(each)) for _ in row["choices"]] for row in rows]


def arc_scores(model, tokenizer, rows: list[dict], adapter: str | None = None,
               batch_size: int = 16) -> list[dict]:  # Table 4
    """{id, accuracy, accuracy_norm} of every row: whether the likeliest choice is right (1.0 or 0.0).

    accuracy_norm divides each log-likelihood by the choice's length in characters, as the harness' acc_norm does; its
    acc is accuracy. Of equally likely choices the first is taken. Raises InputError for log-probs that are not finite.
    """
    scores = []
    for row, logprobs in zip(rows, choice_logprobs(model, tokenizer, rows, adapter, batch_size)):
        if not all(map(math.isfinite, logprobs)):
            raise InputError(f"ARC row {row['id']}: log-likelihoods {logprobs} are not finite; the weights are damaged")
        normed = [logprob / len(choice) for logprob, choice in zip(logprobs, row["choices"])]
        scores.append({"id": row["id"], **{name: float(values.index(max(values)) == row["answer"])
                                           for name, values in (("accuracy", logprobs), ("accuracy_norm", normed))}})
    return scores
