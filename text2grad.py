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

`run_phases` makes these four calls. In phase 3 a critic judges each new response: R_φ, or the
annotator itself (--critic). It is not the critic of actor–critic, which is V_ψ, the value head.
Departures: a row of --data that already has a response is not sampled again. Held-out prompts
are judged before and after phase 3. The same command continues a stopped run.
"""

import math
import random
from dataclasses import replace
from pathlib import Path

import torch

from annotate import annotate, load_annotator
from ask import Function
from data import InputError, get_task, read_rows, reward_prompt, run_script, write_rows
from model import (add_lora, encode_prompt, gathered, load_lora, load_model, lora_parameters,
                   target_layers)
from policy import (add_advantages, add_feedback, mean_scores, response_scores,
                    reward_model_critic, sample_rollouts, sample_row, train)
from report import print_examples, print_result
from reward_model import annotator_critic, fit, split_rows
from runtime import (RANK, WORLD_SIZE, check_ranks, gather_rows, lock_directory, on_rank0,
                     print_rank0, reward_model_hint, run_phase, save_settings, start_ranks,
                     stop_ranks)
from sampling import context_length
from settings import Config, derive_settings, parse_flags


# ── Algorithm 1: annotate, train R_φ, optimise the policy

def run_phases(model, tokenizer, rows, held_out, config: Config, out: Path, critic,
               advantages):
    """Algorithm 1. A phase whose last file exists in the run directory `out` is over."""
    if config.critic == "reward_model" and not config.reward_model:
        run_phase("phase 1, respond", "responses.jsonl", out, write_responses, model,
                  tokenizer, rows[: config.annotated_rows], config, out)               # l.4–6
        run_phase("phase 1, annotate", "feedback.jsonl", out, on_rank0, annotate, config,
                  out / "responses.jsonl", out / "feedback.jsonl")                    # l.7–11
        run_phase("phase 2, reward model", "reward/metrics.json", out, fit, model, tokenizer,
                  config, out / "feedback.jsonl", out / "reward")                    # l.13–14
        if not lora_parameters(model, "reward"):                # trained in an earlier run
            load_lora(model, "reward", out / "reward/adapter")
    run_phase("phase 3, policy", "result.json", out, train_and_evaluate, model, tokenizer,
              rows, held_out, config, out, critic, advantages)                       # l.16–19


def write_responses(model, tokenizer, rows: list[dict], config: Config, out: Path) -> str:
    """Alg. 1 l.6: π_ref answers the rows that have no response → responses.jsonl."""
    task = get_task(config.task)
    with_response = [row for row in rows if task.all_responses(row)]
    without_response = [row for row in rows if not task.all_responses(row)
                        for _ in range(config.annotated_responses_per_prompt)]
    if without_response:
        with gathered(model):
            batch = sample_rollouts(
                model, tokenizer, without_response, config, config.reference,
                torch.Generator().manual_seed(config.seed))
        with_response += [row | {"response": y}
                          for row, y in zip(without_response, batch.texts)]             # l.6
    if task.tests and config.allow_code_execution:
        from measures.sandbox import add_outcomes
        with_response = gather_rows(add_outcomes(with_response[RANK::WORLD_SIZE], task))
    if RANK == 0:
        write_rows(out / "responses.jsonl", with_response)
    return f"{len(without_response)} responses sampled"


def train_and_evaluate(model, tokenizer, rows, held_out, config: Config, out: Path,
                       critic=reward_model_critic, advantages=add_advantages) -> str:
    """Phase 3 (Alg. 1 l.16–19), with an evaluation before and after → policy/, result.json."""
    before, samples = evaluate(model, tokenizer, held_out, config, config.reference, critic)
    if RANK == 0:
        write_rows(out / "held_out.jsonl", held_out)
        write_rows(out / "before_samples.jsonl", samples)
        print_examples(samples)
    check_critiques(before, samples)
    train(model, tokenizer, rows, config, out, critic, advantages)                      # l.18
    after, samples = evaluate(model, tokenizer, held_out, config, "policy", critic)
    if RANK == 0:
        write_rows(out / "after_samples.jsonl", samples)
        write_rows(out / "result.json", [{"before": before, "after": after}])
    return f"{config.iterations} iterations"


def evaluate(model, tokenizer, rows, config: Config, adapter, critic=reward_model_critic):
    """Sample a response to each held-out row and let the critic judge it.

    Returns (the means of all metrics, the samples).
    """
    generator = torch.Generator().manual_seed(config.seed)  # equal for all adapters
    with gathered(model):
        batch = sample_rollouts(model, tokenizer, rows, config, adapter, generator)
        add_feedback(batch, critic(batch, model, tokenizer, config))
    scores = response_scores(batch, get_task(config.task))
    samples = [{"id": row.get("id"), **sample_row(batch, i), "scores": scores[i]}
               for i, row in enumerate(rows)]
    return mean_scores(scores, batch.feedback), samples


MOST_UNREADABLE = 0.5                     # share of critiques; phase 3 does not start above it


def check_critiques(means: dict, samples: list[dict]):
    """Print what phase 3 will learn from. Raises InputError if most critiques are unreadable.

    means: of the held-out responses before training, see `evaluate`.
    """
    shares = [f"{name} {means[name]:.0%}" for name in
              ("good", "poor", "conflicting", "unmatched", "ambiguous", "unparseable")]
    print_rank0(f"before phase 3, shares of tokens, quotes and critiques: {', '.join(shares)}")
    if means["unparseable"] > MOST_UNREADABLE:
        reasons = [sample["unreadable"] for sample in samples if sample["unreadable"]]
        raise InputError(f"{means['unparseable']:.0%} of the critiques cannot be read (as for: "
                         f"{reasons[0]}); train R_φ again with more rows or --reward_epochs, "
                         f"or a higher --reward_learning_rate or --max_critique_tokens")


# ── Rows and checks, before anything is sampled or paid

def load_rows(config: Config) -> tuple[list[dict], list[dict]]:
    """(training rows, held-out rows) (§4.1). No held-out prompt is trained on or annotated.

    The seed shuffles the rows. Raises InputError where a row does not fit the task.
    """
    task = get_task(config.task)
    if config.data:
        rows = read_rows(config.data, task=task)
        shuffled = random.Random(config.seed).sample(rows, len(rows))
        return split_rows(shuffled, config.eval_rows, config.seed, task.policy_prompt)
    if task.rows is None:
        raise InputError(f"--task {config.task} needs --data rows.jsonl")
    training = task.rows("train", config.annotated_rows, config.seed)
    return training, task.rows("eval", config.eval_rows, 0)


def drop_long_rows(rows: list[dict], model, tokenizer, config) -> list[dict]:
    """Keep rows whose prompt, response and critique fit the context; print how many do not.

    Raises InputError where no row fits.
    """
    instruction = encode_prompt(tokenizer, reward_prompt("", ""))
    room = (context_length(model) - len(instruction) - config.max_new_tokens
            - config.max_critique_tokens)
    limit = min(room, config.max_prompt_tokens or room)
    prompt = get_task(config.task).policy_prompt
    fitting_rows = [row for row in rows if len(encode_prompt(tokenizer, prompt(row))) <= limit]
    too_long = len(rows) - len(fitting_rows)
    problem = f"{too_long} of {len(rows)} prompts have more than {limit} tokens"
    if not fitting_rows:
        raise InputError(f"no prompt is left for training or evaluation ({problem}): add rows "
                         f"with other prompts, lower --max_new_tokens or "
                         f"--max_critique_tokens, or raise --max_prompt_tokens")
    if too_long:
        print_rank0(f"left out: {problem}")
    return fitting_rows


def check_config(config: Config, out: Path):
    """Check ranks and annotator. Raises InputError where they cannot work."""
    unit = math.lcm(WORLD_SIZE, config.responses_per_prompt)
    if config.batch_size % unit or config.minibatch_size % WORLD_SIZE:
        raise InputError(f"ranks share each batch equally: --batch_size must be a multiple of "
                         f"{unit}, and --minibatch_size of {WORLD_SIZE}")
    is_paid = not config.annotator_function
    if config.critic == "annotator" and is_paid and config.max_usd is None:
        raise InputError("--critic annotator asks the server about every rollout: set "
                         "--max_usd with --price_in and --price_out, or --annotator_function")
    has_feedback = config.reward_model or (out / "feedback.jsonl").exists()
    if config.critic == "annotator" or not has_feedback:
        load_annotator(config)
        if get_task(config.task).tests and is_paid and not config.allow_code_execution:
            raise InputError("the annotator needs the outcomes of the tests: "
                             "set --allow_code_execution")


def start_policy(model, config: Config):
    """Create the adapter "policy", or load it and π_ref from --adapter (Alg. 1 l.17)."""
    if config.adapter:
        load_lora(model, "reference", config.adapter)
        load_lora(model, "policy", config.adapter)
    else:
        torch.manual_seed(config.seed)
        add_lora(model, "policy", config.lora_r, config.lora_alpha, 0.0,
                 config.lora_targets.split(","))


# ── The script

CRITICS = {"reward_model": reward_model_critic, "annotator": annotator_critic}


def main(config: Config, critic=None, advantages=add_advantages):
    """Check everything, then run Algorithm 1.

    critic, advantages: see `train`. None is the critic of --critic; experiments/ has others.
    """
    critic = critic or CRITICS[config.critic]
    out = Path(config.output_dir or f"runs/{get_task(config.task).name}")
    config = replace(config, output_dir=str(out))
    check_config(config, out)
    _lock = lock_directory(out)                               # held until the process ends
    parts = load_rows(config)
    model, tokenizer = load_model(config.model, config.dtype, start_ranks(), config.shard,
                                  config.activation_checkpointing)
    rows, held_out = (drop_long_rows(part, model, tokenizer, config) for part in parts)
    config = derive_settings(config, len(rows), model)
    target_layers(model, config.reward_lora_targets.split(","))
    if config.reward_model:
        load_lora(model, "reward", config.reward_model)
    start_policy(model, config)
    check_ranks([vars(config), rows, held_out])
    function = config.annotator_function
    save_settings(config, out, function_files=function and Function(function).source)
    run_phases(model, tokenizer, rows, held_out, config, out, critic, advantages)
    if RANK == 0:
        print_result(out, reward_model_hint(out))
    stop_ranks()


if __name__ == "__main__":
    run_script(lambda: main(parse_flags(Config, __doc__)), "text2grad")
