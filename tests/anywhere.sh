#!/usr/bin/env bash
# The whole test suite under three instruction sets of PyTorch's CPU kernels, as other processors
# have them: no vector instructions, AVX2, and the best of this processor.
#
#   tests/anywhere.sh [FLAGS OF PYTEST]      prints one line per setting, fails if one of them fails
#
# PYTHON names the interpreter. On a processor without AVX-512 "native" repeats AVX2.
set -u
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python}
failures=0
for setting in default avx2 native; do
    if [ "$setting" = native ]; then
        unset ATEN_CPU_CAPABILITY
    else
        export ATEN_CPU_CAPABILITY=$setting
    fi
    kernels=$("$PYTHON" -c 'import torch; print(torch.backends.cpu.get_cpu_capability())')
    start=$SECONDS
    output=$("$PYTHON" -m pytest -q tests "$@" 2>&1) || failures=$((failures + 1))
    grep -E '^(FAILED|ERROR) ' <<< "$output"
    printf '%-8s kernels %-10s %4d s  %s\n' "$setting" "$kernels" $((SECONDS - start)) \
        "$(tail -n 1 <<< "$output")"
done
exit $((failures > 0))
