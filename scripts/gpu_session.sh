#!/usr/bin/env bash
# One audit session on a bare machine with a GPU, torch and transformers: no package index, no Snakemake.
#
#   scripts/gpu_session.sh [MINUTES] [further flags of scripts/audit_gpu_paths.py]
#
# Runs every adapter at smoke tier, shortest first, and starts nothing after MINUTES (default 8). Rows are on disk as soon
# as they exist, so a killed session loses none, and the same command goes on where it stopped. Prints a table.
#
#   SESSION_OUTPUT     rows (default results/gpu-audit/audit.json)
#   SESSION_DEVICE     device (default cuda:0)
#   SESSION_TIMEOUT    hard limit per adapter in seconds (default 240)
#   SESSION_DATA       folder of downloaded data sets (default data)
#   SESSION_PREPARED   folder of prepared data sets (default results/data); brought along, it spares the downloads
#   SESSION_DURATIONS  an earlier audit's JSON, e.g. of the CPU, that says which adapters are short
#   SESSION_WHEELS     folder of wheels for what the machine lacks, e.g. jsonschema (default .whl); nothing is downloaded
#   PYTHON             interpreter that has torch (default python3)
set -euo pipefail
cd "$(dirname "$0")/.."

minutes=8
if [[ "${1:-}" =~ ^[0-9]+([.][0-9]+)?$ ]]; then
    minutes=$1
    shift
fi
python=${PYTHON:-python3}
output=${SESSION_OUTPUT:-results/gpu-audit/audit.json}
device=${SESSION_DEVICE:-cuda:0}
durations=()
for earlier in ${SESSION_DURATIONS:+"$SESSION_DURATIONS"} results/audit/cpu/summary.json; do
    if [ -f "$earlier" ]; then
        durations=(--durations "$earlier")
        break
    fi
done

export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}"
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 AUTO_RESEARCH_ROOT="$PWD"

wheels=${SESSION_WHEELS:-.whl}
if compgen -G "$wheels/*.whl" >/dev/null; then
    site=$(mktemp -d)
    "$python" -m pip install -q --no-index --no-deps --no-compile --target "$site" "$wheels"/*.whl
    export PYTHONPATH="$PYTHONPATH:$site"
fi

"$python" - "$device" <<'PY'
import importlib.util
import sys

names = ("torch", "numpy", "pandas", "pyarrow", "sklearn", "scipy", "yaml", "jsonschema", "jinja2", "filelock")
missing = [name for name in names if importlib.util.find_spec(name) is None]
if missing:
    sys.exit(f"error: this Python lacks {', '.join(missing)}: bring wheels of them and of what they need in SESSION_WHEELS")

from auto_research.runtime.devices import hardware_name, public_version, resolve_device
from auto_research.runtime.errors import guard


def main() -> None:
    import torch

    device = resolve_device(sys.argv[1])
    print(f"device {device}, {hardware_name(device)}, torch {public_version(torch.__version__)}, CUDA {torch.version.cuda}")


sys.exit(guard(main))
PY

exec "$python" scripts/audit_gpu_paths.py --device "$device" --tier smoke --minutes "$minutes" --shortest-first --resume \
    --include-concept-demos --timeout-seconds "${SESSION_TIMEOUT:-240}" --dataset-dir "${SESSION_DATA:-data}" \
    --data-root "${SESSION_PREPARED:-results/data}" --output "$output" ${durations[@]+"${durations[@]}"} "$@"
