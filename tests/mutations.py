"""Does the test suite notice faults? One fault at a time is put into a copy of the repository.

    python tests/mutations.py                # all: "killed" (by which test) or "SURVIVED"
    python tests/mutations.py text2grad      # those whose file or description has the word
    python tests/mutations.py --jobs 2

An entry of MUTATIONS replaces one piece of text, which must occur exactly once in its file, and
names the tests that must fail then. The exit status is 1 if a mutation survives, if an entry is
stale, or if its tests cannot be run. It is not a part of the suite and needs about 30 minutes.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import Queue
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
LEFT_OUT = shutil.ignore_patterns(".*", "runs", "__pycache__")     # .git, .venv, caches
TIMEOUT = 300                                                      # seconds for one target
PYTEST = sys.executable, "-m", "pytest", "-x", "-q", "-n0", "-p", "no:cacheprovider"


class Mutation(NamedTuple):
    """A fault: `old` becomes `new` in the file, and a test of the target must fail."""
    file: str
    old: str
    new: str
    target: str                     # arguments of pytest
    description: str

    def __str__(self):
        return f"{self.file}: {self.description}"


ADAPTERS = "tests/test_adapters.py"
ADVANTAGES = "tests/test_advantages.py"
ANNOTATE = "tests/test_annotate.py"
ASK = "tests/test_ask.py"
BASELINES = "tests/test_baselines.py"
BENCHMARKS = "tests/test_benchmarks.py"
EQUATIONS = "tests/test_equations.py"
DAMAGE = "tests/test_damage.py"
EVAL = "tests/test_eval.py"
GPU = "tests/test_gpu.py"
INPUTS = "tests/test_inputs.py"
JUDGES = "tests/test_measures.py"
METRICS = "tests/test_measures.py"
MODEL = "tests/test_model.py"
MODES = "tests/test_modes.py"
PIPELINE = "tests/test_pipeline.py"
REPORT = "tests/test_report.py"
RESTART = "tests/test_restart.py"
REWARD = "tests/test_reward_model.py"
SANDBOX = "tests/test_sandbox.py"
SHARDING = "tests/test_sharding.py"
SPANS = "tests/test_measures.py"
STUDIES = "tests/test_studies.py"
TOY = "tests/test_toy.py"
TRAIN = "tests/test_train.py"

MUTATIONS = [
    # ── text2grad.py
    Mutation("policy.py", "eos = eos_ids(tokenizer, model)", "eos = eos_ids(tokenizer)",
             TRAIN, "EOS ids of the generation config ignored"),
    Mutation("policy.py", "generator = torch.Generator().manual_seed(seed)\n",
             "generator = torch.Generator().manual_seed(config.seed)\n",
             TRAIN, "the same rollout seed in every iteration"),
    Mutation("policy.py", "rng = random.Random(seed)", "rng = random.Random(config.seed)",
             TRAIN, "the same minibatch order in every iteration"),
    Mutation("text2grad.py", "part, config, config.reference, generator)",
             "part, config, None, generator)",
             TRAIN, "phase 1 responses from the bare base despite --adapter"),
    Mutation("text2grad.py", "held_out, config, config.reference, critic)",
             "held_out, config, None, critic)",
             TRAIN, "'before' from the bare base despite --adapter"),
    Mutation("text2grad.py", "manual_seed(config.seed)\n    truths",
             "manual_seed(config.seed + (adapter == 'policy'))\n    truths",
             TRAIN, "'after' sampled with another seed"),
    Mutation("policy.py", 'group["lr"] = rate * decay(config, iteration)',
             'group["lr"] = rate * (decay(config, iteration) if rate == rates[0] else 1)',
             TRAIN, "the value head's learning rate never decays"),
    Mutation("data.py", "if getattr(config, name) is None})", "if not getattr(config, name)})",
             TRAIN, "--learning_rate 0 is replaced by a derived rate"),
    Mutation("policy.py", 'kl.update(metrics["kl"], config.batch_size)',
             'kl.update(metrics["kl"], config.minibatch_size)',
             TRAIN, "adaptive KL counts a minibatch instead of the batch"),
    Mutation("policy.py", "count = rollouts.mask[minibatch].sum()",
             "count = rollouts.mask[minibatch[RANK::WORLD_SIZE]].sum()",
             TRAIN, "token count of one rank instead of the minibatch"),
    Mutation("policy.py", "uniforms=uniforms[list(part)]", "uniforms=uniforms[: len(part)]",
             TRAIN, "uniforms reused in the next decoding chunk"),
    Mutation("text2grad.py", "return training, list(one_per_prompt.values())",
             "return training + evaluation, list(one_per_prompt.values())",
             TRAIN, "training on held-out rows"),
    Mutation("text2grad.py", "task.policy_prompt, least=1)", "str, least=1)",
             TRAIN, "rows split by row instead of by prompt"),
    Mutation("policy.py", "rollouts.delta - beta * kl", "rollouts.delta + beta * kl",
             EQUATIONS, "KL penalty with the wrong sign"),
    Mutation("policy.py", "next_value = values[:, t] * mask[:, t]",
             "next_value = values[:, t]", EQUATIONS, "values of the padding enter GAE"),
    Mutation("policy.py", "td_error + gamma * lam * next_advantage",
             "td_error + lam * next_advantage",
             EQUATIONS, "discount missing in the sum of GAE"),
    Mutation("policy.py", "torch.minimum(ratio * advantages",
             "torch.maximum(ratio * advantages",
             EQUATIONS, "PPO takes the larger of both gains"),
    Mutation("policy.py", "torch.maximum((values - returns) ** 2",
             "torch.minimum((values - returns) ** 2",
             EQUATIONS, "value loss takes the smaller error"),
    Mutation("policy.py", "kl / self.target - 1", "1 - kl / self.target",
             EQUATIONS, "adaptive KL moves away from its target"),
    Mutation("policy.py", "hidden_ref, _ = forward(model, rollouts, index, config.reference)",
             'hidden_ref, _ = forward(model, rollouts, index, "policy")',
             EQUATIONS, "reference log-probs of the policy itself"),
    Mutation("policy.py", "value_head(hidden.detach())", "value_head(hidden)",
             EQUATIONS, "value loss moves the policy"),
    Mutation("policy.py", "loss - config.entropy_coef", "loss + config.entropy_coef",
             EQUATIONS, "entropy bonus lowers the entropy"),
    Mutation("policy.py", "torch.tensor(judgement.delta)",
             "torch.tensor(judgement.delta).roll(1)",
             EQUATIONS, "δ one token too late"),
    Mutation("policy.py", "skipped += 1\n            optimizer.zero_grad()", "skipped += 1",
             EQUATIONS, "gradients add up over the steps"),
    Mutation("policy.py", 'kl.beta = state.get("kl_coef", kl.beta)', "kl.beta = kl.beta",
             "tests/test_restart.py -k two_lines", "KL coefficient lost when a run goes on"),

    # ── reward_model.py
    Mutation("reward_model.py", "eos_ids(tokenizer, model), uniforms=u)",
             "eos_ids(tokenizer), uniforms=u)",
             REWARD, "EOS ids of the generation config ignored"),
    Mutation("reward_model.py", 'with use_lora(model, "reward"):',
             "with use_lora(model, None):", REWARD, "held-out loss of the base, not of R_φ"),
    Mutation("reward_model.py", "/ sum(len(z) for _, z in held_pairs)", "/ len(held_pairs)",
             REWARD, "held-out loss not divided per token"),
    Mutation("reward_model.py", "model.train()", "model.eval()",
             REWARD, "dropout never active"),
    Mutation("reward_model.py", "config.seed * 1_000_003 + step * WORLD_SIZE + RANK",
             "config.seed * 1_000_003 + RANK", REWARD, "one dropout mask for all steps"),
    Mutation("reward_model.py", "weight_decay=config.weight_decay", "weight_decay=0.0",
             REWARD, "weight decay not passed on"),
    Mutation("reward_model.py", "1 - step / len(batches)", "1 - (step + 1) / len(batches)",
             REWARD, "learning rate schedule one step early"),
    Mutation("reward_model.py", "shuffle_batches(pairs, config.batch_size, rng)",
             "shuffle_batches(pairs, config.batch_size, random.Random(config.seed))",
             REWARD, "the same shuffle in every epoch"),
    Mutation("reward_model.py", "uniforms[list(prompt_ids)]", "uniforms[: len(prompt_ids)]",
             REWARD, "uniforms misaligned after an empty response"),
    Mutation("reward_model.py", "return training, evaluation",
             "return training + evaluation, evaluation",
             EQUATIONS, "training on held-out rows"),
    Mutation("reward_model.py", "/ terms * weight", "/ len(batch) * weight",
             EQUATIONS, "batch loss divided by rows instead of tokens"),
    Mutation("reward_model.py", "[0.0] * len(offsets), str(error)",
             "[-1.0] * len(offsets), str(error)",
             EQUATIONS, "unreadable critique punishes every token"),
    Mutation("reward_model.py", "is_marked and is_predicted", "is_predicted",
             SPANS, "every predicted token counts as a hit"),
    Mutation("reward_model.py", '("recall", "marked")', '("recall", "predicted")',
             "tests/test_pipeline.py -k counted_against", "recall divided by predicted tokens"),
    Mutation("reward_model.py", "max_new_tokens: int, temperature=0.0, uniforms=None",
             "max_new_tokens: int, temperature=1.0, uniforms=None",
             REWARD, "critiques sampled instead of greedy"),

    # ── model.py
    Mutation("model.py", "layer.active = active\n            layer.merged = None",
             "layer.active = active", MODEL, "merged weights remain after use_lora"),
    Mutation("model.py", "alpha=layer.scaling[name])", "alpha=1)",
             MODEL, "merged weights without alpha / r"),
    Mutation("model.py", "[name] = alpha / r", "[name] = alpha",
             MODEL, "adapter scaled by alpha instead of alpha / r"),
    Mutation("model.py", "self.dropout[self.active], self.training)",
             "self.dropout[self.active])", MODEL, "dropout active outside of training"),
    Mutation("model.py", "before = lengths - 1 +", "before = lengths +",
             MODEL, "hidden states one token too late"),
    Mutation("model.py", "+ prompts.shape[1] - lengths", "+ 0 * lengths",
             MODEL, "the padding of a prompt is read"),
    Mutation("model.py", "ids += config_ids if isinstance(config_ids, list)",
             "ids += config_ids[:1] if isinstance(config_ids, list)",
             MODEL, "only the first EOS of the generation config"),
    Mutation("model.py", " + [eos_ids(tokenizer)[0]]", "",
             MODEL, "answers to learn from end without EOS"),
    Mutation("model.py", '"lora_alpha": layer.scaling[name] * r',
             '"lora_alpha": layer.scaling[name]', MODEL, "saved adapter with a wrong alpha"),
    Mutation("model.py", 'if metadata.get("base_fingerprint", model_hash) != model_hash:',
             "if False:",
             MODEL, "adapter of another base accepted"),
    Mutation("runtime.py", "if state_path.read_text() != json.dumps(",
             "if False and state_path.read_text() != json.dumps(",
             MODEL, "damaged checkpoint accepted"),
    Mutation("runtime.py", "{*checkpoints(run)} - {path, previous}",
             "{*checkpoints(run)} - {path}",
             "tests/test_restart.py -k flipped", "checkpoint before the newest removed"),

    # ── Adapters, tokenizers and models of other projects
    Mutation("model.py", "option not in FREE_OPTIONS and ", "", ADAPTERS,
             "other projects: options without an effect are refused"),
    Mutation("model.py", "NEUTRAL_VALUES.get(option, OFF)",
             "NEUTRAL_VALUES.get(option, [value])", ADAPTERS,
             "other projects: an unknown option is ignored"),
    Mutation("model.py", '"orthogonal", "mica"]', '"orthogonal", "mica", "olora"]', ADAPTERS,
             "other projects: OLoRA loads on the wrong base"),
    Mutation("model.py", '"orthogonal", "mica"]', '"orthogonal"]', ADAPTERS,
             "other projects: MiCA is refused"),
    Mutation("model.py", '"bias": ["none"]', '"bias": ["none", "lora_only"]', ADAPTERS,
             "other projects: a trained bias is ignored"),
    Mutation("model.py", '{"peft_type": None, **config}', "config", ADAPTERS,
             "other projects: an adapter without a type is LoRA"),
    Mutation("model.py", "OFF = [None, False, [], {}]", "OFF = [None, False]", ADAPTERS,
             "other projects: an empty pattern is refused"),
    Mutation("model.py", "        if shapes != expected.get(path):",
             "        if path not in expected:", ADAPTERS,
             "other projects: half a pair is loaded"),
    Mutation("model.py", "    if not pairs:\n", "    if False:\n", ADAPTERS,
             "other projects: an adapter without tensors is loaded"),
    Mutation("model.py", "max(tokenizer.get_vocab().values())", "tokenizer.vocab_size - 1",
             f"{ADAPTERS} -k embedding", "other projects: added tokens have no embedding"),
    Mutation("model.py", "max(tokenizer.get_vocab().values())", "len(tokenizer) - 1",
             f"{ADAPTERS} -k embedding", "other projects: the largest id has no embedding"),
    Mutation("model.py", 'if turn["role"] != "assistant" and turn', "if turn",
             f"{ADAPTERS} -k template", "other projects: a template may not drop thoughts"),
    Mutation("model.py", 'raise ValueError(f"it leaves', 'str(f"it leaves',
             f"{ADAPTERS} -k template", "other projects: a template drops the post"),
    Mutation("model.py", 'turn["content"].strip()', 'turn["content"]',
             f"{ADAPTERS} -k template", "other projects: a template may not trim a text"),
    Mutation("model.py", "model_max_length=1 << 30,\n"
             "                                              trust_remote_code=False)",
             "model_max_length=1 << 30)", f"{ADAPTERS} -k code_of",
             "other projects: code of a tokenizer runs"),
    Mutation("model.py", "output_loading_info=True,\n        trust_remote_code=False)",
             "output_loading_info=True)", f"{ADAPTERS} -k code_of",
             "other projects: code of a model runs"),
    Mutation("sampling.py", "min(limit, _rope_limit(model) or limit)", "limit",
             f"{ADAPTERS} -k sampled", "other projects: longrope beyond its original context"),
    Mutation("sampling.py", "min(limit, _rope_limit(model) or limit)",
             "_rope_limit(model) or limit", f"{ADAPTERS} -k sampled",
             "other projects: longrope beyond the model's context"),

    # ── sampling.py
    Mutation("sampling.py", "right=True)", "right=False)",
             MODEL, "u = 0 draws a token of probability 0"),
    Mutation("sampling.py", "uniforms * cdf[:, -1:]", "uniforms.double()",
             MODEL, "largest u draws a token of probability 0"),
    Mutation("sampling.py", "else logits.div_(temperature)", "else logits.mul_(temperature)",
             MODEL, "logits multiplied by the temperature"),
    Mutation("sampling.py", "self.positions.add_(1)", "self.positions.add_(0)",
             MODEL, "all new tokens at one position"),
    Mutation("sampling.py", "keys > queries, -torch.inf", "keys > queries + 1, -torch.inf",
             MODEL, "prompt tokens see the next one"),
    Mutation("sampling.py", "uniforms[decoder.rows, t : t + 1]", "uniforms[decoder.rows, :1]",
             MODEL, "one uniform for all tokens of a row"),
    Mutation("sampling.py", "torch.isin(decoder.ids[:, 0], ends)",
             "torch.isin(decoder.ids[:, 0], ends[:1])",
             MODEL, "only the first EOS ends an answer"),
    Mutation("sampling.py", "- mean_weight) / temperature", "- mean_weight)",
             MODEL, "gradient of log-probs without the temperature"),
    Mutation("sampling.py", "(dtype) / temperature).log_softmax", "(dtype)).log_softmax",
             MODEL, "entropy without the temperature"),
    Mutation("sampling.py", "prompts = [[0] * (P - len(x)) + x for",
             "prompts = [x + [0] * (P - len(x)) for",
             MODEL, "prompts padded on the wrong side"),

    # ── the first GPU
    Mutation("model.py", "enable_cudnn_sdp(False)", "enable_cudnn_sdp(True)",
             GPU, "gpu: cuDNN's attention stays on"),
    Mutation("model.py", 'str(dtype).endswith("bfloat16")', 'str(dtype) == "torch.bfloat16"',
             GPU, "gpu: no bfloat16 is noticed late"),
    Mutation("model.py", "if not to_shard:", "if True:",
             SHARDING, "gpu: --shard moves the whole model first"),
    Mutation("model.py", "        model.base_model.layers = nn.ModuleList()",
             "        pass", SHARDING, "gpu: --shard reads the whole model first"),
    Mutation("model.py", ", to_shard=config.shard)", ")",
             SHARDING, "gpu: --shard loads to the GPU"),
    Mutation("sampling.py", "                step = None       #", "                #",
             GPU, "gpu: two graphs at once"),
    Mutation("sampling.py", "@cache\n", "", GPU, "gpu: a stream for every capture"),
    Mutation("sampling.py", "raise cause or error", "raise",
             GPU, "gpu: out of memory in a capture has no remedy"),
    Mutation("sampling.py", '"dynamic" | "longrope"', '"dynamic"',
             GPU, "gpu: longrope is captured"),
    Mutation("sampling.py", "rope, *rope.values():", "[rope]:",
             GPU, "gpu: RoPE by layer type is captured"),
    Mutation("reward_model.py", "math.isfinite(mean_loss) and math.isfinite(norm)",
             "math.isfinite(mean_loss)", REWARD, "a step with an infinite gradient is taken"),
    Mutation("reward_model.py", "if skipped == len(losses):", "if False:",
             REWARD, "a fit without a finite step succeeds"),

    Mutation("text2grad.py", "rollouts, [*index], None)", 'rollouts, [*index], "policy")',
             TRAIN, "perplexity under the policy"),
    Mutation("text2grad.py", "is_text = ~torch.isin(targets, eos)", "is_text = targets >= 0",
             TRAIN, "the EOS counts in the perplexity"),

    # ── annotate.py
    Mutation("annotate.py", "                ambiguous += 1\n                continue\n",
             "                places = places[:repeats]\n",
             ANNOTATE, "ambiguous quotes get the first place"),
    Mutation("annotate.py", "label if k < repeats else -1", "label",
             ANNOTATE, "repeated praise is praise where a task calls it poor"),
    Mutation("reward_model.py", "if task.repeats_are_poor:", "if False:",
             BASELINES, "the annotator reads repeated praise unlike R_φ"),
    Mutation("experiments/designs.py", "if repeats_are_poor:", "if False:",
             BASELINES, "the true critic reads repeated praise unlike R_φ"),
    Mutation("annotate.py", "(-1, feedback.poor_spans)", "(+1, feedback.poor_spans)",
             ANNOTATE, "poor spans are good"),
    Mutation("annotate.py", "(repeats - len(places))", "(len(places) < repeats)",
             ANNOTATE, "repeats without a place count once"),
    Mutation("annotate.py", "                       if span.start <= start < end <= span.end})",
             "                       if span.start <= start < span.end})",
             ANNOTATE, "token half inside a span is rewarded"),
    Mutation("annotate.py", "start += piece.index(word)", "start += 0",
             ANNOTATE, "space before a word counts as a part of it"),
    Mutation("annotate.py", "piece.strip() or piece", "piece.strip()",
             ANNOTATE, "white space in a span has no reward"),
    Mutation("annotate.py", "len(labels) > 1", "len(labels) > 2",
             ANNOTATE, "no token is in conflict"),
    Mutation("annotate.py", "for edge in match.span(1))]", "for edge in match.span(1)[:1])]",
             ANNOTATE, "quote may end inside a word"),
    Mutation("annotate.py", "for as_pattern in (re.escape, _loose):",
             "for as_pattern in (_loose,):",
             ANNOTATE, "a similar match is as good as an exact one"),
    Mutation("annotate.py", 'r"[^\\s\\b]", quote', 'r"[^\\s]", quote',
             ANNOTATE, "a control character has places"),
    Mutation("annotate.py", "if value in [copy for", "if value in [] and [copy for",
             ANNOTATE, "JSON of the response read as feedback"),
    Mutation("annotate.py", 'text.rpartition("</think>")[2]', "text",
             ANNOTATE, "a draft in <think> is a second reply"),
    Mutation("annotate.py", "    if extra:\n", "    if False:\n",
             ANNOTATE, "a part of a broken reply is read"),
    Mutation("annotate.py", "json.dumps(inner, ensure_ascii=False).encode() ", "pass ",
             ANNOTATE, "half of a surrogate pair is read"),
    Mutation("annotate.py", "(ValueError, RecursionError)", "ValueError",
             ANNOTATE, "deep nesting ends the run"),
    Mutation("annotate.py", "if value.setdefault(key, item) != item:", "if False:",
             ANNOTATE, "a key with two values is read"),
    Mutation("annotate.py", "if piece and end == whole", "if end == whole",
             ANNOTATE, "a token without text loses the space after it"),
    Mutation("annotate.py", "end = whole + 1 if piece.endswith(MARK) else whole", "end = whole",
             ANNOTATE, "the first bytes of a character have no interval"),
    Mutation("annotate.py", "run_start + len(piece.rstrip(MARK))", "run_start + len(piece)",
             ANNOTATE, "an incomplete character counts as a whole one"),
    Mutation("annotate.py", "critique or read_critique(value, prose)",
             "read_critique(value, prose)",
             MODES, "critique that a person wrote is not kept"),
    Mutation("annotate.py", "checksum(state=parts)[:12]", "checksum(state=parts)[:0]",
             MODES, "a text can close its fence"),
    Mutation("annotate.py", "span.end <= len(example[\"response\"])", "span.end",
             MODES, "a mode may return spans outside of the response"),
    Mutation("annotate.py", "    if missing:\n", "    if False:\n",
             MODES, "rows without a critique or an outcome are paid for"),
    Mutation("annotate.py", "if not places and quote in row", "if False and quote in row",
             ASK, "a quote that is cut inside a word is called unmatched"),
    Mutation("annotate.py", "if not isinstance(value, str):", "if False:",
             ASK, "a function may return anything"),
    Mutation("annotate.py", "os.path.realpath(data) == os.path.realpath(output)", "False",
             ASK, "the output replaces the data"),
    # ── What is asked, paid and written
    Mutation("ask.py", 'self.spent += self.usd(row["usage"])', "self.spent += 0.0",
             ASK, "requests cost nothing"),
    Mutation("ask.py", "reply.usage or self.largest(question)", "reply.usage or FREE",
             ASK, "replies without a report cost nothing"),
    Mutation("ask.py", "question.max_tokens * self.ratio", "question.max_tokens",
             ASK, "the budget forgets what the server reported"),
    Mutation("ask.py", 'max(self.ratio, row.get("ratio", 1))', "1",
             ASK, "no report is remembered"),
    Mutation("ask.py", "[waiting[0], *running.values()]", "[waiting[0]]",
             ASK, "the budget forgets the open requests"),
    Mutation("ask.py", "self.max_usd is None or", "not self.max_usd or",
             ASK, "a budget of 0 is none"),
    Mutation("ask.py", 'if "reply" in row:', "if True:",
             ASK, "journals of the fourth version end in a traceback"),
    Mutation("ask.py", 'if self.path.read_bytes()[-1:] not in b"\\n":', "if False:",
             ASK, "next reply glued to a torn journal line"),
    Mutation("ask.py", "        except InputError:\n            raise\n", "",
             ASK, "a fault of a reader is a reason to buy replies again"),
    Mutation("ask.py", 'or "refused"', "", ASK, "an error without a text is a good reply"),
    Mutation("ask.py", "hide_key(answer.text)", "answer.text",
             ASK, "a key in a reply is written to the journal"),
    Mutation("ask.py", "key=lambda question: question.key in old_keys)",
             "key=lambda question: 0)", ASK, "a first row that is refused ends every run"),
    Mutation("ask.py", "(concurrency if has_answered else 1)", "concurrency",
             ASK, "the first request does not go alone"),
    Mutation("ask.py", "reply.status >= 429", "reply.status >= 400",
             ASK, "a wrong key is tried seven times"),
    Mutation("ask.py", "or not has_answered\n", "\n",
             ASK, "a server that is gone is asked about each old row"),
    Mutation("ask.py", "if reason else 0\n", "if reason else failures\n",
             ASK, "a good reply does not start the count of failures again"),
    Mutation("ask.py", "            raise InterruptedError  ", "            pass  ",
             ASK, "a request is sent after Ctrl-C"),
    Mutation("ask.py", "            while running:\n                list(arrived())\n", "",
             ASK, "replies that arrive after an error are lost"),
    Mutation("ask.py", 'body["max_completion_tokens"] = question.max_tokens', "pass",
             ASK, "a reply without a limit is requested"),
    Mutation("ask.py", 'if "json_schema" in self.refused:', "if False:",
             ASK, "a server without schemas is not asked for an object"),
    Mutation("ask.py", 'FREE if "ConnectError" in reason else None', "None",
             ASK, "a request that was never sent is booked"),
    Mutation("ask.py", "is_free = 400 <= status < 500", "is_free = 400 <= status",
             ASK, "a failure of the server is free"),
    Mutation("ask.py", "usage or (FREE if is_free else None)", "FREE if is_free else None",
             ASK, "an error that reports its usage is free"),
    Mutation("ask.py", 'is_free = re.match(r"\\s*<", text)', "is_free = False",
             ASK, "an HTML page is booked"),
    Mutation("ask.py", "(length|max|limit|error)", "(length|error)",
             ASK, "MAX_TOKENS is a whole reply"),
    Mutation("ask.py", "max(completion, total - prompt)", "completion",
             ASK, "reasoning outside of completion_tokens is not booked"),
    Mutation("ask.py", "< 1e9:", "< 1e99:", ASK, "absurd token counts are booked"),
    Mutation("annotate.py", "parts = [task.name, config.annotator, messages]",
             "parts = [task.name, messages]", ASK, "replies of another annotator reused"),
    Mutation("annotate.py", ", function_hash(config.annotator_function)]", "]",
             ASK, "replies of a critic before it was edited are reused"),
    Mutation("data.py", "if not (run / file).is_file() or checksum(run / file) != digest]",
             "if False]", DAMAGE, "files of a phase are used after a bit has flipped"),
    Mutation("runtime.py", "changed = changed_files(directory, result)", "changed = []",
             RESTART, "a missing policy is not noticed"),
    Mutation("runtime.py", "expected not in (None, checksum(file))", "False",
             "tests/test_files.py -k log", "changed lines of a log are kept"),
    Mutation("runtime.py", "if len(rows) < done or", "if",
             "tests/test_restart.py -k lost", "a lost log of the third version is not named"),
    Mutation("runtime.py", "if len(set(gather_rows([checksum(state=state)]))) > 1:",
             "if False:",
             "tests/test_files.py -k ranks", "ranks with other rows train together"),
    Mutation("runtime.py", 'WORLD_SIZE == 1 or "MASTER_ADDR" in os.environ', "True",
             "tests/test_files.py -k torchrun", "ranks without torchrun wait for others"),
    Mutation("runtime.py", "        self.start = end\n", "", "tests/test_files.py -k lap",
             "a lap counts from the start of the iteration"),
    Mutation("runtime.py", 'sys.platform == "darwin" else 1024',
             'sys.platform == "darwin" else 1',
             "tests/test_files.py -k linux", "peak memory in the wrong unit"),
    Mutation("model.py", "for weight in (embeddings, head_weight(model))]",
             "for weight in (embeddings,)]", "tests/test_files.py -k head",
             "the fingerprint ignores the head"),
    Mutation("data.py", "path = Path(path).resolve()", "path = Path(path)",
             "tests/test_files.py -k link", "a link is replaced by a file"),
    Mutation("data.py", "if path.exists() and not path.is_file():", "if False:",
             "tests/test_files.py -k regular", "a device is replaced by a file"),
    Mutation("model.py", "split_special_tokens=True", "split_special_tokens=False",
             f"{ANNOTATE} -k typed", "typed special tokens are control tokens in answers"),
    Mutation("model.py", "ids += encode_text(tokenizer, turn[\"content\"])",
             "ids += tokenizer(turn[\"content\"], add_special_tokens=False).input_ids",
             f"{ANNOTATE} -k typed", "typed special tokens are control tokens in prompts"),
    Mutation("text2grad.py", "gather_rows([judgements])[0][RANK::WORLD_SIZE]",
             "gather_rows([judgements])[0]",
             "tests/test_critic.py", "every rank gets all judgements of the annotator"),
    Mutation("reward_model.py", "if task.repeats_are_poor:\n                grounding",
             "if False:\n                grounding",
             "tests/test_critic.py -k direct", "the annotator praises repeats"),
    Mutation("measures/judge.py", r"(?<![\w)\]])", "", "tests/test_measures.py",
             "code in double brackets is a verdict"),
    Mutation("runtime.py", "shutil.rmtree(new, ignore_errors=True)           # from", "#",
             RESTART, "a directory of a killed writer is not replaced"),
    Mutation("data.py", "expected and not is_valid", "False", INPUTS,
             "a string of good_spans is read as letters"),
    Mutation("data.py", "                raise TypeError(\"the prompt is not",
             "                print(\"the prompt is not", INPUTS,
             "a prompt of another type is paid for"),
    Mutation("model.py", "    if missing:\n        raise ModelError(f\"{path}: {len",
             "    if False:\n        raise ModelError(f\"{path}: {len", MODEL,
             "a base with random weights is trained"),
    Mutation("model.py", "hash_path.read_bytes() != _adapter_hash(config, path)", "False",
             MODEL, "a damaged adapter is loaded"),
    Mutation("data.py", "elif type(value) is str and re.search(", "elif False and (",
             "tests/test_pipeline.py -k empty", "an empty --output_dir is accepted"),

    # ── Settings of an own task
    Mutation("text2grad.py", "if unreadable > MOST_UNREADABLE:", "if False:", PIPELINE,
             "phase 3 trains on critiques that nobody can read"),
    Mutation("policy.py", "passes * count // config.batch_size", "count // 8", TRAIN,
             "the number of iterations ignores the batch"),
    Mutation("model.py", "** (1 / 3)", "** (1 / 2)", TRAIN,
             "the learning rate falls with the square root of the size"),
    Mutation("data.py", 'check_values(config_class, settings, f"--task', 'str(f"--task', TRAIN,
             "settings of a task are not checked"),

    # ── data.py and report.py
    Mutation("data.py", "if all(row.get(name) in (None", "if any(row.get(name) in (None",
             ANNOTATE, "every alternative field is required"),
    Mutation("data.py", "if response is None else", "if True else",
             ANNOTATE, "the response of the row itself is ignored"),
    Mutation("data.py", "\\n\\nResponse: {response}", "",
             REWARD, "the reward model does not see the response"),
    Mutation("data.py", "in (int, float) and not least <= value <= most:",
             "in (int, float) and not value <= most:",
             ASK, "lower bound of a flag not checked"),
    Mutation("report.py", '(old - reference).sum() / count', "(old - reference).mean()",
             REPORT, "KL per token instead of per response"),
    Mutation("report.py", "_COLOURS[value < 0]", "_COLOURS[value > 0]",
             REPORT, "good and poor colours swapped"),
    Mutation("report.py", "sum(judgement.unmatched for judgement in judgements) / quotes",
             "sum(judgement.unmatched for judgement in judgements) / count",
             REPORT, "unmatched quotes per response, not per quote"),
    Mutation("report.py", "1 - unexplained / variance", "unexplained / variance",
             REPORT, "explained variance is the unexplained one"),

    # ── eval.py
    Mutation("eval.py", "question_key(self.config.seed, conversation)",
             "question_key(self.config.seed + (self.name == 'after'), conversation)",
             EVAL, "'after' sampled with another seed"),
    Mutation("eval.py", "with use_lora(model, self.lora, merge=True):",
             "with use_lora(model, None, merge=True):",
             EVAL, "answers of the bare base instead of the adapter"),
    Mutation("eval.py", "digest = checksum(*lora, state=[", "digest = checksum(state=[",
             EVAL, "answers of another adapter reused"),
    Mutation("measures/metrics.py", "else new - old", "else old - new",
             EVAL, "difference with the wrong sign"),
    Mutation("measures/metrics.py", "if None not in row]", "if True]",
             EVAL, "rows without a verdict are compared"),
    Mutation("eval.py", "rows = held_rows or rows", "rows = rows",
             EVAL, "R_φ judged on rows of its training"),

    # ── measures
    Mutation("measures/metrics.py", "draws = rng.integers(",
             "draws = np.random.default_rng(0).integers(",
             METRICS, "bootstrap with the same draws in every chunk"),
    Mutation("measures/metrics.py", "score = np.exp(brevity +", "score = np.exp(0 * brevity +",
             METRICS, "BLEU without the brevity penalty"),
    Mutation("measures/metrics.py", "(total, total - 2, total)", "(total, total, total)",
             METRICS, "ROUGE-2 divided by words instead of pairs"),
    Mutation("measures/metrics.py", "if figure is not share or value not in (0, 1):",
             "if True:", METRICS, "interval of width 0 for a share of 1"),
    Mutation("measures/metrics.py", "zip(indices, logprobs.split", "zip(order, logprobs.split",
             BENCHMARKS, "log-probs given to other rows"),
    Mutation("measures/spans.py", "shared / max(lengths)", "shared / min(lengths)",
             SPANS, "overlap relative to the shorter span"),
    Mutation("measures/judge.py", "win != 1 - loss", "win != loss",
             JUDGES, "consistent verdicts count as ties"),
    Mutation("measures/benchmarks.py", "if base.passed and problem.plus:", "if problem.plus:",
             BENCHMARKS, "+ tests count without the base tests"),
    Mutation("measures/benchmarks.py", "atol = atol or 1e-6", "atol = atol or 0",
             BENCHMARKS, "floats without the tolerance of evalplus"),
    Mutation("measures/sandbox.py", ' or row.get("outcome"):', ":",
             f"{SANDBOX} -k rows_keep",
             "outcome of a row overwritten"),
    Mutation("measures/sandbox.py", 'could not be run" if result.status == "not run"',
             'could not be run" if result.status == ""',
             f"{SANDBOX} -k rows_keep",
             "sandbox: tests that could not be run did not pass"),
    Mutation("measures/sandbox.py", "_, _, claim = reply.partition(secret)",
             'claim = reply.replace(secret, "").removeprefix("ready")',
             f"{SANDBOX} -k verdict",
             "sandbox: a program writes its own verdict"),
    Mutation("measures/cell.py", "NEEDS_PYTEST.search(text) or", "",
             f"{SANDBOX} -k need_pytest",
             "sandbox: marks and fixtures are ignored"),
    Mutation("measures/cell.py", " or not CHECKS.search(text)", "",
             f"{SANDBOX} -k verdict",
             "sandbox: tests that test nothing pass"),
    Mutation("measures/cell.py", 'sys.modules["pytest"] = type(sys)("pytest")', "pass",
             f"{SANDBOX} -k without_a_use",
             "sandbox: all tests need an installed pytest"),
    Mutation("measures/cell.py", 'status = "error" if trace else "not run"', 'status = "error"',
             f"{SANDBOX} -k need_pytest", "sandbox: a missing fixture is the program's error"),
    Mutation("measures/cell.py", "if os.getpid() == process:", "if True:",
             f"{SANDBOX} -k verdict",
             "sandbox: a fork has a verdict"),
    Mutation("measures/cell.py", "ctypes.CDLL(None).syscall(keyctl, 1, None)", "pass",
             f"{SANDBOX} -k keys",
             "sandbox: a program uses the caller's keys"),
    Mutation("measures/sandbox.sh", "remount,bind,ro,", "remount,bind,",
             f"{SANDBOX} -k system",
             "sandbox: the system is not read-only"),
    Mutation("measures/sandbox.sh", "unshare --net ", "unshare ",
             f"{SANDBOX} -k loopback",
             "sandbox: the program has a network"),
    Mutation("measures/sandbox.sh", "echo 1000", "echo 0",
             f"{SANDBOX} -k caller",
             "sandbox: Linux may end other processes first"),
    Mutation("measures/sandbox.sh", "exec setpriv --pdeathsig KILL unshare", "exec unshare",
             f"{SANDBOX} -k caller", "sandbox: a run outlives its caller"),
    Mutation("measures/sandbox.sh", 'sh "$0" inside "$user"', 'sh "$0" inside ""',
             f"{SANDBOX} -k shadow",
             "sandbox: a program runs as root"),
    Mutation("toy/__init__.py", "slot in CONFUSED and rng.random() < 0.6",
             "slot in CONFUSED and rng.random() < 0.4",
             TOY, "base learns more truth than errors"),
    Mutation("toy/__init__.py", "judgements.setdefault(phrase, judgement)",
             "judgements.setdefault(slot, judgement)", TOY,
             "only the first phrase of a slot is judged"),
    Mutation("experiments/advantages.py", "/ (K - 1)", "/ K", ADVANTAGES,
             "the mean of the others divides by the size of the group"),
    Mutation("experiments/advantages.py", "A * lengths.mean() / lengths", "A", ADVANTAGES,
             "GRPO without its weight by length"),
    Mutation("experiments/advantages.py", "(totals - means)", "totals", ADVANTAGES,
             "the mean of the position is not subtracted"),
    Mutation("experiments/advantages.py", "config.gamma * config.lam", "config.gamma",
             ADVANTAGES, "no decay by λ"),
    Mutation("experiments/advantages.py", "(R == R[:, :1]).all(1).sum()",
             "(R == R[:, :1]).any(1).sum()", ADVANTAGES, "every group counts as equal"),
    Mutation("policy.py", "return [row for row in drawn for _ in "
             "range(config.responses_per_prompt)]", "return drawn", ADVANTAGES,
             "one response per prompt in groups"),
    Mutation("reward_model.py", "200 * config.batch_size", "60 * config.batch_size", TRAIN,
             "R_φ of an own task takes too few steps"),
    Mutation("policy.py", "error * min(1, n / self.horizon)", "error * n / self.horizon",
             EQUATIONS, "a batch larger than the horizon moves β further"),
    Mutation("policy.py", "config.iterations * config.batch_size // 10", "10_000", TRAIN,
             "the horizon of β is not derived from the run"),
    Mutation("experiments/baselines.py", '"Summary A": "AB", "Summary B": "BA"',
             '"Summary A": "BA", "Summary B": "AB"',
             BASELINES, "SLF5K's preferences are reversed"),
    Mutation("toy/__init__.py", '"eval": range(15, 16)', '"eval": range(14, 16)',
             TOY, "training and held-out posts share facts"),
    Mutation("toy/__init__.py", "phrases.get(slot) == [fact]",
             "phrases.get(slot, [])[:1] == [fact]",
             TOY, "a fact that is contradicted counts"),
    Mutation("experiments/baselines.py", "(policy_rejected - ref_rejected)", "policy_rejected",
             BASELINES, "DPO without the reference of the rejected"),
    Mutation("experiments/designs.py", "[sum(judgement.delta)]",
             "judgement.delta[-1:]", BASELINES, "reward at the end is the last δ only"),
    Mutation("experiments/designs.py", " or not scores.isfinite().all()", "",
             f"{BASELINES} -k scores", "NaN is a score"),
    Mutation("annotate.py", "value = json.dumps(value, default=asdict)",
             "value = json.dumps(value)", f"{ASK} -k asked_with",
             "a function cannot return a Feedback"),
    Mutation("sample.py", "do_sample=False", "do_sample=True",
             "tests/test_sample.py -k pipeline", "the merged model samples by default"),
    Mutation("experiments/designs.py", "1.0, torch.cat(uniforms))", "0.0, torch.cat(uniforms))",
             BASELINES, "graded critiques are all greedy"),
    Mutation("experiments/designs.py", "response_hidden(model, *batch)[:, 1:]",
             "response_hidden(model, *batch)[:, :-1]", BASELINES, "scores before each token"),
    Mutation("experiments/modes.py", "if place[0] >= position]", "if True]",
             MODES, "steps may be out of order"),
    Mutation("experiments/studies.py", "np.std(values, 0, ddof=1)", "np.std(values, 0)",
             STUDIES, "intervals over seeds too narrow"),
    Mutation("experiments/studies.py", "max(sorted(accuracies), key=accuracies.get)",
             "max(accuracies)", f"{STUDIES} -k rate", "tuning takes the largest rate"),
    Mutation("experiments/studies.toml", '"PPO" = {tuned_rate = 3e-3',
             '"PPO" = {tuned_rate = 1e-3',
             f"{STUDIES} -k rate", "a rate that tuning did not find"),
    Mutation("experiments/designs.py", 'last - judgement.critique.count(" is missing.")',
             "last", f"{BASELINES} -k omi", "omissions cost nothing"),
    Mutation("experiments/advantages.py", "mask.sum(1, keepdim=True, dtype=torch.float32)",
             "mask.sum(1, keepdim=True)", ADVANTAGES, "GRPO fails on integer masks"),
    Mutation("policy.py", "round_up(64 if count >= 1000 else 16, unit)",
             "64 if count >= 1000 else 16", f"{TRAIN} -k derived",
             "a derived batch cuts groups"),
    Mutation("reward_model.py", "given - CHANGEABLE, out", "set(), out",
             f"{PIPELINE} -k script_reports", "another R_φ overwrites a finished one"),
]


def run_tests(copy: Path, target: str) -> tuple[str, str]:
    """("passed", ""), ("failed", the failed test or "timeout"), or ("error", why)."""
    # No .pyc: of a file that changes twice in a second, an old one may be taken for the new.
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    process = subprocess.Popen([*PYTEST, *shlex.split(target)], cwd=copy, env=environment,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                               errors="replace", start_new_session=True)
    try:
        output, _ = process.communicate(timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        return "failed", "timeout"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    failed_test = re.search(r"^(?:FAILED|ERROR) tests/(\S+::.+?)(?: - |$)", output, re.M)
    if process.returncode == 0:
        return "passed", ""
    if process.returncode == 1 and failed_test:
        return "failed", failed_test[1]
    last_line = (output.strip() or "no output").splitlines()[-1]
    return "error", f"exit status {process.returncode}: {last_line}"


def try_mutation(copy: Path, mutation: Mutation) -> tuple[str, str]:
    """("killed", by which test), ("SURVIVED", "") or ("ERROR", why)."""
    path = copy / mutation.file
    source = path.read_text("utf-8")
    occurrences = source.count(mutation.old)
    if occurrences != 1:
        return "ERROR", f"stale entry: its old text occurs {occurrences} times"
    path.write_text(source.replace(mutation.old, mutation.new), "utf-8")
    try:
        result, reason = run_tests(copy, mutation.target)
    finally:
        path.write_text(source, "utf-8")
    return {"passed": "SURVIVED", "failed": "killed", "error": "ERROR"}[result], reason


def copy_repository(folder: Path) -> Path:
    """A copy in the folder, with ../shared beside it where there is one."""
    shutil.copytree(ROOT, folder / "copy", ignore=LEFT_OUT)
    shared = ROOT.parent / "shared"
    if shared.is_dir():
        (folder / "shared").symlink_to(shared)
    return folder / "copy"


def run_all(mutations: list[Mutation], folder: Path, jobs: int) -> dict[str, int]:
    """Print a line for each mutation; how many were killed, survived or could not be tried."""
    copies = Queue()
    for job in range(jobs):
        copies.put(copy_repository(folder / str(job)))

    def in_a_copy(work, argument):
        copy = copies.get()
        try:
            return work(copy, argument)
        finally:
            copies.put(copy)

    def attempt(mutation: Mutation) -> tuple[str, str]:
        if mutation.target in red_targets:
            return "ERROR", f"{mutation.target} fails without it"
        return in_a_copy(try_mutation, mutation)

    counts = {"killed": 0, "SURVIVED": 0, "ERROR": 0}
    targets = list(dict.fromkeys(mutation.target for mutation in mutations))
    red_targets = set()
    pool = ThreadPoolExecutor(jobs)
    try:
        baseline = pool.map(lambda target: in_a_copy(run_tests, target), targets)
        for target, (result, reason) in zip(targets, baseline):
            if result != "passed":
                red_targets.add(target)
                print(f"RED      {target} without a mutation: {reason}", flush=True)
        for mutation, (result, reason) in zip(mutations, pool.map(attempt, mutations)):
            counts[result] += 1
            print(f"{result:8} {mutation}{reason and f' ({reason})'}", flush=True)
    finally:
        pool.shutdown(cancel_futures=True)
    return counts


def main():
    """Try the mutations that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("word", nargs="?", default="", help="of a file or a description")
    parser.add_argument("--jobs", type=int, default=1, help="copies that are tested at once")
    arguments = parser.parse_args()
    mutations = [mutation for mutation in MUTATIONS if arguments.word in str(mutation)]
    if not mutations:
        sys.exit(f"no mutation has {arguments.word!r} in its file or its description")
    with tempfile.TemporaryDirectory() as folder:
        counts = run_all(mutations, Path(folder), arguments.jobs)
    errors = f", {counts['ERROR']} could not be tried" if counts["ERROR"] else ""
    print(f"{counts['killed']} killed, {counts['SURVIVED']} survived{errors}")
    sys.exit(counts["killed"] < len(mutations))


if __name__ == "__main__":
    main()
