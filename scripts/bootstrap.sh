# Environments for demo*.sh, test.sh and .ci/run. Sourced, not run. Works with bash 3.2 (macOS).
#
#   bootstrap_environment <folder> <cpu|cuda|mps> [extras, comma-separated]
#
# Makes a virtual environment with versions pinned by envs/constraints-<platform>.txt, or reuses it when constraints,
# pyproject.toml and the place of the checkout are those it was made from. Sets BOOTSTRAP_PYTHON.
#   BOOTSTRAP_REINSTALL=1  makes the environment anew
#   TORCH_INDEX_URL        extra package index for torch (cpu: PyTorch's CPU index); left out when it does not answer
#   BOOTSTRAP_BASE_PYTHON   interpreter to start from (default: the first Python 3.11 or later found)

# every job would compile torch's sources anew (4 s each)
unset PYTHONDONTWRITEBYTECODE

BOOTSTRAP_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
BOOTSTRAP_CPU_INDEX="https://download.pytorch.org/whl/cpu"

bootstrap_say() { printf '%s\n' "$*"; }
bootstrap_fail() {
    printf 'error: %s\n' "$*" >&2
    return 2
}

# cpu, cuda or mps for this machine
bootstrap_platform() {
    if [ "$(uname -s)" = Darwin ]; then
        echo mps
    elif nvidia-smi -L >/dev/null 2>&1; then
        echo cuda
    else
        echo cpu
    fi
}

bootstrap_cores() {
    getconf _NPROCESSORS_ONLN 2>/dev/null || sysctl -n hw.ncpu 2>/dev/null || echo 1
}

bootstrap_find_python() {
    local candidate
    # a name of one's own is tried alone: quietly taking another interpreter would be worse than stopping
    if [ -n "${BOOTSTRAP_BASE_PYTHON:-}" ]; then
        set -- "$BOOTSTRAP_BASE_PYTHON"
    else
        set -- python3 python3.13 python3.12 python3.11 python3.14 python
    fi
    for candidate in "$@"; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
            command -v "$candidate"
            return 0
        fi
    done
    bootstrap_fail "no Python 3.11 or later found: install one, or set BOOTSTRAP_BASE_PYTHON to it"
}

# Virtual environment with pip, also where the distribution keeps ensurepip in another package
bootstrap_make_venv() {
    local base="$1" folder="$2"
    # --clear empties a folder that an interrupted set-up or another Python left behind
    if "$base" -m venv --clear "$folder" >/dev/null 2>&1; then
        return 0
    fi
    "$base" -m venv --clear --without-pip "$folder" &&
        "$base" -m pip --python "$folder/bin/python" install --quiet --disable-pip-version-check pip && return 0
    bootstrap_fail "cannot make a virtual environment at $folder with $base: install its venv or pip package"
}

# A pip from before 2025 spends longer reading index pages than on everything else
bootstrap_renew_pip() {
    if "$1" -c 'import pip, sys; sys.exit(int(pip.__version__.split(".")[0]) < 25)'; then
        return 0
    fi
    "$1" -m pip install --quiet --no-compile --disable-pip-version-check --no-input --upgrade \
        --constraint "$BOOTSTRAP_ROOT/envs/constraints-$2.txt" pip >/dev/null 2>&1 ||
        bootstrap_say "note: pip could not be renewed; going on with the older one"
}

# True when the index answers within a few seconds (a plain alarm also covers name resolution)
bootstrap_index_answers() {
    "$1" - "$2" <<'PYTHON' >/dev/null 2>&1
import os, signal, ssl, sys, urllib.request
signal.alarm(5)
url = sys.argv[1]
if "://" not in url or url.startswith("file:"):
    sys.exit(0)
try:
    from pip._vendor import certifi
    authorities = os.environ.get("PIP_CERT") or certifi.where()
except ImportError:
    authorities = os.environ.get("PIP_CERT")
context = ssl.create_default_context(cafile=authorities)
urllib.request.urlopen(url.rstrip("/") + "/torch/", timeout=4, context=context).read(1)
PYTHON
}

bootstrap_stamp() {
    "$1" - "$BOOTSTRAP_ROOT" "$2" "${TORCH_INDEX_URL:-}" <<'PYTHON'
import hashlib, pathlib, sys
root, platform, index = sys.argv[1:]
digest = hashlib.sha256(f"{root}|{platform}|{index}|{sys.version_info[:2]}".encode())
for name in (f"envs/constraints-{platform}.txt", "pyproject.toml"):
    digest.update(pathlib.Path(root, name).read_bytes())
print(digest.hexdigest())
PYTHON
}

# True when every wanted extra is among those installed; both are comma-separated
bootstrap_has_extras() {
    local wanted installed=",$2,"
    for wanted in $(printf '%s' "$1" | tr ',' ' '); do
        case "$installed" in *",$wanted,"*) ;; *) return 1 ;; esac
    done
}

# Shows pip's steps on one terminal line; silent elsewhere
bootstrap_follow() {
    local line
    while IFS= read -r line; do
        [ -t 1 ] || continue
        case "$line" in
        Collecting* | *Downloading* | *Installing*) printf '\r\033[K  %.76s' "${line#"${line%%[! ]*}"}" ;;
        esac
    done
    [ ! -t 1 ] || printf '\r\033[K'
}

bootstrap_install() {
    local python="$1" platform="$2" extras="$3" log="$4"
    local package="$BOOTSTRAP_ROOT" index="${TORCH_INDEX_URL:-}"
    [ -z "$extras" ] || package="$package[$extras]"
    [ "$platform" != cpu ] || index="${index:-$BOOTSTRAP_CPU_INDEX}"
    set -- --no-compile --disable-pip-version-check --no-input --progress-bar off
    set -- "$@" --constraint "$BOOTSTRAP_ROOT/envs/constraints-$platform.txt" --editable "$package"
    if [ -n "$index" ]; then
        if bootstrap_index_answers "$python" "$index"; then
            set -- "$@" --extra-index-url "$index"
        else
            bootstrap_say "note: $index does not answer; torch comes from pip's own index (on Linux that may be the larger CUDA build)"
        fi
    fi
    bootstrap_renew_pip "$python" "$platform"
    "$python" -m pip install "$@" 2>&1 | tee "$log" | bootstrap_follow
    if [ "${PIPESTATUS[0]}" -ne 0 ]; then
        grep -v '^WARNING: Location' "$log" | tail -n 5 >&2
        bootstrap_fail "installation failed; the whole log is $log; mend the cause and run the same command again"
    fi
}

bootstrap_environment() {
    local folder="$1" platform="$2" extras="${3:-}" base stamp began present
    BOOTSTRAP_PYTHON="$folder/bin/python"
    if [ "${BOOTSTRAP_REINSTALL:-0}" != 1 ] && "$BOOTSTRAP_PYTHON" -c 'import pip' >/dev/null 2>&1; then
        stamp="$(bootstrap_stamp "$BOOTSTRAP_PYTHON" "$platform")" || return 2
        if [ "$(sed -n 1p "$folder/auto-research.stamp" 2>/dev/null)" = "$stamp" ]; then
            present="$(sed -n 2p "$folder/auto-research.stamp")"
            if bootstrap_has_extras "$extras" "$present"; then
                bootstrap_say "environment: $folder (reused)"
                return 0
            fi
            extras="${present:+$present,}$extras"
        fi
    else
        base="$(bootstrap_find_python)" || return 2
        bootstrap_say "environment: $folder (new, from $("$base" --version 2>&1))"
        bootstrap_make_venv "$base" "$folder" || return 2
        stamp="$(bootstrap_stamp "$BOOTSTRAP_PYTHON" "$platform")" || return 2
    fi
    rm -f "$folder/auto-research.stamp"
    began=$SECONDS
    bootstrap_say "installing pinned versions from envs/constraints-$platform.txt (log: $folder/install.log)"
    bootstrap_install "$BOOTSTRAP_PYTHON" "$platform" "$extras" "$folder/install.log" || return $?
    "$folder/bin/auto-research" profiles link >/dev/null 2>"$folder/profiles.log" ||
        bootstrap_say "note: profiles not linked: $(tail -n 1 "$folder/profiles.log")"
    printf '%s\n%s\n' "$stamp" "$extras" >"$folder/auto-research.stamp"
    bootstrap_say "installed in $((SECONDS - began)) s"
}
