"""Collect a finished search into report.json, report.md and index.html. Reads files only; trains and decides nothing."""

from __future__ import annotations

from pathlib import Path

from auto_research.evolve.request import load_frozen
from auto_research.evolve.select import mean_metric, over_seeds
from auto_research.runtime.errors import RunFailure
from auto_research.runtime.files import read_json, sha256_file, write_json, write_text

SCHEMA_VERSION = 1
Z95 = 1.959963984540054


def write_report(folder: Path, generations: int) -> Path:
    """Write the three files into ``final/g{G}/`` and return the page's path."""
    from auto_research.evolve.board import render_board, render_markdown
    from auto_research.runtime.schema import validate

    report = build_report(folder, generations)
    final = folder / "final" / f"g{generations}"
    validate(report, "search_report", "report.json")
    write_text(final / "report.md", render_markdown(report))
    write_text(final / "index.html", render_board(report))
    write_json(final / "report.json", report)
    return final / "index.html"


def build_report(folder: Path, generations: int) -> dict:
    """Return the content of report.json; raise RunFailure when a sealed test belongs to another lock."""
    config = load_frozen(folder / "config.yaml")
    final = folder / "final" / f"g{generations}"
    token = sha256_file(final / "LOCK.json")
    tests = {which: read_json(final / f"test_{which}.json") for which in ("baseline", "champion", "floors")}
    for which, test in tests.items():
        if test["lock"] != token:
            raise RunFailure(f"{final}/test_{which}.json was read under another champion; choose another run name")
    selections = [read_json(folder / f"gen{g}" / "selection.json")["deterministic"] for g in range(generations + 1)]
    candidates = [read_json(folder / f"gen{g}" / "candidates.json") for g in range(generations + 1)]
    trials = [row for g in range(generations + 1) for row in trial_rows(folder, g, candidates[g], selections[g])]
    champion = selections[-1]["champion"]
    baseline_id = selections[0]["champion"]["trial_id"]
    sealed = sealed_test(tests, config)
    by_id = {row["trial_id"]: row for row in trials if row["trial_id"]}
    validation = validation_gain(folder, by_id[baseline_id], by_id[champion["trial_id"]])
    reads = max(test["reads_before"] for test in tests.values())
    definition = config["definition"]
    runtime = read_json(folder / "runtime.json") if (folder / "runtime.json").exists() else {}
    report = {
        "schema_version": SCHEMA_VERSION,
        "track": config["track"],
        "run": config["run"],
        "title": definition["title"],
        "question": definition["question"],
        "fitness": definition["fitness"],
        "request": {
            key: config[key]
            for key in ("dataset", "direction", "profile", "seeds", "population", "steps", "evaluation_users", "z")
        }
        | {"generations": generations, "host": definition["host"], "budget": config["host"]},
        "runtime": runtime,
        "champion": {
            "trial_id": champion["trial_id"],
            "is_baseline": champion["trial_id"] == baseline_id,
            "genome": champion["genome"],
            "changes": genome_changes(selections[0]["champion"]["genome"], champion["genome"]),
        },
        "baseline": {"trial_id": baseline_id, "genome": selections[0]["champion"]["genome"]},
        "lineage": lineage(by_id, candidates, champion["trial_id"]),
        "generations": [generation_row(selection) for selection in selections],
        "trials": trials,
        "floors": tests["floors"]["floors"],
        "validation": validation,
        "test": sealed,
        "test_reads_before": reads,
        "evidence": definition.get("evidence", []),
        "negative_results": negative_results(trials),
        "seconds": round(
            sum(row["seconds"] or 0 for row in trials) + sum(t["telemetry"]["seconds"] for t in tests.values()), 1
        ),
        "chain": selections[-1]["chain"],
    }
    report["claim"] = claim(report)
    return report


def trial_rows(folder: Path, g: int, candidates: dict, selection: dict) -> list[dict]:
    """One row per slot of a generation, skipped and reused slots included."""
    ranking = {row["trial_id"]: row for row in selection["ranking"]}
    rows = []
    for record in candidates["candidates"]:
        row = {
            key: record[key]
            for key in (
                "trial_id",
                "generation",
                "slot",
                "status",
                "changed",
                "operator",
                "paper",
                "source",
                "rationale",
            )
        }
        row |= {
            "reuse_of": record["reuse_of"],
            "reason": record["reason"],
            "attempts": record["attempts"],
            "error": None,
        }
        row |= dict.fromkeys(("mean", "se", "score", "low", "high", "parameters", "flops", "seconds", "why_not"))
        row |= {"champion": False, "metrics": {}}
        if record["status"] == "run":
            trial = read_json(folder / f"gen{g}" / "trials" / record["trial_id"] / "trial.json")
            row |= _measured(trial, ranking[record["trial_id"]])
            row["champion"] = record["trial_id"] == selection["champion"]["trial_id"]
        rows.append(row)
    return rows


def _measured(trial: dict, ranked: dict) -> dict:
    block, telemetry = trial["deterministic"], trial["telemetry"]
    facts = {
        "status": block["status"],
        "error": {**block["error"], "message": telemetry["message"]} if block["error"] else None,
        "seconds": telemetry["seconds"],
        "why_not": ranked["why_not"] if ranked["why_not"] != block["status"] else None,
        **{key: ranked[key] for key in ("mean", "score", "parameters", "flops")},
    }
    if ranked["mean"] is not None:
        facts["se"] = max(ranked["se_unit"], ranked["se_seed"])
        facts["low"], facts["high"] = ranked["mean"] - Z95 * facts["se"], ranked["mean"] + Z95 * facts["se"]
        facts["metrics"] = {name: mean_metric(block, name) for name in block["per_seed"][0]["metrics"]}
    return facts


def generation_row(selection: dict) -> dict:
    """Champion and decision of one generation."""
    champion = selection["champion"]
    return {
        "generation": selection["generation"],
        "champion": champion["trial_id"],
        "mean": champion["mean"],
        "score": champion["score"],
        "decision": selection["decision"],
        "slots": selection["slots"],
        "chain": selection["chain"],
    }


def genome_changes(baseline: dict, genome: dict) -> list[dict]:
    """[{gene, from, to}] in which the champion differs from the baseline."""
    return [{"gene": n, "from": baseline[n], "to": genome[n]} for n in sorted(genome) if genome[n] != baseline[n]]


def lineage(by_id: dict, candidates: list[dict], champion: str) -> list[dict]:
    """From the baseline to the champion: trial id, changed genes, mean fitness."""
    parents = {
        record["trial_id"]: (document["parent"] or {}).get("trial_id")
        for document in candidates
        for record in document["candidates"]
        if record["trial_id"]
    }
    chain, current = [], champion
    while current:
        row = by_id[current]
        chain.append(
            {key: row[key] for key in ("trial_id", "generation", "changed", "operator", "paper", "mean", "score")}
        )
        current = parents[current]
    return chain[::-1]


def negative_results(trials: list[dict]) -> list[dict]:
    """Trials that failed, were not eligible, or scored below their generation's best: one sentence each."""
    best_before, results = None, []
    for generation in sorted({row["generation"] for row in trials}):
        rows = [row for row in trials if row["generation"] == generation]
        for row in rows:
            if row["status"] in ("skipped", "reused") or row["generation"] == 0:
                continue
            if row["status"] != "completed":
                what = f"ended as {row['status']}: {row['error']['class']}, {row['error']['message']}"
                results.append({"trial_id": row["trial_id"], "what": what, "changed": row["changed"]})
            elif row["why_not"]:
                results.append({"trial_id": row["trial_id"], "what": row["why_not"], "changed": row["changed"]})
            elif best_before is not None and row["score"] <= best_before:
                what = f"score {row['score']:.4f}, {row['score'] - best_before:+.4f} against the champion before it"
                results.append({"trial_id": row["trial_id"], "what": what, "changed": row["changed"]})
        scores = [row["score"] for row in rows if row["score"] is not None and not row["why_not"]]
        best_before = max([*scores, *([best_before] if best_before is not None else [])], default=best_before)
    return results


def mean_metrics(per_seed: list[dict]) -> dict:
    """Mean over seeds of every metric (None where a seed has none), the fitness included."""
    names = per_seed[0]["metrics"]
    return {"fitness": mean_metric({"per_seed": [{"metrics": {"f": s["fitness"]}} for s in per_seed]}, "f")} | {
        name: mean_metric({"per_seed": per_seed}, name) for name in names
    }


def paired_gain(champion: list[dict], baseline: list[dict]) -> dict:
    """Fitness difference with its paired bootstrap 95% interval over units (None without units)."""
    import numpy as np

    delta = mean_metrics(champion)["fitness"] - mean_metrics(baseline)["fitness"]
    gain = {"delta": delta, "low": None, "high": None, "resamples": 0}
    if champion[0]["replicates"]:
        pair = [over_seeds([seed["replicates"] for seed in side]) for side in (champion, baseline)]
        low, high = np.percentile(np.subtract(*pair), [2.5, 97.5])
        gain |= {"low": float(low), "high": float(high), "resamples": len(pair[0])}
    elif champion[0]["units"].get("values"):
        from auto_research.metrics.bootstrap import RESAMPLES, paired_mean

        pair = [np.asarray(over_seeds([seed["units"]["values"] for seed in side])) for side in (champion, baseline)]
        interval = paired_mean(*pair)
        gain |= {"low": interval.low, "high": interval.high, "resamples": RESAMPLES}
    return gain


def validation_gain(folder: Path, baseline: dict, champion: dict) -> dict:
    """Validation metrics of baseline and champion and the paired gain."""
    sides = {}
    for name, row in (("baseline", baseline), ("champion", champion)):
        path = folder / f"gen{row['generation']}" / "trials" / row["trial_id"] / "trial.json"
        sides[name] = read_json(path)["deterministic"]["per_seed"]
    return {name: mean_metrics(side) for name, side in sides.items()} | {
        "gain": paired_gain(sides["champion"], sides["baseline"])
    }


def sealed_test(tests: dict, config: dict) -> dict:
    """Test metrics of baseline and champion, the paired gain, and the change of the head share where measured."""
    sides = {name: tests[name]["per_seed"] for name in ("baseline", "champion")}
    metrics = {name: mean_metrics(side) for name, side in sides.items()}
    shares = [metrics[name].get("head_share@10") for name in ("champion", "baseline")]
    change = None if None in shares else shares[0] - shares[1]
    return {**metrics, "gain": paired_gain(sides["champion"], sides["baseline"]), "head_share_change": change}


def claim(report: dict) -> str:
    """smoke (quick budget or fewer than three seeds), exploratory (test read before), else the verdict of the test."""
    if report["request"]["profile"] != "full" or len(report["request"]["seeds"]) < 3:
        return "smoke"
    if report["test_reads_before"]:
        return "exploratory"
    gain = report["test"]["gain"]
    if gain["high"] is not None and gain["high"] < 0:
        return "worse"
    fitness = report["test"]["champion"]["fitness"]
    floors = [values["test"].get("fitness") for values in report["floors"].values()]
    beaten = all(value is None or fitness > value for value in floors)
    if gain["low"] is not None and gain["low"] > 0 and beaten:
        return "improves"
    return "no-difference"
