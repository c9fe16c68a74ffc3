#!/usr/bin/env bash
# Everything that is checked before a change goes in. Arguments are passed to pytest, for example: ./test.sh -k lease
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
source scripts/bootstrap.sh
bootstrap_environment .venv-test "$(bootstrap_platform)" dev,llm
export PATH="$PWD/.venv-test/bin:$PATH"
# two pytest workers with one thread each
export OMP_NUM_THREADS=1 AUTO_RESEARCH_CPU_THREADS=1

failed=""
check() {
    local name="$1"
    shift
    local output
    if output="$("$@" 2>&1)"; then
        printf '  ok      %s\n' "$name"
    else
        printf '  FAILED  %s: %s\n%s\n' "$name" "$*" "$output"
        failed="$failed $name;"
    fi
}

rule_files=(Snakefile rules/*.smk)
check "ruff" ruff check --quiet .
check "ruff format" ruff format --check --quiet .
check "snakefmt" snakefmt --check "${rule_files[@]}"
check "snakemake --lint" snakemake --lint
check "layers" lint-imports
check "cards" auto-research list --json
if [ -f scripts/validate_gpu_evidence.py ]; then
    check "receipts" python scripts/validate_gpu_evidence.py
fi

status=0
python -m pytest -n 2 --dist loadgroup "$@" || status=$?
if [ -n "$failed" ]; then
    printf 'error: checks before the tests failed:%s\n' "$failed" >&2
    exit 1
fi
exit "$status"
