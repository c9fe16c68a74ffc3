"""Lock the champion, then read the sealed test once for baseline, champion and floors."""

from __future__ import annotations

from pathlib import Path

from auto_research.evolve.request import load_frozen
from auto_research.evolve.supervise import discard, held, state_folder, supervise
from auto_research.evolve.trial import PER_SEED, check_genome
from auto_research.experiment.search import reads_before
from auto_research.runtime.errors import RunFailure
from auto_research.runtime.files import atomic_path, read_json, sha256_file, write_json, write_text
from auto_research.runtime.schema import validate

SCHEMA_VERSION = 1
WHICH = ("baseline", "champion", "floors")


def lock_document(config: dict, generations: int, selection: dict) -> dict:
    """Return the content of LOCK.json: who is tested, and the hash of the last selection."""
    block = selection["deterministic"]
    return {
        "schema_version": SCHEMA_VERSION,
        "track": config["track"],
        "run": config["run"],
        "generations": generations,
        "champion": {key: block["champion"][key] for key in ("trial_id", "genome", "effective_fingerprint")},
        "baseline": {key: block["baseline"][key] for key in ("trial_id", "genome")},
        "selection": block["chain"],
    }


def lock(folder: Path, generations: int) -> Path:
    """Write ``final/g{G}/LOCK.json`` and note G in ``generations.txt`` (which no propose, trial or select rule reads)."""
    config = load_frozen(folder / "config.yaml")
    selection = read_json(folder / f"gen{generations}" / "selection.json")
    path = folder / "final" / f"g{generations}" / "LOCK.json"
    noted = folder / "generations.txt"
    asked = set(noted.read_text().split()) if noted.exists() else set()
    write_text(noted, "".join(f"{number}\n" for number in sorted({*asked, str(generations)}, key=int)))
    write_json(path, validate(lock_document(config, generations, selection), "lock"))
    return path


def final_test(
    folder: Path, generations: int, which: str, *, device: str | None, threads: int, timeout: float, code: str
) -> Path:
    """Retrain ``which`` from its genome with the full seed list, then open the sealed folder with the lock's hash.

    A champion that is the baseline itself is trained once: whichever of the two comes second takes the first one's numbers.
    An existing test file is left alone. Raises RunFailure when training or scoring does not complete.
    """
    final = folder / "final" / f"g{generations}"
    output = final / f"test_{which}.json"
    token = sha256_file(final / "LOCK.json")
    if output.exists():
        return output
    config = load_frozen(folder / "config.yaml")
    locked = read_json(final / "LOCK.json")
    if (same := _same_model(final, locked, which, token)) is not None:
        write_json(output, validate(same, "sealed_test"))
        return output
    facts = {"data": sha256_file(folder / "dev" / "manifest.json"), "code": code}
    job = {
        "mode": "floors" if which == "floors" else "test",
        "name": f"sealed test of {which}",
        "config": str(folder / "config.yaml"),
        "dev": str(folder / "dev"),
        "sealed": str(folder / "sealed"),
        "token": token,
        "seeds": [] if which == "floors" else config["seeds"],
        "device": device,
        "threads": threads,
    }
    if which != "floors":
        job["genome"], problem = check_genome(locked[which]["genome"], config)
        if problem:
            raise RunFailure(f"{which}: {problem}")
    state = state_folder("test", which, facts, token, config)
    job["state"] = str(state)
    with held(state):
        limit = timeout * max(1, len(job["seeds"]))
        ended = supervise(job, timeout=limit, log=final / f"test_{which}.log")
        if ended.status != "completed":
            raise RunFailure(f"sealed test of {which} ended as {ended.status}: {ended.message}")
        document = {
            "schema_version": SCHEMA_VERSION,
            "which": which,
            "lock": token,
            "reads_before": reads_before(folder, token),
            "telemetry": {"seconds": round(ended.seconds, 3), "attempts": ended.attempts},
        }
        if which == "floors":
            document["floors"] = read_json(state / "floors.json")
        else:
            document["trial_id"] = locked[which]["trial_id"]
            document["genome"] = locked[which]["genome"]
            document["per_seed"] = [{key: seed[key] for key in PER_SEED} for seed in ended.seeds]
            document["parameters"], document["flops"] = ended.seeds[0]["parameters"], ended.seeds[0]["flops"]
        write_json(output, validate(document, "sealed_test"))
        discard(state)
    return output


def _same_model(final: Path, locked: dict, which: str, token: str) -> dict | None:
    """The finished test of the other of baseline and champion where both are one trial and one lock, as ``which``."""
    other = {"baseline": "champion", "champion": "baseline"}.get(which)
    if other is None or locked["baseline"]["trial_id"] != locked["champion"]["trial_id"]:
        return None
    path = final / f"test_{other}.json"
    if not path.exists() or (found := read_json(path))["lock"] != token:
        return None
    return {**found, "which": which, "telemetry": {"seconds": 0.0, "attempts": 0, "same_as": other}}


def prepare(folder: Path, data: Path) -> None:
    """Let the host write ``dev`` and ``sealed`` from prepared tables below ``data``; manifests are written last."""
    from auto_research.evolve.hosts import load_preparation

    config = load_frozen(folder / "config.yaml")
    dev, sealed = folder / "dev", folder / "sealed"
    for target in (dev, sealed):
        target.mkdir(parents=True, exist_ok=True)
        (target / "manifest.json").unlink(missing_ok=True)
    load_preparation(config)(config, lambda table: data / table, dev, sealed)
    for target in (dev, sealed):
        write_manifest(target)


def write_manifest(folder: Path) -> None:
    """Write sha256 of every file of the folder into its manifest.json."""
    files = {
        path.relative_to(folder).as_posix(): sha256_file(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in ("manifest.json", ".snakemake_timestamp")
    }
    with atomic_path(folder / "manifest.json") as temporary:
        write_json(temporary, {"schema_version": SCHEMA_VERSION, "files": files})
