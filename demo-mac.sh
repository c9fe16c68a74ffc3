#!/usr/bin/env bash
# Quick RankMixer search on macOS: Apple's GPU when torch can use it, else the CPU. Arguments are passed to `auto-research evolve`; variables: docs/guide.md.
set -euo pipefail
DEMO_PLATFORM=mac
export PYTORCH_ENABLE_MPS_FALLBACK="${PYTORCH_ENABLE_MPS_FALLBACK:-1}" # operators MPS lacks run on the CPU, with a warning
source "$(dirname "${BASH_SOURCE[0]}")/scripts/run_demo.sh"
run_demo "$@"
