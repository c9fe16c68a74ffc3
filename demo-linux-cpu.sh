#!/usr/bin/env bash
# Quick RankMixer search on Linux without an accelerator. Arguments are passed to `auto-research evolve`; variables: docs/guide.md.
set -euo pipefail
DEMO_PLATFORM=linux-cpu
source "$(dirname "${BASH_SOURCE[0]}")/scripts/run_demo.sh"
run_demo "$@"
