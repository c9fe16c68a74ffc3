"""A small result.json of a made-up run, for pages and boards."""


def summary(mean):
    return {"mean": mean, "std": None, "per_seed": {"42": mean}}


def arm(role, auc):
    empty = {"hyperparameters": {}, "trials": [], "notes": [], "extra": {}, "floors_not_beaten": [], "validation": {}}
    empty["intervals"] = {"auc": {"low": auc - 0.01, "high": auc + 0.01, "method": "bootstrap over users"}}
    return {"role": role, "what": role, "seeds": [42], "metrics": {"auc": summary(auc)}, "cost": {"params": 7}, **empty}


def sample_result():
    delta = {"delta": 0.1, "relative": 0.2, "low": -0.1, "high": 0.3, "method": "toy", "higher_is_better": True}
    pair = {"arm": "din_full", "against": "bias", "seeds": [42], "metrics": {"auc": delta}}
    return {
        "schema_version": 2,
        "adapter": "din",
        "card": {
            "title": "Deep Interest Network",
            "paper": "arXiv:1706.06978",
            "organization": "Alibaba",
            "published": "2017-06-21",
            "fidelity": "full_pipeline",
            "task": "ctr",
            "problem": "p",
            "boundary": [],
            "paper_reported": "",
        },
        "tier": "standard",
        "dataset": "movielens-100k",
        "data": {},
        "code": {"fingerprint": "f" * 32, "stages": {}, "commit": None, "modified": None},
        "runtime": {"device_resolved": "cpu"},
        "seeds": [42],
        "metrics": {"primary": "auc", "direction": "max", "also": []},
        "arms": {"bias": arm("floor", 0.7), "lost": arm("baseline", 0.6), "din_full": arm("treatment", 0.8)},
        "floors": {"bias": 0.7},
        "comparisons": [{**pair, "verdict": "no-difference", "reason": "the interval holds zero"}],
        "claim": "no-difference",
        "claim_reason": "toy",
    }
