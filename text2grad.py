"""Algorithm 1: from prompts to a policy that was trained with natural-language feedback.

    python text2grad.py                              # all three phases on the toy world
    torchrun --nproc_per_node 8 text2grad.py --task slf5k --data slf5k.jsonl \\
             --model meta-llama/Llama-3.1-8B-Instruct --batch_size 96 --minibatch_size 96

Text2Grad (arXiv 2505.22338) has four algorithms, and each has one file, to read in this order:

    annotate.py       Alg. 2   critique of y → its quotes → spans → δ_t ∈ {−1, 0, +1}
    reward_model.py   Alg. 3   R_φ learns to write the critiques z: −E[log p_φ(z | x, y)]
    policy.py         Alg. 4   y ~ π_θ, z' ~ R_φ, δ'_t, r_t = δ'_t + r_t^KL, GAE, PPO
    text2grad.py      Alg. 1   the whole run:

        y ~ π_ref(·|x) for each prompt x                write_responses      l.5–6    phase 1
        z = (critique, spans) of each (x, y)            annotate             l.7–11   phase 1
        φ ← R_φ trained on all (x, y, z)                fit                  l.13–14  phase 2
        θ ← π_θ trained with the critiques of R_φ       train_and_evaluate   l.16–19  phase 3

`main`, at the end, makes these four calls. Departures: a row of --data that already has a
response is not sampled again. Held-out prompts are judged before and after phase 3. The same
command continues a stopped run.
"""

import random
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from annotate import annotate, check_annotator
from data import (InputError, chunks, examples, get_task, read_rows, reward_prompt, run_script,
                  write_rows)
from model import (add_lora, encode_prompt, eos_ids, gathered, load_lora, load_model,
                   lora_parameters, target_layers)
from policy import (Rollouts, add_advantages, add_feedback, forward, quote_shares,
                    response_scores, reward_model_critic, sample_rollouts, sample_row, train)
from report import print_result
from reward_model import fit, judge_by_annotator, split_rows, summary
from runtime import (RANK, WORLD_SIZE, all_sum, check_ranks, gather_rows, lock_directory,
                     on_rank0, print_rank0, reward_model_hint, run_collective, run_phase,
                     save_settings, start_ranks)
from sampling import context_length, head_weight, token_logprobs
from settings import Config, derive_settings, parse_flags


# ── Algorithm 1: annotate, train R_φ, optimise the policy

def check_config(config: Config, out: Path, needs_reward_model: bool):
    """Check flags, annotator, key and directory before anything is sampled or paid."""
    if config.batch_size % WORLD_SIZE or config.minibatch_size % WORLD_SIZE:
        raise InputError(f"{WORLD_SIZE} ranks share each batch equally: set --batch_size and "
                         f"--minibatch_size to multiples of {WORLD_SIZE}")
    if config.batch_size % config.responses_per_prompt:
        raise InputError(f"--batch_size {config.batch_size} is not a multiple of "
                         f"--responses_per_prompt {config.responses_per_prompt}")
    if config.data is None and get_task(config.task).rows is None:
        raise InputError(f"--task {config.task} needs --data rows.jsonl")
    if config.wandb and not find_spec("wandb"):
        raise InputError("--wandb needs the package wandb: pip install wandb")
    if config.critic == "annotator":
        if config.mode == "align":
            raise InputError("--mode align needs feedback that people wrote, and there is none "
                             "for the policy's new responses: use --critic reward_model")
        if not config.annotator_function and config.max_usd is None:
            raise InputError("--critic annotator asks the server about every rollout: set "
                             "--max_usd with --price_in and --price_out, or "
                             "--annotator_function")
    has_feedback = config.reward_model or (out / "feedback.jsonl").exists()
    if config.critic == "annotator" or (needs_reward_model and not has_feedback):
        check_annotator(config)


def check_outcomes(rows: list[dict], has_responses: bool, config: Config):
    """Check that a server will know whether the responses to these rows pass their tests.

    If programs will run, one runs here, so that a sandbox that does not work is reported before
    anything is sampled.
    """
    task = get_task(config.task)
    if not task.tests or config.annotator_function:
        return
    missing = [] if has_responses else [
        row for row in rows
        if not any("outcome" in example for example in examples(task, [row]))]
    if not missing and config.critic == "reward_model":
        return
    if not config.allow_code_execution:
        raise InputError(f"{len(missing)} of {len(rows)} rows have no test outcome, which the "
                         f"annotator needs: set --allow_code_execution to run their tests in "
                         f"the sandbox")
    from measures.sandbox import add_outcomes
    add_outcomes([rows[0] | {"response": "pass", "outcome": None}], task)


def load_rows(config: Config) -> tuple[list[dict], list[dict]]:
    """(training rows, held-out rows) (§4.1). No held-out prompt is trained on or annotated.

    The seed shuffles the training rows. One row is kept per held-out prompt. Raises InputError
    where all rows have the same prompt.
    """
    task = get_task(config.task)
    if config.data is None:
        training = task.rows("train", config.annotated_rows, config.seed)
        evaluation = task.rows("eval", config.eval_rows, 0)
        for number, row in enumerate([*training, *evaluation], 1):
            task.check(row, f"--task {config.task}: row {number} of its `rows`")
        return training, evaluation
    rows = read_rows(config.data, task=task)
    shuffled = random.Random(config.seed).sample(rows, len(rows))
    training, evaluation = split_rows(shuffled, config.eval_rows, config.seed,
                                      task.policy_prompt, least=1)
    if not training:
        raise InputError(f"{config.data}: all rows have the same prompt; add rows with another "
                         f"prompt, because one prompt is held out for evaluation")
    one_per_prompt = {str(task.policy_prompt(row)): row for row in evaluation}
    return training, list(one_per_prompt.values())


def drop_long_rows(rows: list[dict], model, tokenizer, config) -> list[dict]:
    """Keep rows whose prompt, response and critique fit the context; print how many do not."""
    context = context_length(model)
    instruction = len(encode_prompt(tokenizer, reward_prompt("", "")))
    room = context - instruction - config.max_new_tokens - config.max_critique_tokens
    limit = min(room, config.max_prompt_tokens or room)
    prompt = get_task(config.task).policy_prompt
    lengths = [len(encode_prompt(tokenizer, prompt(row))) for row in rows]
    fitting_rows = [row for row, length in zip(rows, lengths) if length <= limit]
    source = config.data or config.task
    if not fitting_rows:
        raise InputError(
            f"{source}: the shortest prompt has {min(lengths)} tokens, and the longest that "
            f"fits has {max(0, limit)}: of the model's {context} tokens, R_φ's instruction "
            f"takes {instruction}; lower --max_new_tokens ({config.max_new_tokens}) or "
            f"--max_critique_tokens ({config.max_critique_tokens}), or raise "
            f"--max_prompt_tokens if it is set")
    if len(fitting_rows) < len(rows):
        print_rank0(f"{source}: left out {len(rows) - len(fitting_rows)} of {len(rows)} rows, "
                    f"whose prompts have more than {limit} tokens")
    return fitting_rows


def write_responses(model, tokenizer, rows: list[dict], config: Config, out: Path) -> str:
    """Alg. 1 l.6: π_ref answers the rows that have no response → responses.jsonl."""
    task = get_task(config.task)
    generator = torch.Generator().manual_seed(config.seed)
    with_response = [row for row in rows if task.all_responses(row)]
    without_response = [row for row in rows if not task.all_responses(row)
                        for _ in range(config.annotated_responses_per_prompt)]
    parts = chunks(without_response, 256)
    for part in tqdm(parts, "respond", disable=not without_response or RANK > 0):
        with gathered(model):
            batch = sample_rollouts(model, tokenizer, part, config, config.reference, generator)
        with_response += [row | {"response": y} for row, y in zip(part, batch.texts)]    # l.6
    if task.tests and config.allow_code_execution:
        from measures.sandbox import add_outcomes
        with_response = gather_rows(add_outcomes(with_response[RANK::WORLD_SIZE], task))
    if RANK == 0:
        write_rows(out / "responses.jsonl", with_response)
    return f"{len(with_response)} responses, {len(without_response)} of them sampled"


@torch.no_grad()
def base_nats(rollouts: Rollouts, model, tokenizer, config: Config) -> Tensor:
    """−Σ_t log p(y_t | x, y_<t) under the base, in nats, and the number of tokens: [2].

    The EOS token does not count.
    """
    eos = torch.tensor([*eos_ids(tokenizer, model)], device=model.device)
    sums = torch.zeros(2, device=model.device)
    for group in rollouts.groups(range(len(rollouts.rows)), config):
        index = group[RANK::WORLD_SIZE]
        if not index:
            continue
        hidden, targets = forward(model, rollouts, index, None)
        logprobs = token_logprobs(hidden, head_weight(model), targets)
        is_text = ~torch.isin(targets, eos)
        sums += torch.stack([-logprobs[is_text].sum(), is_text.sum()])
    return all_sum(sums)


def evaluate(model, tokenizer, rows, config: Config, adapter, critic=reward_model_critic):
    """Sample a response to each held-out row and let the critic judge it.

    Returns (the means of all metrics, the samples).
    """
    nats = torch.zeros(2, device=model.device)
    generator = torch.Generator().manual_seed(config.seed)
    task = get_task(config.task)
    samples = []
    judgements = []
    for part in tqdm(chunks(rows, config.batch_size), desc="evaluate", disable=RANK > 0):
        with gathered(model):
            batch = sample_rollouts(model, tokenizer, part, config, adapter, generator)
            add_feedback(batch, critic(batch, model, tokenizer, config))
            nats += base_nats(batch, model, tokenizer, config)
        judgements += batch.feedback
        for i, scores in enumerate(response_scores(batch, task)):
            samples.append({"id": part[i].get("id"), **sample_row(batch, i), "scores": scores})
    means = {key: sum(sample["scores"][key] for sample in samples) / len(samples)
             for key in samples[0]["scores"]} | quote_shares(judgements)
    means["perplexity under the base"] = (nats[0] / nats[1].clamp(min=1)).exp().item()
    return means, samples


WARN_UNREADABLE = 0.2                     # share of critiques; a warning above it
MOST_UNREADABLE = 0.5                     # phase 3 does not start above it
ALL_TOKENS = 0.9                          # share of good or of poor tokens; a warning above it


def train_and_evaluate(model, tokenizer, rows, held_out, config: Config, out: Path,
                       critic=reward_model_critic, advantages=add_advantages) -> str:
    """Phase 3 (Alg. 1 l.16–19), with an evaluation before and after → policy/, result.json."""
    before, samples = evaluate(model, tokenizer, held_out, config, config.reference, critic)
    if RANK == 0:
        write_rows(out / "held_out.jsonl", held_out)
        write_rows(out / "before_samples.jsonl", samples)
    unreadable = before["unparseable"]
    if unreadable > WARN_UNREADABLE:
        reason = next(sample["unreadable"] for sample in samples if sample["unreadable"])
        problem = (f"{unreadable:.0%} of the critiques cannot be read and give no reward (the "
                   f"first: {reason}); train R_φ again with a higher --reward_learning_rate, "
                   f"more --reward_epochs or more rows (remove {out / 'reward'} first), or "
                   f"raise --max_critique_tokens; python report.py {out} shows them")
        if unreadable > MOST_UNREADABLE:
            raise InputError(problem)
        print_rank0(f"warning: {problem}")
    shares = before["good"], before["poor"]
    if not 0 < max(shares) < ALL_TOKENS:
        print_rank0(f"warning: δ is nearly the same for every token of the {len(samples)} "
                    f"held-out responses ({shares[0]:.0%} good, {shares[1]:.0%} poor), so the "
                    f"policy learns nothing; python report.py {out} shows the critiques")
    train(model, tokenizer, rows, config, out, critic, advantages)                      # l.18
    after, samples = evaluate(model, tokenizer, held_out, config, "policy", critic)
    if RANK == 0:
        write_rows(out / "after_samples.jsonl", samples)
        write_rows(out / "result.json", [{"before": before, "after": after}])
    return f"{config.iterations} iterations"


def start_policy(model, config: Config):
    """Create the adapter "policy", or load it and π_ref from --adapter (Alg. 1 l.17)."""
    if config.adapter:
        load_lora(model, "reference", config.adapter)
        load_lora(model, "policy", config.adapter)
    else:
        torch.manual_seed(config.seed)
        add_lora(model, "policy", config.lora_r, config.lora_alpha, 0.0,
                 config.lora_targets.split(","))


def annotator_critic(rollouts: Rollouts, model, tokenizer, config: Config):  # noqa: ARG001
    """The annotator in the place of R_φ (--critic annotator): judgements of this rank's rows.

    Rank 0 asks about all rows, because the journal has one writer.
    """
    judgements = judge_by_annotator(rollouts, config) if RANK == 0 else None
    return gather_rows([judgements])[0][RANK::WORLD_SIZE]


def main(config: Config, critic=None, needs_reward_model=True, advantages=add_advantages):
    """Algorithm 1. The last three arguments serve experiments/, which have other critics.

    critic, advantages: see `train`; None is the critic of --critic. needs_reward_model: whether
    the critic uses R_φ, so that phases 1 and 2 must train it.
    """
    if config.critic == "annotator":
        needs_reward_model = False
    critic = critic or (reward_model_critic if needs_reward_model else annotator_critic)
    out = Path(config.output_dir or f"runs/{get_task(config.task).name}")
    config = replace(config, output_dir=str(out))
    check_config(config, out, needs_reward_model)
    device = start_ranks()
    _lock = lock_directory(out)                               # held until the process ends
    rows, held_out = load_rows(config)
    model, tokenizer = load_model(config.model, config.dtype, device, config.shard,
                                  config.activation_checkpointing)
    rows = drop_long_rows(rows, model, tokenizer, config)
    held_out = drop_long_rows(held_out, model, tokenizer, config)
    config = derive_settings(config, len(rows), model)
    annotation_rows = rows[: config.annotated_rows]
    trains_reward_model = needs_reward_model and config.reward_model is None
    if config.reward_model:
        load_lora(model, "reward", config.reward_model)
    start_policy(model, config)
    check_ranks([vars(config), rows, held_out])
    if trains_reward_model:
        target_layers(model, config.reward_lora_targets.split(","))
    has_responses = not trains_reward_model or (out / "responses.jsonl").exists()
    check_outcomes(annotation_rows, has_responses, config)
    save_settings(config, out, "R_φ" if needs_reward_model else config.annotator)
    print_rank0(f"Text2Grad on {config.task}: {config.model}, {len(rows)} training prompts, "
                f"{config.iterations} iterations of {config.batch_size} rollouts, learning "
                f"rate {config.learning_rate:.2g}, {device}; files in {out}/")
    if trains_reward_model:
        feedback = out / "feedback.jsonl"
        run_phase("phase 1, respond", "responses.jsonl", out,
                  lambda: write_responses(model, tokenizer, annotation_rows, config,
                                          out))                                        # l.4–6
        run_phase("phase 1, annotate", "feedback.jsonl", out,
                  lambda: on_rank0(annotate, config, out / "responses.jsonl",
                                   feedback))                                         # l.7–11
        run_phase("phase 2, reward model", "reward/metrics.json", out,
                  lambda: summary(fit(model, tokenizer, config, feedback,
                                      out / "reward")))                              # l.13–14
        if not lora_parameters(model, "reward"):                # trained in an earlier run
            load_lora(model, "reward", out / "reward" / "adapter")
    run_phase("phase 3, policy", "result.json", out,
              lambda: train_and_evaluate(model, tokenizer, rows, held_out, config, out,
                                         critic, advantages))                        # l.16–19
    if RANK == 0:
        print_result(out, reward_model_hint(out))
    run_collective(dist.destroy_process_group)


if __name__ == "__main__":
    run_script(lambda: main(parse_flags(Config, __doc__)), "text2grad")
