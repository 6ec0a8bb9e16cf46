#!/usr/bin/env bash
# One NVIDIA GPU, ten minutes, only requirements.txt: what no machine of ours could measure.
#
#   tests/gpu.sh [FOLDER]          then send FOLDER.tar.gz; a second run needs another FOLDER
#   TINY=1 tests/gpu.sh [FOLDER]   the same walk, toy-sized, on a CPU
#
# It runs the CUDA tests, the CUDA rows of bench.py, the default run, a random 1B through all
# three phases and a random 8B (on cards under 40 GB the 1B) through two iterations, with the
# decode step captured as a CUDA graph and launched one by one. The rule: the captured step
# stays in sampling.py only where it is 1.5 times as fast. Several GPUs (NCCL) are not used
# here, and never were.
set -u
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python}
out=$(realpath -m "${1:-gpu-$(date -u +%Y%m%d-%H%M)}")
mkdir "$out" || exit 1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

step() {   # name, seconds it may take, command; what it says goes to a file
    local name=$1 limit=$(($2 * patience)) start=$SECONDS status
    local left=$((600 * patience - SECONDS))
    shift 2
    timeout $((limit < left ? limit : left)) "$@" > "$out/$name.txt" 2>&1
    status=$?
    printf '%-10s %4d s  %s\n' "$name" $((SECONDS - start)) \
        "$([ $status = 0 ] && echo done || echo "ended with $status; see $name.txt")" |
        tee -a "$out/summary.txt"
}

facts() {
    date -u
    git log -1 --format='commit %H of %cs' 2>/dev/null
    git status --short 2>/dev/null
    uname -srm
    lscpu | grep -E 'Model name|^CPU\(s\)'
    nvidia-smi
    "$PYTHON" -c 'import sys, torch, transformers as t
print("Python", sys.version, "| torch", torch.__version__, "| transformers", t.__version__)
print("CUDA", torch.version.cuda, [torch.cuda.get_device_properties(i)
                                   for i in range(torch.cuda.device_count())])'
}
export -f facts
export PYTHON CUDA_VISIBLE_DEVICES=0

gigabytes=$("$PYTHON" -c 'import torch
print(torch.cuda.mem_get_info()[1] // 10**9 if torch.cuda.is_available() else 0)')
patience=1
if [ -n "${TINY:-}" ]; then
    patience=10
    bench=(--tiny --rounds 1)
    one=toy
    default=(--annotated_rows 40 --iterations 1 --batch_size 8 --minibatch_size 8 --eval_rows 8)
elif [ "$gigabytes" = 0 ]; then
    echo "no GPU that torch can use; TINY=1 walks through this on a CPU" && exit 1
else
    big=$([ "$gigabytes" -ge 40 ] && echo llama3-8b || echo llama3-1b)
    bench=(--device cuda --shape "$big")
    one=llama3-1b
    default=()
fi
device=$([ -n "${TINY:-}" ] && echo cpu || echo cuda)
small=(--annotated_rows 40 --iterations 2 --batch_size 8 --minibatch_size 8 --eval_rows 8
       --micro_batch_size 8 --learning_rate 1e-5)
model="{\"mode\": \"save\", \"options\": {\"shape\": \"$one\", \"device\": \"$device\",
        \"path\": \"$work/model\"}}"
bench=("$PYTHON" bench/bench.py "${bench[@]}" --patience 5 --write "$out/BENCHMARKS.md")

step machine 60 bash -c facts
step tests 90 "$PYTHON" -m pytest -q tests/test_model.py -k "cuda or captured or host_waits"
step default 120 "$PYTHON" text2grad.py --output_dir "$work/toy" "${default[@]}"
step random 60 env PYTHONPATH=. "$PYTHON" bench/bench_work.py "$model"
step phases 120 "$PYTHON" text2grad.py --model "$work/model" --output_dir "$work/random" \
    "${small[@]}"
step iterations 150 "${bench[@]}" --rounds 1 --only iteration
step rows 400 "${bench[@]}" --only logprobs decode lora rest
for run in toy random; do
    for file in phases.jsonl metrics.jsonl result.json; do
        cp "$work/$run/$file" "$out/$run.$file" 2>/dev/null
    done
done
"$PYTHON" - "$out/BENCHMARKS.md" <<'END' | tee -a "$out/summary.txt"
import re
import sys
for line in open(sys.argv[1]):
    found = re.search(r"^\| (.*?) \|.*not captured.*?\*\*([\d.e+-]+)\*\*", line)
    if found:
        times = 1 / float(found[2])
        say = "stays" if times >= 1.5 else "goes"
        print(f"captured step, {found[1]}: {times:.2f} times as fast, so it {say}")
END
[ -z "${TINY:-}" ] || echo "a CPU captures nothing: no verdict" | tee -a "$out/summary.txt"
tar -czf "$out.tar.gz" -C "$(dirname "$out")" "$(basename "$out")"
echo "${SECONDS} s in all. Please send $out.tar.gz"
