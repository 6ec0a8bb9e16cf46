"""Answer one prompt with the base and the policy, or merge the policy's adapter for serving.

    python sample.py                                   # the adapter of runs/toy/policy
    python sample.py --adapter runs/slf5k/policy --prompt "Summarise …" \\
           --reward_model runs/slf5k/reward/adapter
    python sample.py --adapter runs/slf5k/policy --merge merged

The script prints the greedy answer of the base, and then that of the policy. With
--reward_model, R_φ's critique follows each answer; good tokens are green, poor tokens red. The
prompt is x, the whole text that `Task.policy_prompt` returns. Without --prompt, type or paste
the prompt, then press Ctrl-D. It may have several lines.

--merge writes the merged weights in float32, the tokenizer with its chat template, and greedy
decoding as the default. The pipeline of transformers then answers as this script does:

    answer = pipeline("text-generation", "merged")
    answer([{"role": "user", "content": x}])[0]["generated_text"][-1]["content"]

Pass chat messages, as here: the pipeline does not apply the template to a plain text. If the
base has no chat template, such as toy/base, PLAIN_TEMPLATE of model.py is written.
`encode_prompt` uses the same template for such a base in all phases. vLLM should be able to
read the directory, but this is untested.

Paper: Figure 4 shows such answers, each with its critique.
"""

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from transformers import GenerationConfig

from annotate import read_critique, token_offsets
from data import run_script
from model import (PLAIN_TEMPLATE, encode_prompt, eos_ids, load_lora, load_model, merge_lora,
                   use_lora)
from report import colour_tokens, split_text
from reward_model import write_critiques
from sampling import generate
from settings import flag, parse_flags


@dataclass
class SampleConfig:
    """Settings of sample.py."""
    adapter: str = flag("runs/toy/policy", "adapter of the policy")
    model: str | None = flag(None, "base model; None: that of the adapter")
    reward_model: str | None = flag(None, "adapter of R_φ; None: no critiques")
    prompt: str | None = flag(None, "prompt x; None: read from terminal")
    max_new_tokens: int = flag(256, "tokens of an answer or a critique", least=1)
    merge: str | None = flag(None, "new directory for the merged model")


def write_merged(model, tokenizer, directory):
    """Write a checkpoint with W + (alpha / r) B A, [out, in], in place of each adapted W.

    Raises FileExistsError if the directory exists.
    """
    os.mkdir(directory)
    merge_lora(model, "policy")
    tokenizer.chat_template = tokenizer.chat_template or PLAIN_TEMPLATE
    model.generation_config = GenerationConfig(do_sample=False,
                                               eos_token_id=eos_ids(tokenizer, model))
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    print(f"{directory}/ holds the merged model")


def main():
    """Print the answers of the base and the policy, with critiques, or write a merged model."""
    config = parse_flags(SampleConfig, __doc__)
    path = Path(config.adapter, "adapter_config.json")
    base = config.model or json.loads(path.read_text("utf-8"))["base_model_name_or_path"]
    model, tokenizer = load_model(base, "float32" if config.merge else None)
    load_lora(model, "policy", config.adapter)
    if config.merge:
        return write_merged(model, tokenizer, config.merge)
    if config.reward_model:
        load_lora(model, "reward", config.reward_model)
    prompt = config.prompt or sys.stdin.read().strip()
    for adapter in None, "policy":
        with use_lora(model, adapter):
            ids, = generate(model, [encode_prompt(tokenizer, prompt)], config.max_new_tokens, 0,
                            eos_ids(tokenizer, model))
        text, offsets = token_offsets(tokenizer, ids)
        print(f"\n{adapter or 'base'}: {text}")
        if config.reward_model:
            z, = write_critiques(model, tokenizer, [prompt], [text], config.max_new_tokens)
            review = read_critique(z, text, offsets)
            print(f"R_φ: {colour_tokens(split_text(text, offsets), review.delta)}\n"
                  f"{z}\n{review.reason}")


if __name__ == "__main__":
    run_script(main, "sample")
