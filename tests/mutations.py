"""Does the test suite notice faults? One fault at a time is put into a copy of the repository.

    python tests/mutations.py                # all: "killed" (by which test) or "SURVIVED"
    python tests/mutations.py sampling.py    # those of a file, or with these words

MUTATIONS has a line "old ⇒ new" for each fault, below the file, which has the old text exactly
once, and the tests (arguments of pytest) of which one must fail. The exit status is 1 if a
fault survives, if a line is stale, or if tests fail without a fault. This script is no part of
the suite. It needs Linux, and about 20 minutes on one core.
"""

import multiprocessing
import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LEFT_OUT = shutil.ignore_patterns(".*", "runs", "__pycache__")     # .git, .venv, caches
SECONDS = 300                                                      # for the tests of one fault
PYTEST = "-x", "-q", "-n0", "-p", "no:cacheprovider"
LIBRARIES = ("hypothesis", "openai", "peft", "pytest", "torch.distributed.fsdp",
             "transformers.models.llama.modeling_llama")

MUTATIONS = r"""
policy.py: tests/test_equations.py -k "gae or whiten or loss_by or definition or adaptive"
    td_error + gamma * lam * next_advantage ⇒ td_error + lam * next_advantage
    next_value = values[:, t] * mask[:, t] ⇒ next_value = values[:, t]
    torch.minimum(ratio * advantages ⇒ torch.maximum(ratio * advantages
    torch.maximum((values - returns) ** 2 ⇒ torch.minimum((values - returns) ** 2
    kl / target - 1, -0.2 ⇒ 1 - kl / target, -0.2
    error * min(1, n / horizon) ⇒ error * n / horizon
    if target and math.isfinite(kl): ⇒ if target:
policy.py: tests/test_equations.py -k "drawn or column or scores or rewards or minibatch"
    (start + prompt_count - 1) // n + 1) ⇒ start // n + 1)
    range(config.responses_per_prompt)] ⇒ range(1)]
    torch.tensor(review.delta) ⇒ torch.tensor(review.delta).roll(1)
    rollouts, index, config.reference) ⇒ rollouts, index, "policy")
    rollouts.delta - beta * kl ⇒ rollouts.delta + beta * kl
    no_values, mask, config.gamma, 1.0 ⇒ no_values, mask, config.gamma, config.lam
    value_head(hidden.detach()) ⇒ value_head(hidden)
    loss - config.entropy_coef ⇒ loss + config.entropy_coef
policy.py: tests/test_equations.py -k "descent or schedule or every_pass"
    model.train() ⇒ pass
    skipped += 1⏎            optimizer.zero_grad() ⇒ skipped += 1
    1 - iteration / config.iterations ⇒ 1 - (iteration + 1) / config.iterations
policy.py: tests/test_train.py -k "uniforms or seed or kl_coef or ranks or harmful or grouped"
    eos = eos_ids(tokenizer, model) ⇒ eos = eos_ids(tokenizer)
    generator = torch.Generator().manual_seed(seed) ⇒ generator = torch.Generator()
    rng = random.Random(seed) ⇒ rng = random.Random(config.seed)
    advantages(batch, state["beta"], config) ⇒ advantages(batch, config.kl_coef, config)
    metrics["kl"], config.batch_size, ⇒ metrics["kl"], config.minibatch_size,
    rollouts.mask[minibatch].sum() ⇒ rollouts.mask[minibatch[::WORLD_SIZE]].sum()
    stats.values())) and stats["ratio"] ⇒ stats.values())) or stats["ratio"]
    stats["ratio"] <= MAX_RATIO ⇒ True
    model.eval() ⇒ pass
    (groups, weight_decay=0.0, fused=True) ⇒ (groups, fused=True)
    self.prompt_mask.sum(1) + self.mask ⇒ self.prompt_mask.sum(1) - self.mask
text2grad.py: tests/test_train.py -k "sft or held_out or several or ranks"
    config, config.reference,⏎                torch ⇒ config, None,⏎                torch
    rows, config, config.reference, critic) ⇒ rows, config, None, critic)
    generator = torch.Generator().manual_seed(config.seed) ⇒ generator = torch.Generator()
    train(model, tokenizer, rows, ⇒ train(model, tokenizer, held_out,
data.py: tests/test_run.py -k script_reports
    if value is not None:⏎            words ⇒ if True:⏎            words
model.py: tests/test_model.py -k shipped
    and not os.path.isdir(path) ⇒ or not os.path.isdir(path)
data.py: tests/test_train.py -k "held_out"
    config.seed, task.policy_prompt) ⇒ config.seed, str)
runtime.py: tests/test_train.py -k "ranks"
    config.batch_size % unit or ⇒ False or
report.py: tests/test_run.py tests/test_ask.py -k "shown_and or cannot or preview"
    len(unreadable) > MOST_UNREADABLE * len(samples) ⇒ False
    if share < 1: ⇒ if True:
    if quotes_by_fate and not value: ⇒ if False:
report.py: tests/test_report.py
    kl.sum().item() / len(rollouts.rows) ⇒ kl.mean().item()
    means["poor_tokens"] >= FEW_TOKENS ⇒ True
report.py: tests/test_reward_model.py
    is_marked and is_predicted ⇒ is_predicted
    ("recall", "marked") ⇒ ("recall", "predicted")
model.py: tests/test_run.py -k "do_not_fit"
    task.policy_prompt(row))) <= limit] ⇒ task.policy_prompt(row))) < limit]
reward_model.py: tests/test_equations.py -k "z_loss or encode or split or critique or teacher"
    / terms * weight ⇒ / len(batch) * weight
    quotes.remove(quote) ⇒ pass
data.py: tests/test_equations.py -k "split"
    return training, evaluation⏎ ⇒ return training + evaluation, evaluation⏎
annotate.py: tests/test_equations.py -k "critique"
    [0.0] * len(offsets), str(error) ⇒ [-1.0] * len(offsets), str(error)
reward_model.py: tests/test_reward_model.py
    eos_token_id=eos_ids(tokenizer, model) ⇒ eos_token_id=eos_ids(tokenizer)
    weight_decay=config.reward_weight_decay ⇒ weight_decay=0.0
    rng.sample(pairs, len(pairs)) ⇒ random.Random(config.seed).sample(pairs, len(pairs))
    model.train() ⇒ model.eval()
    config.seed * 1_000_003 + step * WORLD_SIZE + RANK ⇒ config.seed * 1_000_003 + RANK
    1 - step / len(batches) ⇒ 1 - (step + 1) / len(batches)
    math.isfinite(loss + norm.item()) ⇒ True
    zip(prompt_ids, critique_ids, strict=True) ⇒ enumerate(critique_ids)
    model.eval() ⇒ pass
    len(ids) <= max_prompt_tokens ⇒ True
    len(ids) <= max_prompt_tokens ⇒ len(ids) < max_prompt_tokens
    (parameters, MAX_GRAD_NORM) ⇒ (parameters, 1e9)
    enumerate(losses, 1) ⇒ enumerate(losses)
settings.py: tests/test_paper.py -k presets
    reward_epochs=3, reward_batch_size=8 ⇒ reward_epochs=3
    kl_horizon=10_000,⏎    lora_targets="q_proj,v_proj") ⇒ kl_horizon=10_000)
    dict(max_prompt_tokens=438) ⇒ dict()
eval.py: tests/test_eval.py -k own_task
    run_flags(config) + sys.argv[1:] ⇒ sys.argv[1:] + run_flags(config)
measures/judge.py: tests/test_eval.py -k own_task
    if config.judge_model and not config.dry_run: ⇒ if True:
annotate.py: tests/test_run.py -k before_anything
    if config.critic == "annotator" or not has_feedback: ⇒ if True:
runtime.py: tests/test_ranks.py -k longer
    backend="gloo", timeout=ANNOTATION_TIMEOUT ⇒ backend="gloo", timeout=TIMEOUT
    run_collective(dist.barrier, group) ⇒ run_collective(dist.barrier)
policy.py: tests/test_train.py -k annotator
    rank_share(from_rank0(reviews)) ⇒ from_rank0(reviews)
sampling.py: tests/test_sampling.py
    mean_weight.mul_((previous - log_sum).exp()) ⇒ pass
    targets - tile.start ⇒ targets
    torch.where(column == clamped, ⇒ torch.where(column <= clamped,
    - mean_weight) / temperature ⇒ - mean_weight)
    (dtype) / temperature).log_softmax ⇒ (dtype)).log_softmax
    math.ceil(len(weight) / 4)) ⇒ len(weight))
    right=True) ⇒ right=False)
    uniforms * cdf[:, -1:] ⇒ uniforms.double()
    self.positions.add_(1) ⇒ self.positions.add_(0)
    keys > queries, -torch.inf ⇒ keys > queries + 1, -torch.inf
    queries = columns[chunk, None] ⇒ queries = columns[: len(columns[chunk]), None]
    cache_position[:, None] - window ⇒ cache_position[:, None] - window - 1
    uniforms[decoder.rows, t : t + 1] ⇒ uniforms[decoder.rows, :1]
    uniforms[part.start : part.stop] ⇒ uniforms[: len(part)]
    self.ids = self.ids[alive] ⇒ self.ids = self.ids[: len(alive)]
    if token in eos_token_id), None) ⇒ if token in eos_token_id[:1]), None)
    min(limit, _rope_limit(model) or limit) ⇒ limit
    step = None       # frees ⇒ pass              # frees
    rope, *rope.values(): ⇒ [rope]:
model.py: tests/test_model.py tests/test_sampling.py
    [name] = alpha / r ⇒ [name] = alpha
    alpha=layer.scaling[name]) ⇒ alpha=1)
    layer.active = active⏎            layer.merged = None ⇒ layer.active = active
    self.dropout[self.active], self.training) ⇒ self.dropout[self.active])
    layer.add(name, r, alpha, 0.0) ⇒ layer.add(name, r, alpha, 0.5)
    before = lengths - 1 + ⇒ before = lengths +
    + prompts.shape[1] - lengths ⇒ + 0 * lengths
    + [eos_ids(tokenizer)[0]] ⇒
    "lora_alpha": layer.scaling[name] * r ⇒ "lora_alpha": layer.scaling[name]
    "bias": ["none"] ⇒ "bias": ["none", "all"]
    if option in OPTIONS else OFF) ⇒ if option in OPTIONS else [value])
    shape is None or shape != shapes.get(key) or ⇒ shape is None or key not in shapes or
    max(tokenizer.get_vocab().values()) ⇒ len(tokenizer) - 1
    largest_id >= model.config ⇒ largest_id > model.config
    if report["missing_keys"]: ⇒ if False:
    turn["role"] != "assistant" and turn ⇒ turn
model.py: tests/test_annotate.py -k typed
    split_special_tokens=True ⇒ split_special_tokens=False
    if token.special: ⇒ if False:
runtime.py: tests/test_model.py tests/test_restart.py -k "checkpoint or fit_that"
    if not is_foreign and digest != ⇒ if False and digest !=
    done % every == 0 or done == count ⇒ (done + 1) % every == 0 or done == count
annotate.py: tests/test_annotate.py
    ambiguous += 1⏎                continue ⇒ places = places[:repeats]
    label if k < repeats else -1 ⇒ label
    (-1, feedback.poor_spans) ⇒ (+1, feedback.poor_spans)
    span.start <= start < end <= span.end ⇒ span.start <= start < span.end
    start += piece.index(word) ⇒ start += 0
    for edge in match.span(1))] ⇒ for edge in match.span(1)[:1])]
    for as_pattern in (re.escape, _loose): ⇒ for as_pattern in (_loose,):
    if value in [copy for ⇒ if value in [] and [copy for
    text.rpartition("</think>")[2] ⇒ text
    if extra:⏎ ⇒ if False:⏎
    if piece and end == whole ⇒ if end == whole
    whole + 1 if piece.endswith(MARK) else whole ⇒ whole
    critique or find_critique(value, prose) ⇒ find_critique(value, prose)
    checksum(state=parts)[:12] ⇒ checksum(state=parts)[:0]
    if missing:⏎ ⇒ if False:⏎
annotate.py: tests/test_ask.py -k "in_order or settings or absent"
    (*parts, source) ⇒ (*parts)
    if not config.annotator_function:⏎            print(cost) ⇒ pass
    task.temperature, config.timeout) ⇒ 0.3, config.timeout)
    get_mode(config.mode)⏎    if ⇒ check_asking(config)⏎    if
ask.py: tests/test_ask.py
    self.spent += usd ⇒ self.spent += 0.0
    reply.usage or self.max_usage(question) ⇒ reply.usage or NO_TOKENS
    max(self.overrun, row.get("ratio", 1)) ⇒ 1
    [waiting[0], *running.values()] ⇒ [waiting[0]]
    except InputError:⏎            raise⏎ ⇒ except InterruptedError:⏎            raise⏎
    hide_key(answer.text) ⇒ answer.text
    (concurrency if has_answered else 1) ⇒ concurrency
    reply.status >= 429 ⇒ reply.status >= 400
    raise InterruptedError ⇒ pass
    while running:⏎                list(arrived()) ⇒ pass
    body["max_completion_tokens"] = question.max_tokens ⇒ pass
    is_free = 400 <= status < 500 ⇒ is_free = 400 <= status
    if part["type"] == "text") ⇒ if "text" in part)
    is_free = 400 < status < 430 ⇒ is_free = 400 <= status < 430
    if cause.startswith("Connect"): ⇒ if "Connect" in cause:
    if size != self.size: ⇒ if self.size is None:
    if question.old_key in journal.replies: ⇒ if False:
    (length|max|limit|error) ⇒ (length|error)
    max(completion, total - prompt) ⇒ completion
    "top_p": TOP_P ⇒ "top_p": 1.0
    "temperature": self.temperature ⇒ "temperature": 0.3
"""


def read_mutations() -> list[tuple[str, str, str, str]]:
    """(file, arguments of pytest, old, new) of each line; ⏎ stands for the end of a line."""
    mutations = []
    for line in MUTATIONS.strip().splitlines():
        if not line.startswith(" "):
            file, _, target = line.partition(": ")
            continue
        old, _, new = line.strip().replace("⏎", "\n").partition(" ⇒")
        mutations.append((file, target, old, new.removeprefix(" ")))
    return mutations


def run_pytest(copy: Path, target: str):
    """Run the target in this process, a fork, so that libraries are imported only once."""
    import pytest
    os.setsid()
    os.chdir(copy)
    output = os.open(copy.parent / "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os._exit(pytest.main([*PYTEST, *shlex.split(target)]))


def run_tests(copy: Path, target: str) -> str:
    """ "SURVIVED" if all tests pass, "killed (by which test)", or "ERROR (why)"."""
    fork = multiprocessing.get_context("fork")
    process = fork.Process(target=run_pytest, args=(copy, target))
    process.start()
    process.join(SECONDS)
    status = process.exitcode
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)           # with the processes of the tests
    output = (copy.parent / "output").read_text("utf-8", "replace")
    failed_test = re.search(r"^(?:FAILED|ERROR) tests/(\S+::.+?)(?: - |$)", output, re.M)
    if status is None or status == 1 and failed_test:
        return f"killed ({failed_test[1] if failed_test else 'timeout'})"
    return f"ERROR ({output.strip()[-200:]})" if status else "SURVIVED"


def main():
    """Try the mutations that were asked for."""
    mutations = [mutation for mutation in read_mutations()
                 if " ".join(sys.argv[1:]) in f"{mutation[0]} {mutation[2]}"]
    sys.dont_write_bytecode = True        # a file may change twice within its time stamp
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in LIBRARIES:
        __import__(name)
    healthy = {}                          # target → its result without a fault
    killed = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(shutil.copytree(ROOT, f"{folder}/copy", ignore=LEFT_OUT))
        if (ROOT.parent / "shared").is_dir():
            (copy.parent / "shared").symlink_to(ROOT.parent / "shared")
        for file, target, old, new in mutations:
            if target not in healthy:
                healthy[target] = run_tests(copy, target)
            source = (copy / file).read_text("utf-8")
            result = f"ERROR (without a fault: {healthy[target]})"
            if source.count(old) != 1:
                result = f"ERROR (stale: the file has the old text {source.count(old)} times)"
            elif healthy[target] == "SURVIVED":
                (copy / file).write_text(source.replace(old, new), "utf-8")
                result = run_tests(copy, target)
                (copy / file).write_text(source, "utf-8")
            killed += result.startswith("killed")
            print(f"{file}: {old!r} ⇒ {new!r}: {result}", flush=True)
    print(f"{killed} of {len(mutations)} faults are noticed")
    sys.exit(killed < len(mutations))


if __name__ == "__main__":
    main()
