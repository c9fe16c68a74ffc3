# What the demo scripts share. Sourced after DEMO_PLATFORM is set: mac, linux-cpu or linux-gpu. Bash 3.2.
#   run_demo [evolve overrides]

source "$(dirname "${BASH_SOURCE[0]}")/bootstrap.sh"

demo_one_of() {
    local name="$1" value="$2" known
    shift 2
    for known in "$@"; do
        [ "$value" != "$known" ] || return 0
    done
    bootstrap_fail "$name=$value is unknown: use one of $*"
}

demo_count() {
    case "$2" in
    '' | *[!0-9]* | 0*) bootstrap_fail "$1=$2 is not a whole number of at least 1" ;;
    esac
}

# demo_option --flag default arguments...: the value the trailing arguments give to --flag, last one wins
demo_option() {
    local flag="$1" value="$2" wants=0 argument
    shift 2
    for argument in "$@"; do
        if [ "$wants" = 1 ]; then
            value="$argument"
            wants=0
        fi
        case "$argument" in
        "$flag") wants=1 ;;
        "$flag="*) value="${argument#*=}" ;;
        esac
    done
    printf '%s' "$value"
}

# Cores divided by workers, at least 1, at most 16. Fewer workers than the platform's own number ($2) change nothing: sums
# round differently with another thread count, and the same seed is to give the same candidates with 1 worker and with 2.
demo_threads() {
    local workers=$(($1 > $2 ? $1 : $2))
    local threads=$(($(bootstrap_cores) / workers))
    [ "$threads" -ge 1 ] || threads=1
    [ "$threads" -le 16 ] || threads=16
    echo "$threads"
}

run_demo() {
    local environment device workers usual threads track="${DEMO_TRACK:-recommendation}" profile="${DEMO_PROFILE:-quick}"
    case "$DEMO_PLATFORM" in
    mac) environment=mps device="${DEMO_DEVICE:-auto}" usual=1 ;;
    linux-gpu) environment=cuda device="${DEMO_DEVICE:-cuda:0}" usual=1 ;;
    *) environment=cpu device="${DEMO_DEVICE:-cpu}" usual=2 ;;
    esac
    cd "$BOOTSTRAP_ROOT" || return 2
    demo_one_of DEMO_PROFILE "$profile" quick full || return 2
    demo_one_of DEMO_TRACK "$track" recommendation llm multimodal checkpoint-vlm || return 2
    demo_one_of DEMO_MULTIMODAL_DATASET "${DEMO_MULTIMODAL_DATASET:-visual-shapes}" \
        visual-shapes fashion-mnist-qa cifar10-qa digits-qa || return 2
    if [ "$track" != recommendation ]; then
        bootstrap_fail "DEMO_TRACK=$track is not built yet: the track that exists is recommendation"
        return 2
    fi

    device="$(demo_option --device "$device" "$@")"
    workers="$(demo_option --workers "${DEMO_WORKERS:-$usual}" "$@")"
    demo_count DEMO_WORKERS "$workers" || return 2
    threads="$(demo_option --cpu-threads "${DEMO_CPU_THREADS:-$(demo_threads "$workers" "$usual")}" "$@")"
    demo_count DEMO_CPU_THREADS "$threads" || return 2

    BOOTSTRAP_REINSTALL="${DEMO_REINSTALL:-0}"
    bootstrap_environment "${DEMO_VENV:-.venv-demo-$DEMO_PLATFORM}" "$environment" || return $?
    "$BOOTSTRAP_PYTHON" -m auto_research.runtime.device_report --device "$device" --cpu-threads "$threads" || return $?

    if [ "$profile" = full ]; then
        set -- --dataset movielens-1m --population 6 --seeds 42,43,44 "$@"
    else
        set -- --dataset movielens-100k --population 2 "$@"
    fi
    "$BOOTSTRAP_PYTHON" -m auto_research.cli.main evolve --model rankmixer --profile "$profile" --generations 3 \
        --device "$device" --workers "$workers" --cpu-threads "$threads" "$@"
}
