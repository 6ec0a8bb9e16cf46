"""Does the test suite notice faults? One fault at a time is put into a copy of the repository.

    python tests/mutations.py                # all: "killed" (by which test) or "SURVIVED"
    python tests/mutations.py sampling.py    # those of a file, or with these words

MUTATIONS has a line "old ⇒ new" for each fault, below the file that has the old text exactly
once and the tests (arguments of pytest) of which one must fail. The exit status is 1 if a fault
survives, if a line is stale, or if tests fail without a fault. This script is no part of the
suite. It needs Linux and about 20 minutes.
"""

import multiprocessing
import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LEFT_OUT = shutil.ignore_patterns(".*", "runs", "__pycache__")     # .git, .venv, caches
TIMEOUT = 300                                                      # seconds for one fault
LIBRARIES = ("hypothesis", "openai", "peft", "pytest", "torch._dynamo", "torch.distributed.fsdp",
             "transformers.models.auto.modeling_auto", "transformers.models.llama.modeling_llama")

MUTATIONS = """
policy.py: tests/test_equations.py -k "gae or whiten or loss_by or definition or adaptive"
    -(delta * logprobs * mask) ⇒ (delta * logprobs * mask)
    td_error + gamma * lam * next_advantage ⇒ td_error + lam * next_advantage
    next_value = values[:, t] * mask[:, t] ⇒ next_value = values[:, t]
    (advantages + values) * mask ⇒ advantages * mask
    torch.rsqrt(variance + 1e-8) ⇒ (1 / (variance + 1e-8))
    torch.minimum(ratio * advantages ⇒ torch.maximum(ratio * advantages
    torch.maximum((values - returns) ** 2 ⇒ torch.minimum((values - returns) ** 2
    kl / target - 1, -0.2 ⇒ 1 - kl / target, -0.2
    error * min(1, n / horizon) ⇒ error * n / horizon

policy.py: tests/test_equations.py -k "drawn or column or scores or rewards or minibatch or pass"
    (start + prompts - 1) // n + 1) ⇒ (start + prompts) // n)
    (start + prompts - 1) // n + 1) ⇒ start // n + 1)
    torch.tensor(judgement.delta) ⇒ torch.tensor(judgement.delta).roll(1)
    rollouts, index, config.reference) ⇒ rollouts, index, "policy")
    rollouts.delta - beta * kl ⇒ rollouts.delta + beta * kl
    no_values, mask, config.gamma, 1.0 ⇒ no_values, mask, config.gamma, config.lam
    = whiten(advantages, mask) ⇒ = advantages
    rng.sample(range(len(rollouts ⇒ random.Random(0).sample(range(len(rollouts
    value_head(hidden.detach()) ⇒ value_head(hidden)
    loss - config.entropy_coef ⇒ loss + config.entropy_coef
    (ratio - 1 - log_ratio).sum() ⇒ (ratio - 1 + log_ratio).sum()

policy.py: tests/test_equations.py -k "descent or schedule"
    skipped += 1⏎            optimizer.zero_grad() ⇒ skipped += 1
    1 - iteration / config.iterations ⇒ 1 - (iteration + 1) / config.iterations

policy.py: tests/test_train.py -k "uniforms or iteration or coefficient or whole or sft or reference"
    eos = eos_ids(tokenizer, model) ⇒ eos = eos_ids(tokenizer)
    generator = torch.Generator().manual_seed(seed) ⇒ generator = torch.Generator().manual_seed(0)
    rng = random.Random(seed) ⇒ rng = random.Random(config.seed)
    truncated = [y[-1] not in eos ⇒ truncated = [y[-1] != eos[0]
    config.learning_rate * config.value_rate_factor * factor ⇒ config.learning_rate * factor
    metrics["kl"], config.batch_size, ⇒ metrics["kl"], config.minibatch_size,
    kl.sum().item() / len(scores) ⇒ kl.mean().item()
    (iteration - 1) % len(batch.rows) ⇒ 0
    stats.values())) and stats["ratio"] ⇒ stats.values())) or stats["ratio"]
    stats["ratio"] <= MAX_RATIO ⇒ True
    self.prompt_mask.sum(1) + self.mask.sum(1) ⇒ self.prompt_mask.sum(1) - self.mask.sum(1)
    count = rollouts.mask[minibatch].sum() ⇒ count = rollouts.mask[minibatch[RANK::WORLD_SIZE]].sum()
    index = group[RANK::WORLD_SIZE]⏎        with ⇒ index = group⏎        with

policy.py: tests/test_advantages.py
    range(config.responses_per_prompt)] ⇒ range(1)]

text2grad.py: tests/test_train.py -k "sft or held_out or several or ranks"
    config, config.reference,⏎                torch ⇒ config, None,⏎                torch
    held_out, config, config.reference, critic) ⇒ held_out, config, None, critic)
    held_out, config, "policy", critic) ⇒ held_out, config, config.reference, critic)
    manual_seed(config.seed)  # equal ⇒ manual_seed(config.seed + (adapter == "policy"))  # equal
    train(model, tokenizer, rows, config, out, critic ⇒ train(model, tokenizer, held_out, config, out, critic
    config.seed, task.policy_prompt) ⇒ config.seed, str)
    range(config.annotated_responses_per_prompt)] ⇒ range(1)]
    config.batch_size % unit or ⇒ False or

text2grad.py: tests/test_run.py -k "shown_and or do_not_fit"
    if means["unparseable"] > MOST_UNREADABLE: ⇒ if False:
    (encode_prompt(tokenizer, prompt(row))) <= limit ⇒ (encode_prompt(tokenizer, prompt(row))) < limit

reward_model.py: tests/test_equations.py -k "z_loss or encode or split or critique or teacher"
    targets).sum() ⇒ targets).mean()
    / terms * weight ⇒ / len(batch) * weight
    quotes.remove(quote) ⇒ pass
    len(z_ids) <= max_tokens ⇒ len(z_ids) < max_tokens
    len(prompts) // 10 ⇒ len(prompts) // 2
    return training, evaluation⏎⏎⏎def fit( ⇒ return training + evaluation, evaluation⏎⏎⏎def fit(
    [0.0] * len(offsets), str(error) ⇒ [-1.0] * len(offsets), str(error)
    len(feedback.good_spans + feedback.poor_spans) ⇒ len(feedback.good_spans)

reward_model.py: tests/test_reward_model.py
    eos_ids(tokenizer, model), u, ⇒ eos_ids(tokenizer), u,
    weight_decay=config.reward_weight_decay ⇒ weight_decay=0.0
    rng.sample(pairs, len(pairs)) ⇒ random.Random(config.seed).sample(pairs, len(pairs))
    model.train() ⇒ model.eval()
    config.seed * 1_000_003 + step * WORLD_SIZE + RANK ⇒ config.seed * 1_000_003 + RANK
    1 - step / len(batches) ⇒ 1 - (step + 1) / len(batches)
    (step + 1) / warm_up ⇒ step / warm_up
    math.isfinite(loss + norm.item()) ⇒ True
    fit_adapter(model, pairs, "reward" ⇒ fit_adapter(model, pairs + [*pairs], "reward"
    uniforms[list(prompt_ids)] ⇒ uniforms[: len(prompt_ids)]
    max_new_tokens: int, temperature=0.0 ⇒ max_new_tokens: int, temperature=1.0
    true_delta * sign > 0 ⇒ true_delta == sign
    is_marked and is_predicted ⇒ is_predicted
    ("recall", "marked") ⇒ ("recall", "predicted")
    (metrics["poor_recall"] or 0.0) < 0.2 ⇒ (metrics["poor_recall"] or 0.0) < 0.0

reward_model.py: tests/test_train.py -k annotator
    if task.repeats_are_poor: ⇒ if False:
    gather_rows([judgements])[0][RANK::WORLD_SIZE] ⇒ gather_rows([judgements])[0]

sampling.py: tests/test_model.py -k "log_softmax or exist_at_once"
    mean_weight.mul_((previous - log_sum).exp()) ⇒ pass
    - mean_weight) / temperature ⇒ - mean_weight)
    targets - tile.start ⇒ targets
    torch.where(column == clamped, ⇒ torch.where(column >= clamped,
    (dtype) / temperature).log_softmax ⇒ (dtype)).log_softmax
    math.ceil(len(weight) / 4)) ⇒ len(weight))
    checkpoint(chunk_entropy, h, use_reentrant=False) ⇒ chunk_entropy(h)

sampling.py: tests/test_model.py -k "greedy or uniform or probability or cache or unpadded or what_an"
    right=True) ⇒ right=False)
    uniforms * cdf[:, -1:] ⇒ uniforms.double()
    else logits.div_(temperature) ⇒ else logits.mul_(temperature)
    self.positions.add_(1) ⇒ self.positions.add_(0)
    attention.cumsum(dim=1) - 1 ⇒ attention.cumsum(dim=1)
    keys > queries, -torch.inf ⇒ keys > queries + 1, -torch.inf
    keys > queries, -torch.inf ⇒ keys >= queries, -torch.inf
    keys == queries, 0 ⇒ keys == queries, -torch.inf
    queries = columns[chunk, None] ⇒ queries = columns[: len(columns[chunk]), None]
    cache_position[:, None] - window ⇒ cache_position[:, None] - window - 1
    uniforms[decoder.rows, t : t + 1] ⇒ uniforms[decoder.rows, :1]
    uniforms[part.start : part.stop] ⇒ uniforms[: len(part)]
    torch.isin(decoder.ids[:, 0], ends) ⇒ torch.isin(decoder.ids[:, 0], ends[:1])
    self.ids = self.ids[alive] ⇒ self.ids = self.ids[: len(alive)]
    row[: ends[0] + 1] if ends ⇒ row[: ends[0]] if ends
    min(limit, _rope_limit(model) or limit) ⇒ limit
    min(limit, _rope_limit(model) or limit) ⇒ _rope_limit(model) or limit
    longest + max_new_tokens > limit: ⇒ longest + max_new_tokens >= limit:
    prompts = [[0] * (P - len(x)) + x for ⇒ prompts = [x + [0] * (P - len(x)) for

sampling.py: tests/test_gpu.py
    step = None       # frees ⇒ pass              # frees
    "dynamic" | "longrope" ⇒ "dynamic"
    rope, *rope.values(): ⇒ [rope]:

model.py: tests/test_model.py
    [name] = alpha / r ⇒ [name] = alpha
    alpha=layer.scaling[name]) ⇒ alpha=1)
    layer.active = active⏎            layer.merged = None ⇒ layer.active = active
    layer.active = name⏎        layer.merged = None ⇒ layer.active = name
    self.dropout[self.active], self.training) ⇒ self.dropout[self.active])
    x.to(A.dtype), A) ⇒ x, A.to(x.dtype)).to(A.dtype)
    layer.add(name, r, alpha, 0.0) ⇒ layer.add(name, r, alpha, 0.5)
    before = lengths - 1 + ⇒ before = lengths +
    + prompts.shape[1] - lengths ⇒ + 0 * lengths
    ids += config_ids if isinstance(config_ids, list) ⇒ ids += config_ids[:1] if isinstance(config_ids, list)
    + [eos_ids(tokenizer)[0]] ⇒
    "lora_alpha": layer.scaling[name] * r ⇒ "lora_alpha": layer.scaling[name]
    "bias": ["none"] ⇒ "bias": ["none", "all"]
    {"peft_type": None, **config} ⇒ config
    OFF = [None, False, [], {}] ⇒ OFF = [None, False]
    if option in OPTIONS else OFF) ⇒ if option in OPTIONS else [value])
    shape is None or shape != shapes.get(key) or ⇒ shape is None or key not in shapes or
    or not tensors[key].isfinite().all(): ⇒ :
    if saved_config not in ({}, config): ⇒ if False:
    max(tokenizer.get_vocab().values()) ⇒ len(tokenizer) - 1
    if report["missing_keys"]: ⇒ if False:
    if not torch.allclose(expected, logits, ⇒ if False and (expected, logits,
    turn["role"] != "assistant" and turn ⇒ turn
    turn["content"].strip() ⇒ turn["content"]
    date_string=DATE ⇒ date_string=""

model.py: tests/test_annotate.py -k typed
    split_special_tokens=True ⇒ split_special_tokens=False
    if token.special: ⇒ if False:

runtime.py: tests/test_model.py -k "checkpoint or instant or bit_for_bit"
    if not is_foreign and digest != ⇒ if False and digest !=
    checkpoints(run)[:-2] ⇒ checkpoints(run)[:-1]
    if saved.get("made_of") == state.get("made_of"): ⇒ if True:

runtime.py: tests/test_restart.py -k fit_that
    done % every == 0 or done == count ⇒ (done + 1) % every == 0 or done == count
    state.update(saved) ⇒ state["step"] = saved["step"]

runtime.py: tests/test_equations.py tests/test_train.py -k "length or group or whole or descent or scores"
    sorted(index, key=lengths.__getitem__) ⇒ list(index)
    (len(groups[-1]) // WORLD_SIZE + 1) * longest ⇒ (len(groups[-1]) // WORLD_SIZE - 1) * longest

annotate.py: tests/test_annotate.py
    ambiguous += 1⏎                continue ⇒ places = places[:repeats]
    label if k < repeats else -1 ⇒ label
    (-1, feedback.poor_spans) ⇒ (+1, feedback.poor_spans)
    (repeats - len(places)) ⇒ (len(places) < repeats)
    span.start <= start < end <= span.end ⇒ span.start <= start < span.end
    start += piece.index(word) ⇒ start += 0
    piece.strip() or piece ⇒ piece.strip()
    len(labels) > 1 ⇒ len(labels) > 2
    for edge in match.span(1))] ⇒ for edge in match.span(1)[:1])]
    for as_pattern in (re.escape, _loose): ⇒ for as_pattern in (_loose,):
    r"[^\\s\\b]", quote ⇒ r"[^\\s]", quote
    if value in [copy for ⇒ if value in [] and [copy for
    text.rpartition("</think>")[2] ⇒ text
    if extra:⏎ ⇒ if False:⏎
    json.dumps(inner, ensure_ascii=False).encode() ⇒ pass
    (ValueError, RecursionError) ⇒ ValueError
    if value.setdefault(key, item) != item: ⇒ if value.setdefault(key, item) is None:
    if piece and end == whole ⇒ if end == whole
    whole + 1 if piece.endswith(MARK) else whole ⇒ whole
    run_start + len(piece.rstrip(MARK)) ⇒ run_start + len(piece)

annotate.py: tests/test_modes.py
    critique or read_critique(value, prose) ⇒ read_critique(value, prose)
    checksum(state=parts)[:12] ⇒ checksum(state=parts)[:0]
    span.end <= len(example["response"]) ⇒ span.end
    if missing:⏎ ⇒ if False:⏎

annotate.py: tests/test_ask.py -k "work or critic or phase_1 or function or flags or dry or rows"
    if not places and quote in row ⇒ if False and quote in row
    if not isinstance(value, str): ⇒ if False:
    os.path.realpath(data) == os.path.realpath(output) ⇒ False
    parts = [task.name, config.annotator, messages] ⇒ parts = [task.name, messages]
    , function_hash(config.annotator_function)] ⇒ ]
    json.dumps(value, default=asdict) ⇒ json.dumps(value)

ask.py: tests/test_ask.py
    self.spent += self.usd(row["usage"]) ⇒ self.spent += 0.0
    reply.usage or self.largest(question) ⇒ reply.usage or FREE
    question.max_tokens * self.ratio ⇒ question.max_tokens
    max(self.ratio, row.get("ratio", 1)) ⇒ 1
    [waiting[0], *running.values()] ⇒ [waiting[0]]
    self.max_usd is None or ⇒ not self.max_usd or
    if "reply" in row: ⇒ if True:
    except InputError:⏎            raise⏎ ⇒ except InterruptedError:⏎            raise⏎
    hide_key(answer.text) ⇒ answer.text
    key=lambda question: question.key in old_keys) ⇒ key=lambda question: 0)
    (concurrency if has_answered else 1) ⇒ concurrency
    reply.status >= 429 ⇒ reply.status >= 400
    or not has_answered⏎ ⇒ ⏎
    if reason else 0⏎ ⇒ if reason else failures⏎
    raise InterruptedError ⇒ pass
    while running:⏎                list(arrived()) ⇒ pass
    body["max_completion_tokens"] = question.max_tokens ⇒ pass
    if "json_schema" in self.refused: ⇒ if False:
    FREE if "ConnectError" in reason else None ⇒ None
    is_free = 400 <= status < 500 ⇒ is_free = 400 <= status
    usage or (FREE if is_free else None) ⇒ FREE if is_free else None
    (length|max|limit|error) ⇒ (length|error)
    max(completion, total - prompt) ⇒ completion
    < 1e9: ⇒ < 1e99:
"""


def read_mutations(text: str) -> list[tuple[str, str, str, str]]:
    """(file, arguments of pytest, old, new) of each line; ⏎ stands for the end of a line."""
    mutations = []
    for line in text.splitlines():
        if line and not line.startswith(" "):
            file, _, target = line.partition(": ")
        elif line:
            old, _, new = line.strip().replace("⏎", "\n").partition(" ⇒")
            mutations.append((file, target, old, new.removeprefix(" ")))
    return mutations


def run_pytest(copy: Path, target: str):
    """In a process of its own: run the target, write its output to a file, exit as pytest does.

    The process is a fork, so that the libraries are imported only once.
    """
    os.setsid()
    os.chdir(copy)
    output = os.open(copy.parent / "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    import pytest
    os._exit(pytest.main(["-x", "-q", "-n0", "-p", "no:cacheprovider", *shlex.split(target)]))


def run_tests(copy: Path, target: str) -> tuple[str, str]:
    """("passed", ""), ("failed", the failed test or "timeout"), or ("error", why)."""
    process = multiprocessing.get_context("fork").Process(target=run_pytest, args=(copy, target))
    process.start()
    process.join(TIMEOUT)
    is_late = process.exitcode is None
    try:
        os.killpg(process.pid, signal.SIGKILL)       # the tests' own processes, too
    except ProcessLookupError:
        pass
    process.join()
    output = (copy.parent / "output").read_text("utf-8", "replace")
    failed_test = re.search(r"^(?:FAILED|ERROR) tests/(\S+::.+?)(?: - |$)", output, re.M)
    if is_late:
        return "failed", "timeout"
    if process.exitcode == 0:
        return "passed", ""
    if process.exitcode == 1 and failed_test:
        return "failed", failed_test[1]
    return "error", f"exit status {process.exitcode}: {output.strip()[-200:]}"


def try_mutation(copy: Path, file: str, target: str, old: str, new: str) -> tuple[str, str]:
    """("killed", by which test), ("SURVIVED", "") or ("ERROR", why)."""
    source = (copy / file).read_text("utf-8")
    if source.count(old) != 1:
        return "ERROR", f"stale: the file has the old text {source.count(old)} times"
    (copy / file).write_text(source.replace(old, new), "utf-8")
    try:
        result, reason = run_tests(copy, target)
    finally:
        (copy / file).write_text(source, "utf-8")
    return {"passed": "SURVIVED", "failed": "killed", "error": "ERROR"}[result], reason


def main():
    """Try the mutations that were asked for."""
    words = " ".join(sys.argv[1:])
    mutations = [mutation for mutation in read_mutations(MUTATIONS)
                 if words in f"{mutation[0]} {mutation[2]}"]
    sys.dont_write_bytecode = True        # a file may change twice within its time stamp
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    for name in LIBRARIES:
        __import__(name)
    targets = {}                          # arguments of pytest → result without a fault
    results = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(shutil.copytree(ROOT, f"{folder}/copy", ignore=LEFT_OUT))
        if (ROOT.parent / "shared").is_dir():
            (copy.parent / "shared").symlink_to(ROOT.parent / "shared")
        for file, target, old, new in mutations:
            if target not in targets:
                targets[target] = run_tests(copy, target)
            result, reason = targets[target]
            if result == "passed":
                result, reason = try_mutation(copy, file, target, old, new)
            results.append(result)
            print(f"{result:8} {file}: {old!r} ⇒ {new!r} ({reason})", flush=True)
    killed = results.count("killed")
    print(f"{killed} of {len(results)} faults are noticed")
    sys.exit(killed < len(results))


if __name__ == "__main__":
    main()
