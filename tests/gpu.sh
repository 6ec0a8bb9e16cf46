#!/usr/bin/env bash
# Six minutes on an NVIDIA GPU: eight steps with a verdict each, the riskiest first.
#
#   tests/gpu.sh [FOLDER]          then send FOLDER.tar.gz; a second run needs another FOLDER
#   TINY=1 tests/gpu.sh [FOLDER]   the same steps, toy-sized, on a CPU
#
#   1 machine    versions, and the attention kernels that are on
#   2 attention  bfloat16 gradients of padded rows, against float32
#   3 tests      the CUDA tests of test_sampling.py
#   4 capture    the decode step as a CUDA graph against the eager step
#   5 bench      all tables of bench.py with an 8B (a small model on cards under 70 GB)
#   6 toy        all three phases, two iterations, in bfloat16 and in float32
#   7 resume     a run that is killed and started again
#   8 ranks      two ranks and --shard, where two GPUs are there
#
# It uses the GPUs of CUDA_VISIBLE_DEVICES, or the first.
set -u
cd "$(dirname "$0")/.."
export PYTHON=${PYTHON:-python} TQDM_DISABLE=1
tiny=${TINY:-}

problem=$("$PYTHON" - "$tiny" <<'END'
import sys
import warnings

import torch

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    there = torch.cuda.is_available()
if sys.argv[1] or there and torch.cuda.is_bf16_supported(including_emulation=False):
    sys.exit()
built = f"torch {torch.__version__} is built for CUDA {torch.version.cuda}"
if there:
    print(f"{torch.cuda.get_device_name()} has no bfloat16, in which every model here runs")
elif torch.version.cuda is None:
    print(f"torch {torch.__version__} is built for CPUs alone: install a build for CUDA")
elif caught:
    print(f"{built}, and not for this driver: {' '.join(str(caught[0].message).split())}")
else:
    print(f"{built}, and finds no GPU")
END
) || exit 1
[ -z "$problem" ] || { echo "$problem. TINY=1 takes the steps on a CPU" && exit 1; }

out=$(realpath -m "${1:-gpu-$(date -u +%Y%m%d-%H%M)}")
mkdir "$out" || exit 1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failures=0

step() {   # name, seconds it may take, command; its output goes to a file
    local name=$1 limit=$2 start=$SECONDS status verdict
    [ -n "$tiny" ] || [ "$limit" -lt $((360 - start)) ] || limit=$((360 - start))
    [ "$limit" -gt 0 ] || limit=1
    shift 2
    timeout "$limit" "$@" > "$out/$name.txt" 2>&1
    status=$?
    verdict=passed
    [ $status = 124 ] && verdict="STOPPED after $limit s"
    [ $status = 0 ] || [ $status = 124 ] || verdict="FAILED with $status"
    [ $status = 0 ] || { failures=$((failures + 1)) && verdict="$verdict; see $name.txt"; }
    printf '%-12s %4d s  %s\n' "$name" $((SECONDS - start)) "$verdict" |
        tee -a "$out/summary.txt"
}

facts() {
    date -u
    git log -1 --format='commit %H of %cs' 2>/dev/null
    git status --short 2>/dev/null
    uname -srm
    lscpu | grep -E 'Model name|^CPU\(s\)'
    nvidia-smi 2>/dev/null
    "$PYTHON" -c 'import sys, torch, transformers as t, model
print("Python", sys.version, "| torch", torch.__version__, "| transformers", t.__version__)
print("CUDA", torch.version.cuda, "cuDNN", torch.backends.cudnn.version(),
      [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())])
kernels = torch.backends.cuda
print("attention: flash", kernels.flash_sdp_enabled(), "efficient",
      kernels.mem_efficient_sdp_enabled(), "cudnn", kernels.cudnn_sdp_enabled())
assert not kernels.cudnn_sdp_enabled()'
}
export -f facts

small=(--annotated_rows 120 --iterations 2 --batch_size 8 --minibatch_size 8 --eval_rows 8)
if [ -n "$tiny" ]; then
    gpus=2 bench=(--shape toy)
else
    read -r gpus gigabytes < <("$PYTHON" -c 'import torch
print(torch.cuda.device_count(), torch.cuda.mem_get_info()[1] // 10**9)')
    bench=(--device cuda --shape "$([ "$gigabytes" -ge 70 ] && echo llama3-8b || echo small)")
fi
pytest=("$PYTHON" -m pytest -q -n0 --tb=short)

step 1_machine 60 bash -c facts
step 2_attention 60 "${pytest[@]}" tests/test_gpu.py -k "attention or gradients"
step 3_tests 90 "${pytest[@]}" tests/test_sampling.py -k "cuda or captured"
step 4_capture 90 "${pytest[@]}" tests/test_gpu.py -k "captur"
step 5_bench 240 "$PYTHON" bench/bench.py "${bench[@]}"
step 6_toy 120 "${pytest[@]}" tests/test_gpu.py -k "iterations"
step 7_resume 90 "${pytest[@]}" tests/test_gpu.py -k "killed"
if [ "$gpus" -ge 2 ]; then
    step 8_ranks 120 "$PYTHON" -m torch.distributed.run --standalone --nproc_per_node 2 \
        text2grad.py --shard --output_dir "$work/ranks" "${small[@]}"
else
    echo "8_ranks         - s  not taken: one GPU" | tee -a "$out/summary.txt"
fi
tar -czf "$out.tar.gz" -C "$(dirname "$out")" "$(basename "$out")"
echo "${SECONDS} s in all, $failures steps failed. Please send $out.tar.gz"
exit $((failures > 0))
