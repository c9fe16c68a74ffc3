#!/usr/bin/env bash
# One command from a clone to a finished search on this machine: picks the demo script of the platform.
# Arguments are passed to `auto-research evolve`, for example: ./demo.sh --run mine --generations 5
set -euo pipefail
here="$(dirname "${BASH_SOURCE[0]}")"
case "$(uname -s)" in
Darwin) exec "$here/demo-mac.sh" "$@" ;;
Linux)
    if nvidia-smi -L >/dev/null 2>&1; then
        exec "$here/demo-linux-gpu.sh" "$@"
    fi
    exec "$here/demo-linux-cpu.sh" "$@"
    ;;
*)
    echo "error: the demo runs on macOS and Linux; this is $(uname -s) (on Windows use WSL)" >&2
    exit 2
    ;;
esac
