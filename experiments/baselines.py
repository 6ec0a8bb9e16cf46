"""What Text2Grad is compared with (§4.3, Tables 2 and 3, Appendix N): by LoRA on the same base, from the same rows.

    python -m experiments.baselines --method dpo               # on the embedded toy world; --method sft, ilf, reflection, …
    python -m experiments.baselines --method prm_ppo --task kodcode --model MODEL --data rows.jsonl --allow_code_execution

    sft           imitate references: −E log π(y*|x)
    ilf           imitate refinements: a critique of y, y rewritten by it, kept where no fault is left, then SFT on it
    reflection    SFT; when asked, y ~ π, z' ~ R_φ(x, y), and the answer is y' ~ π'(x, y, z')
    dpo           −log σ(β(Δ_w − Δ_l)), Δ = log π(y|x) − log π_ref(y|x), on preference pairs
    ppo           text2grad.py with a scalar reward, −log σ(r_w − r_l) on the same pairs, paid at the last token
    prm_ppo       text2grad.py with a reward for every step, −log σ(±ℓ) on steps that are labelled correct or not

Where things come from. References: `reference`, `ideal_human_summary`, `solution` or the chosen answer. Preference
pairs: the row's own (chosen and rejected; SLF5K's comparison; KodCode's trials that passed and failed); else two
samples of the reference policy, ranked by --critic or, with --allow_code_execution, by the row's tests, ties left out; else the
row's reference against a sample. Critiques and step labels: annotate.py, as in phase 1.

Paper: §4.3, Appendix N and Tables 2 and 3. Shapes: B pairs, T tokens.

The paper gives no settings for these. Each takes Text2Grad's: the same adapter shape, batch and rows. A finished phase
in --output_dir is reused. In the toy world refinements are made by `toy.refine`, a function that sees the critique and
the response and not the post, because the base cannot follow an instruction that it never saw; an adapter "rewriter"
learns to do the same for reflection. With --refiner none the model is asked to rewrite, as in the papers.
"""

from __future__ import annotations

import json
import re
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import Tensor
from tqdm import tqdm

from annotate import InputError, flag, get_task, read_rows, run, token_offsets, write_rows
from model import (ModelError, context_length, encode_answer, encode_prompt, head_weight, load_lora, lora_parameters,
                   pad_batch, response_hidden, save_lora, token_logprobs, use_lora)
from ranks import RANK, say, start_ranks, together
from report import ReportError, run_report
from reward_model import REWARD_PRESETS, RewardConfig, chunks, fit_adapter, parse_config, split_rows, write_critiques
from experiments.designs import sequence_scores, step_ends, token_scores, true_verdict
from runs import note_machine, open_run, phase
from measures.sandbox import SandboxError, run_python
from tasks import named_function
from text2grad import (PRESETS, Config, Rollouts, annotate_phase, check_config, evaluate_policy, optimise, prepare,
                       reward_phase, sample, sample_rollouts, show_result)

METHODS = ("sft", "ilf", "reflection", "dpo", "ppo", "prm_ppo")


@dataclass
class BaselineConfig(Config):
    """The flags of text2grad.py, and these. learning_rate is the policy's, minibatch_size its rows per step."""
    method: str = flag("sft", "sft, ilf, reflection, dpo, ppo or prm_ppo")
    output_dir: str = flag("runs/baseline", "run directory: config, metrics, samples, adapters")
    learning_rate: float | None = flag(None, "peak of the policy's; none: the method's own, see _RATES")
    epochs: int = flag(3, "passes over the rows where the policy is fitted to rows")
    dpo_beta: float = flag(0.1, "β of DPO: how dear it is to leave the reference")
    score_learning_rate: float = flag(1e-3, "peak of the scalar or step reward model's; 3e-3, R_φ's, learns nothing here")
    score_epochs: int = flag(4, "passes over its rows: a bit per pair teaches less than a critique")
    refiner: str = flag("toy:refine", "a function module:function of (response, critique); none: the model itself")


# Of the toy world: what worked at first. Of the others: TRL's defaults.
_RATES = {"toy": {"dpo": 1e-3, "ppo": 7e-4, "prm_ppo": 7e-4, "other": 3e-3},
          "other": {"dpo": 1e-6, "ppo": 1e-6, "prm_ppo": 1e-6, "other": 2e-5}}


def settle(config: BaselineConfig) -> BaselineConfig:
    """Fill in what follows from the method: learning rate, the annotator's mode, the reward, and who judges."""
    rates = _RATES.get(config.task, _RATES["other"])
    rate = config.learning_rate or rates.get(config.method, rates["other"])
    judge = "critique" if config.reward_model or config.method == "reflection" else "true" if config.critic else "none"
    config = replace(config, learning_rate=rate, reward={"ppo": "scalar", "prm_ppo": "steps"}.get(config.method, judge))
    if config.method == "prm_ppo":
        own = config.critic == "toy:critique"
        config = replace(config, mode="steps", critic="toy:critique_steps" if own else config.critic)
    return config


# ── The losses ──────────────────────────────────────────────────────────────────────────────────────────

def dpo_loss(policy_chosen: Tensor, policy_rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor,
             beta: float) -> Tensor:
    """−log σ(β [(log π(y_w) − log π_ref(y_w)) − (log π(y_l) − log π_ref(y_l))]) (Rafailov et al. 2023; Appendix N).

    Log-probs of whole responses in nats, [B] each → [B].
    """
    return -F.logsigmoid(beta * ((policy_chosen - ref_chosen) - (policy_rejected - ref_rejected)))


def bradley_terry_loss(chosen: Tensor, rejected: Tensor) -> Tensor:
    """−log σ(r(x, y_w) − r(x, y_l)): the preferred response has the higher score (Appendix N). [B], [B] → [B]"""
    return -F.logsigmoid(chosen - rejected)


def step_loss(scores: Tensor, labels: Tensor) -> Tensor:
    """−Σ log σ(label · ℓ) over the tokens that end a step: the cross-entropy of a process reward model (Appendix N).

    scores [B, T], labels [B, T] with +1 correct, −1 not, 0 elsewhere → scalar.
    """
    return -(F.logsigmoid(labels * scores) * (labels != 0)).sum()


def sequence_logprobs(model, pairs: list[tuple], pad: int) -> Tensor:
    """log π(y|x) = Σ_t log π(y_t | x, y_<t), by the adapter in use, of pairs (x, y) of ids. → [B], nats"""
    *inputs, mask = pad_batch([x for x, _ in pairs], [y for _, y in pairs], pad, model.device)
    at = mask.bool()
    hidden = response_hidden(model, *inputs, mask)[at]                                     # [N, H]
    logprobs = torch.zeros(mask.shape, device=model.device)
    return logprobs.masked_scatter(at, token_logprobs(hidden, head_weight(model), inputs[2][at])).sum(1)


def preference_loss(config: BaselineConfig):
    """DPO of some (x, y_w, y_l), summed, in the form that `fit_adapter` wants; π_ref is the base or the SFT adapter."""
    def loss_of(model, pairs, pad):
        both = [(x, w) for x, w, _ in pairs] + [(x, l) for x, _, l in pairs]
        with torch.no_grad(), use_lora(model, config.reference):
            reference = sequence_logprobs(model, both, pad).chunk(2)
        return dpo_loss(*sequence_logprobs(model, both, pad).chunk(2), *reference, config.dpo_beta).sum(), len(pairs)
    return loss_of


def ranking_loss(tokenizer):
    """Bradley–Terry of some (x, y_w, y_l), summed, in the form that `fit_adapter` wants."""
    def loss_of(model, pairs, _):
        both = [(x, w) for x, w, _ in pairs] + [(x, l) for x, _, l in pairs]
        return bradley_terry_loss(*sequence_scores(model, tokenizer, both).chunk(2)).sum(), len(pairs)
    return loss_of


def labelled_loss(tokenizer):
    """Step cross-entropy of some (x, y, labels), summed; labels has one entry for every id of y."""
    def loss_of(model, rows, _):
        scores, mask = token_scores(model, tokenizer, [(x, y) for x, y, _ in rows])
        labels = torch.tensor([row + [0] * (mask.shape[1] - len(row)) for _, _, row in rows], device=model.device)
        return step_loss(scores, labels), int((labels != 0).sum())
    return loss_of


# ── Rows: references, refinements, preference pairs, step labels ────────────────────────────────────────

def reference(row: dict) -> str | None:
    """The answer that a row brings as a good one, if it does."""
    chosen = row.get("chosen")
    found = [row.get(name) for name in ("reference", "ideal_human_summary", "tldr_human_reference_summary", "solution")]
    found += [chosen[-1]["content"] if isinstance(chosen, list) and chosen else chosen]
    return next((text for text in found if isinstance(text, str) and text.strip()), None)


def own_pairs(row: dict) -> list[tuple[str, str]]:
    """(chosen, rejected) as the data set itself has them: UltraFeedback, SLF5K's comparison, KodCode's trials."""
    if row.get("chosen") and row.get("rejected"):
        pair = row["chosen"], row["rejected"]
        return [tuple(said if isinstance(said, str) else said[-1]["content"] for said in pair)]
    if preferred := str(row.get("comparison_preference") or ""):
        a, b = (row[f"generated_summary_for_comparison_{side}"] for side in "AB")
        return [(a, b) if preferred.strip().upper().endswith("A") else (b, a)]
    trials = (row.get("trials") or {}).values()
    passed, failed = ([t["solution_code"] for t in trials if str(t["test_result"]).lower().startswith(how)]
                      for how in ("pass", "fail"))
    return list(zip(passed, failed))


def merit(row: dict, response: str, config: BaselineConfig) -> float | None:
    """What ranks two samples: Σδ over words by the critic, or whether the tests pass; None where neither can tell."""
    if config.task == "kodcode" and config.allow_code_execution:
        return float(run_python(response, row.get("test_code") or row["test"], unsafe=config.unsafe_sandbox).passed)
    if not config.critic:
        return None
    verdict = true_verdict(row, response, [word.span() for word in re.finditer(r"\w+|[^\w\s]", response)], config)
    return None if verdict.reason else sum(verdict.delta)


def preferences(model, tokenizer, rows: list[dict], config: BaselineConfig) -> list[dict]:
    """Rows {id, prompt, chosen, rejected}; where a row has no pair of its own, from samples of the reference policy.

    Raises InputError where no row gives a pair."""
    task, out, sampled = get_task(config.task), [], []
    for n, row in enumerate(rows):
        head = {"id": str(row.get("id", n)), "prompt": task.policy_prompt(row)}
        pairs = own_pairs(row)
        out += [head | {"chosen": w, "rejected": l} for w, l in pairs if w.strip() and l.strip() and w != l]
        if not pairs:
            sampled.append(head | {"row": row})
    generator = torch.Generator().manual_seed(config.seed)
    for part in tqdm(chunks(sampled, 256), desc="sample pairs", disable=not sampled):
        prompts = [encode_prompt(tokenizer, head["prompt"]) for head in part for _ in range(2)]
        ids = sample(model, tokenizer, prompts, config, config.reference,
                     torch.rand(len(prompts), config.max_new_tokens, generator=generator))
        texts = [token_offsets(tokenizer, y)[0] for y in ids]
        for head, pair in zip(part, chunks(texts, 2)):
            out += ranked(head, [text for text in pair if text.strip()], config)
    if not out:
        raise InputError(f"{config.data}: no row gives a preference pair: samples are empty or tied, and none has a "
                         f"reference")
    return out


def ranked(head: dict, texts: list[str], config: BaselineConfig) -> list[dict]:
    """One pair of a row from its samples, or none: a tie says nothing."""
    row = head.pop("row")
    merits = [merit(row, text, config) for text in texts]
    if len(texts) == 2 and None not in merits:
        if merits[0] == merits[1]:
            return []
        return [head | {"chosen": texts[merits[0] < merits[1]], "rejected": texts[merits[0] > merits[1]]}]
    better = reference(row)
    return [head | {"chosen": better, "rejected": texts[0]}] if better and texts and texts[0] != better else []


def refine_prompt(prompt: str, response: str, critique: str) -> str:
    """The instruction to rewrite a response by its critique (ILF, reflection)."""
    return (f"{prompt}\n\nResponse: {response}\n\nCritique: {critique}\n\n"
            f"Write the response anew, mended as the critique asks.")


def spoken(critique: str) -> str:
    """What a critique of R_φ says, without its span JSON."""
    return critique.rpartition("\n{")[0].strip() or critique.strip()


def refinements(model, tokenizer, rows: list[dict], config: BaselineConfig) -> list[dict]:
    """Rows with "refinement", the response rewritten by its critique, and "kept": whether no quoted fault is left."""
    if config.refiner != "none":
        refine = named_function("--refiner", config.refiner, "(response, critique)")
        texts = [refine(row["response"], row["critique"]) for row in rows]
    else:
        prompts = [refine_prompt(row["prompt"], row["response"], row["critique"]) for row in rows]
        uniforms = torch.rand(len(rows), config.max_new_tokens, generator=torch.Generator().manual_seed(config.seed))
        asked = [encode_prompt(tokenizer, prompt) for prompt in prompts]
        ids = sample(model, tokenizer, asked, config, config.reference, uniforms)
        texts = [token_offsets(tokenizer, y)[0].strip() for y in ids]
    return [{key: row[key] for key in ("id", "prompt", "response", "critique", "poor_spans")} | {
        "refinement": text, "kept": bool(text.strip()) and not any(quote in text for quote in row["poor_spans"])}
        for row, text in zip(rows, texts)]


def labelled_steps(row: dict, tokenizer) -> tuple[list[int], list[int], list[int]]:  # Table 17
    """(x, y, labels) of a row that was annotated in steps: ±1 at the last token of each step, 0 elsewhere."""
    y = encode_answer(tokenizer, row["response"])
    text, offsets = token_offsets(tokenizer, y)
    ends = step_ends(text, offsets, [(span["start"], span["end"]) for span in row["spans"]])
    labels = [0] * len(y)
    for end, span in zip(ends, row["spans"]):
        if end is not None:
            labels[end] = span["label"]
    return encode_prompt(tokenizer, row["prompt"]), y, labels


def fitting(pairs: list[tuple], model, what: str) -> list[tuple]:
    """The tuples of ids whose first with each of the others fits the context, all lengths known; others are counted.

    Raises InputError where none fits."""
    limit = context_length(model) - 1
    kept = [pair for pair in pairs if max(len(pair[0]) + len(y) for y in pair[1:]) <= limit]
    if not kept:
        raise InputError(f"none of {len(pairs)} {what} fits the model's context of {limit + 1} tokens")
    if len(kept) < len(pairs):
        say(f"left out {len(pairs) - len(kept)} of {len(pairs)} {what}, longer than the model's context")
    return kept


# ── Fits ────────────────────────────────────────────────────────────────────────────────────────────────

def policy_settings(config: BaselineConfig) -> RewardConfig:
    """The settings of `fit_adapter` for an adapter of the policy's shape."""
    shared = ("seed", "lora_r", "lora_alpha", "lora_targets", "learning_rate", "epochs", "micro_batch_size",
              "max_grad_norm")
    return RewardConfig(**{name: getattr(config, name) for name in shared}, batch_size=config.minibatch_size)


def reward_settings(config: BaselineConfig) -> RewardConfig:
    """The settings of a reward model, as text2grad.py's phase 2 has them."""
    own = {"seed": config.seed, "micro_batch_size": config.micro_batch_size}
    return RewardConfig(**{**REWARD_PRESETS[config.task], **own})


def fit_and_keep(model, tokenizer, pairs, name: str, settings: RewardConfig, directory: Path, **loss) -> str:
    """Fit an adapter, write it and the loss of every step; returns a summary."""
    losses = fit_adapter(model, tokenizer, pairs, name, settings, **loss)
    steps = [{"step": i, "loss": x} for i, x in enumerate(losses, 1)]
    write_rows(directory.parent / f"{directory.name}-losses.jsonl", steps)
    save_lora(model, name, directory)
    tenth = max(1, len(losses) // 10)
    first, last = (sum(part) / tenth for part in (losses[:tenth], losses[-tenth:]))
    return f"{len(pairs)} rows, {len(losses)} steps, loss {first:.3f} → {last:.3f}"


def imitate(model, tokenizer, rows: list[tuple[str, str]], config: BaselineConfig, out: Path, name="policy") -> str:
    """−E log π(y*|x) over (prompt, answer), per token, EOS trained: SFT, and the last step of ILF."""
    if config.adapter and name == "policy":
        load_lora(model, name, config.adapter)
    pairs = fitting([(encode_prompt(tokenizer, x), encode_answer(tokenizer, y)) for x, y in rows], model, "rows")
    settings = policy_settings(config) if name == "policy" else reward_settings(config)
    return fit_and_keep(model, tokenizer, pairs, name, settings, out / name)


def fit_references(model, tokenizer, rows: list[dict], config: BaselineConfig, out: Path) -> str:
    """SFT on the rows' own references. Raises InputError for a row that has none."""
    task, rows = get_task(config.task), rows[: config.annotated_rows]
    pairs = [(task.policy_prompt(row), reference(row)) for row in rows]
    for row, (_, answer) in zip(rows, pairs):
        if answer is None:
            raise InputError(f"row {row.get('id')}: SFT needs a reference; there is no reference, ideal_human_summary, "
                             f"solution or chosen in it")
    return imitate(model, tokenizer, pairs, config, out)


def fit_preferences(model, tokenizer, config: BaselineConfig, out: Path) -> str:
    """DPO on preferences.jsonl."""
    if config.adapter:
        load_lora(model, "policy", config.adapter)
    pairs = fitting(encoded_preferences(read_rows(out / "preferences.jsonl"), tokenizer), model, "pairs")
    return fit_and_keep(model, tokenizer, pairs, "policy", policy_settings(config), out / "policy",
                        loss_of=preference_loss(config), count_of=lambda _: 1)


def encoded_preferences(rows: list[dict], tokenizer) -> list[tuple]:
    """(x, y_w, y_l) as ids, EOS included."""
    return [(encode_prompt(tokenizer, row["prompt"]), encode_answer(tokenizer, row["chosen"]),
             encode_answer(tokenizer, row["rejected"])) for row in rows]


def fit_scores(model, tokenizer, config: BaselineConfig, out: Path) -> str:
    """The scalar or the step reward model, an adapter "reward", judged on prompts that it does not see."""
    steps, settings = config.reward == "steps", replace(
        reward_settings(config), learning_rate=config.score_learning_rate, epochs=config.score_epochs)
    if steps:
        rows = [row for row in read_rows(out / "feedback.jsonl") if row["spans"]]
        encode = lambda rows: [labelled_steps(row, tokenizer) for row in rows]
        loss = dict(loss_of=labelled_loss(tokenizer), count_of=lambda row: len(row[2]) - row[2].count(0))
    else:
        rows, encode = read_rows(out / "preferences.jsonl"), lambda rows: encoded_preferences(rows, tokenizer)
        loss = dict(loss_of=ranking_loss(tokenizer), count_of=lambda _: 1)
    training, held_out = (encode(part) for part in split_rows(rows, config.eval_rows, config.seed))
    said = fit_and_keep(model, tokenizer, fitting(training, model, "rows"), "reward", settings,
                        out / "reward" / "adapter", **loss)
    right = held_out and accuracy(model, tokenizer, fitting(held_out, model, "rows"), settings.micro_batch_size, steps)
    write_rows(out / "reward" / "metrics.json", [{"held_out_rows": len(held_out), "held_out_accuracy": right or None}])
    return said + (f"; held out: {right:.1%} of {'steps' if steps else 'pairs'} right" if held_out else "")


@torch.no_grad()
def accuracy(model, tokenizer, rows: list[tuple], size: int, steps: bool) -> float:
    """Share of held-out steps whose sign, or of pairs whose order, the adapter "reward" gets right."""
    found = []
    with use_lora(model, "reward"):
        for part in chunks(rows, size):
            if steps:
                scores, _ = token_scores(model, tokenizer, [(x, y) for x, y, _ in part])
                found += [(score > 0) == (label > 0) for line, (_, _, labels) in zip(scores.tolist(), part)
                          for score, label in zip(line, labels) if label]
            else:
                w, l = (sequence_scores(model, tokenizer, [(p[0], p[side]) for p in part]) for side in (1, 2))
                found += (w > l).tolist()
    return sum(found) / max(1, len(found))


# ── Methods ─────────────────────────────────────────────────────────────────────────────────────────────

def annotated(model, tokenizer, rows, config: BaselineConfig, out: Path):
    """Phase 1 of text2grad.py: responses and critiques."""
    phase("annotate", out / "feedback.jsonl", out, lambda: annotate_phase(model, tokenizer, rows, config, out))


def loaded(model, name: str, directory: Path):
    """Every rank has the adapter that the first one fitted."""
    if not lora_parameters(model, name):
        load_lora(model, name, directory)


def sft(model, tokenizer, rows, config: BaselineConfig, out: Path):
    """SFT: −E log π(y*|x), y* the row's reference."""
    phase("sft", out / "policy", out, lambda: fit_references(model, tokenizer, rows, config, out))


def refined(model, tokenizer, rows, config: BaselineConfig, out: Path):
    """feedback.jsonl → refinements.jsonl. Raises InputError where no refinement is free of what was poor."""
    def work():
        found = refinements(model, tokenizer, read_rows(out / "feedback.jsonl"), config)
        if not any(row["kept"] for row in found):
            raise InputError(f"{out / 'feedback.jsonl'}: none of {len(found)} refinements is free of what was poor")
        write_rows(out / "refinements.jsonl", found)
        return f"{sum(row['kept'] for row in found)} of {len(found)} kept"
    annotated(model, tokenizer, rows, config, out)
    phase("refine", out / "refinements.jsonl", out, work)


def ilf(model, tokenizer, rows, config: BaselineConfig, out: Path):
    """Imitation learning from language feedback (Scheurer et al. 2023): y, critique, refinement, −E log π(y⁺|x)."""
    refined(model, tokenizer, rows, config, out)
    kept = lambda: [(r["prompt"], r["refinement"]) for r in read_rows(out / "refinements.jsonl") if r["kept"]]
    phase("imitate refinements", out / "policy", out, lambda: imitate(model, tokenizer, kept(), config, out))


def reflection(model, tokenizer, rows, config: BaselineConfig, out: Path):
    """SFT, R_φ, and with a refiner an adapter "rewriter" that learns −E log π'(y⁺ | x, y, c) from its refinements."""
    sft(model, tokenizer, rows, config, out)
    if config.reward_model is None:
        annotated(model, tokenizer, rows, config, out)
        phase("reward model", out / "reward" / "metrics.json", out, lambda: reward_phase(model, tokenizer, config, out))
    loaded(model, "reward", config.reward_model or out / "reward" / "adapter")
    if config.refiner != "none":
        refined(model, tokenizer, rows, config, out)
        kept = lambda: [(refine_prompt(r["prompt"], r["response"], r["critique"]), r["refinement"])
                        for r in read_rows(out / "refinements.jsonl") if r["kept"]]
        phase("rewriter", out / "rewriter", out, lambda: imitate(model, tokenizer, kept(), config, out, "rewriter"))
        loaded(model, "rewriter", out / "rewriter")


def dpo(model, tokenizer, rows, config: BaselineConfig, out: Path):
    """Direct preference optimisation: −log σ(β(Δ_w − Δ_l)) over preferences.jsonl."""
    paired(model, tokenizer, rows, config, out)
    phase("dpo", out / "policy", out, lambda: fit_preferences(model, tokenizer, config, out))


def paired(model, tokenizer, rows, config: BaselineConfig, out: Path):
    """Rows → preferences.jsonl."""
    def work():
        found = preferences(model, tokenizer, rows[: config.annotated_rows], config)
        write_rows(out / "preferences.jsonl", found)
        return f"{len(found)} pairs"
    phase("preferences", out / "preferences.jsonl", out, work)


def scored(model, tokenizer, rows, config: BaselineConfig, out: Path):
    """PPO and PRM-PPO: the reward model here; the policy is text2grad.py's phase 3, where only the reward differs."""
    if config.reward_model is None:
        (annotated if config.reward == "steps" else paired)(model, tokenizer, rows, config, out)
        phase("reward model", out / "reward" / "metrics.json", out, lambda: fit_scores(model, tokenizer, config, out))
    loaded(model, "reward", config.reward_model or out / "reward" / "adapter")


def reflect(model, tokenizer, rows: list[dict], config: BaselineConfig, adapter, generator) -> Rollouts:
    """y ~ π(·|x), z' of R_φ, y' ~ π'(· | x, y, z'): rollouts of y', as `evaluate_policy` wants them."""
    first = sample_rollouts(model, tokenizer, rows, config, adapter, generator)
    critiques, _ = write_critiques(model, tokenizer, first.prompts, first.texts, config.max_critique_tokens)
    asked = [encode_prompt(tokenizer, refine_prompt(x, y, spoken(z)))
             for x, y, z in zip(first.prompts, first.texts, critiques)]
    ids = sample(model, tokenizer, asked, config, "rewriter" if config.refiner != "none" else adapter,
                 torch.rand(len(rows), config.max_new_tokens, generator=generator))
    texts, offsets = zip(*(token_offsets(tokenizer, y) for y in ids))
    prompt_ids = [encode_prompt(tokenizer, x) for x in first.prompts]
    padded = pad_batch(prompt_ids, ids, tokenizer.pad_token_id or 0, model.device)
    return Rollouts(first.prompts, list(texts), list(offsets), *padded, rows=rows)


def compare(model, tokenizer, eval_rows: list[dict], config: BaselineConfig, out: Path) -> str:
    """The table before and after, for the methods whose policy is fitted to rows."""
    loaded(model, "policy", out / "policy")
    judge = lambda adapter, **how: evaluate_policy(model, tokenizer, eval_rows, config, adapter, **how)[0]
    result = {"before": judge(config.reference)}
    if config.method == "reflection":
        result |= {"without_reflection": judge("policy")}
    result |= {"after": judge("policy", **({"sampler": reflect} if config.method == "reflection" else {}))}
    if RANK == 0:
        write_rows(out / "result.json", [result])
    return f"{len(eval_rows)} held-out prompts"


def main():
    """One baseline, from rows to the table before and after. Raises InputError for other methods, and for --reward."""
    config = parse_config(BaselineConfig, presets(), sys.argv[1:], __doc__)
    if config.method not in METHODS:
        raise InputError(f"--method {config.method}: it is one of {', '.join(METHODS)}")
    if config.reward != "critique":
        raise InputError(f"--reward {config.reward} is for text2grad.py; here the reward follows from --method")
    device = start_ranks(config.rank_timeout)
    check_config(config)
    config = settle(config)
    out, started = open_run(config), time.time()
    model, tokenizer, rows, eval_rows = prepare(config, device)
    note_machine(out, device)
    say(f"{config.method} on {config.task}: {config.model}, {len(rows)} training prompts, {device}; files in {out}/")
    {"sft": sft, "ilf": ilf, "reflection": reflection, "dpo": dpo, "ppo": scored, "prm_ppo": scored}[config.method](
        model, tokenizer, rows, config, out)
    if config.method in ("ppo", "prm_ppo"):
        phase("policy", out / "result.json", out,
              lambda: optimise(model, tokenizer, rows, eval_rows, config, out), ranks="all")
    else:
        if config.reward == "critique":
            loaded(model, "reward", config.reward_model or out / "reward" / "adapter")
        phase("evaluate", out / "result.json", out,
              lambda: compare(model, tokenizer, eval_rows, config, out), ranks="all")
    if RANK == 0:
        print(show_result(json.loads((out / "result.json").read_text("utf-8")), len(eval_rows)))
        if config.method in ("ppo", "prm_ppo"):
            print(f"look at {run_report(out)}")
        print(f"\n{time.time() - started:.0f} s in all. In {out}/: policy/ (PEFT format) and what it was made of.\n"
              f"next: the same rows by another method: python -m experiments.baselines --method "
              f"{METHODS[METHODS.index(config.method) - 1]} --output_dir {out}-other")
    together(dist.destroy_process_group)


def presets() -> dict[str, dict]:
    """Those of text2grad.py; the learning rate follows from the method, and a function refines in toy alone."""
    own = {"output_dir": "runs/baseline", "learning_rate": None}
    real = {"refiner": "none", "score_learning_rate": 1e-5, "score_epochs": 3}
    return {task: {**preset, **own, **({} if task == "toy" else real)} for task, preset in PRESETS.items()}


if __name__ == "__main__":
    run(main, "baselines", (ModelError, ReportError, SafetensorError, SandboxError, torch.OutOfMemoryError))
