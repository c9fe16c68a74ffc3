"""Searches: settings, input functions and fingerprints of evolve.smk. Holds no rule."""

from auto_research.evolve.board import TEMPLATES
from auto_research.evolve.code import prepare_code, trial_code
from auto_research.evolve.request import (
    COMMAND,
    export,
    refuse_changes,
    refuse_stale_test,
    search_from,
    trial_threads_of,
)
from auto_research.evolve.tracks import discover_tracks
from auto_research.runtime.files import read_json
from auto_research.runtime.names import module_name

SEARCH_KEYS = (
    "run", "dataset", "profile", "direction", "generations", "population", "steps", "seeds", "evaluation_users",
    "device", "cpu_threads", "trial_timeout_seconds", "command", "space", "metric", "metric_direction",
)  # fmt: skip
SEARCH_SETTINGS = {key: setting(key) for key in SEARCH_KEYS if setting(key) not in (None, "")}
SEARCH_TRACKS = [*checked(discover_tracks), COMMAND]
SEARCHES = {}
BOARD_TEMPLATE = TEMPLATES / "board.html.j2"
# one thread unless asked otherwise: results must not depend on the number of workers
TRIAL_THREADS = checked(trial_threads_of, SEARCH_SETTINGS)

export(SEARCH_SETTINGS)


def search_of(track):
    """The search of a track as configured; built once, refused in one line when the settings do not fit."""
    if track not in SEARCHES:
        SEARCHES[track] = checked(search_from, track, SEARCH_SETTINGS)
    return SEARCHES[track]


def asked_for(track):
    """True when this call names the track's target or a file of its configured run."""
    names = (f"evolve_{module_name(track)}", f"evolve_{module_name(track)}_search")
    folder = f"results/evolve/{track}/{setting('run', 'default')}/"
    return any(argument in names or argument.startswith(folder) for argument in sys.argv[1:])


def check_search(track):
    """Compare with the frozen request and look at the sealed test before Snakemake deletes any old output."""
    search = search_of(track)
    checked(refuse_changes, search)
    checked(refuse_stale_test, search)


def trial_threads(wildcards):
    """Scheduling only: as many cores per trial as leave room for the wished number of workers."""
    workers = setting("workers")
    return max(TRIAL_THREADS, workflow.cores // workers) if workers else TRIAL_THREADS


def search_data(wildcards):
    definition = search_of(wildcards.track).config["definition"]
    dataset = search_of(wildcards.track).config["dataset"]
    return [f"results/data/{dataset}/{table}/manifest.json" for table in definition.get("needs", [])]


def previous_selection(wildcards):
    g = int(wildcards.g)
    return [] if g == 0 else f"results/evolve/{wildcards.track}/{wildcards.run}/gen{g - 1}/selection.json"


def trials_of(track, run, g):
    """Trial files of one generation; known once its checkpoint has run."""
    candidates = checkpoints.propose.get(track=track, run=run, g=g).output[0]
    records = read_json(candidates)["candidates"]
    return [
        f"results/evolve/{track}/{run}/gen{g}/trials/{record['trial_id']}/trial.json"
        for record in records
        if record["status"] == "run"
    ]


def trial_files(wildcards):
    return trials_of(wildcards.track, wildcards.run, wildcards.g)


def run_files(track, run, generations):
    """Everything below a run's last selection: Snakemake remakes no missing file behind a target."""
    paths = [f"results/evolve/{track}/{run}/gen{g}/selection.json" for g in range(generations + 1)]
    for g in range(generations + 1):
        paths += trials_of(track, run, g)
    return paths


def report_inputs(wildcards):
    final = f"results/evolve/{wildcards.track}/{wildcards.run}/final/g{wildcards.G}"
    tests = [f"{final}/test_{which}.json" for which in ("baseline", "champion", "floors")]
    return [f"{final}/LOCK.json", *tests, *run_files(wildcards.track, wildcards.run, int(wildcards.G))]


def final_files(track):
    """Input function of the target evolve_<track>."""

    def files(wildcards):
        search = search_of(track)
        final = f"results/evolve/{track}/{search.run}/final/g{search.generations}"
        names = ("index.html", "report.json", "report.md", "LOCK.json")
        tests = [f"test_{which}.json" for which in ("baseline", "champion", "floors")]
        return [f"{final}/{name}" for name in (*names, *tests)] + run_files(track, search.run, search.generations)

    return files


def searched_files(track):
    """Input function of the target evolve_<track>_search: everything before the lock."""
    return lambda wildcards: run_files(track, search_of(track).run, search_of(track).generations)


def code_of(*modules):
    return checked(FINGERPRINTS.code, *modules)[:32]


def prepare_fingerprint(wildcards):
    return checked(prepare_code, FINGERPRINTS, search_of(wildcards.track).config)


def trial_fingerprint(wildcards):
    return checked(trial_code, FINGERPRINTS, search_of(wildcards.track).config)


def propose_fingerprint(wildcards):
    return code_of("auto_research.evolve.propose")


def select_fingerprint(wildcards):
    return code_of("auto_research.evolve.select")


def report_fingerprint(wildcards):
    modules = ("auto_research.evolve.report", "auto_research.evolve.board")
    return checked(lambda: FINGERPRINTS.code(*modules, files=(BOARD_TEMPLATE,)))[:32]


for track in SEARCH_TRACKS:
    if workflow.is_main_process and asked_for(track):
        check_search(track)
