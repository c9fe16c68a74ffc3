"""Build results/site/index.html from cards, results, boards and audits; with --docs the committed pages under docs/.

python scripts/build_site.py                 # results/site/index.html
python scripts/build_site.py --docs          # docs/catalogue.md, docs/papers/*.md, docs/results/README.md
python scripts/build_site.py --publish results/reproduce/rankmixer/standard/movielens-100k/result.json
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from auto_research.experiment.card import discover
from auto_research.report.pages import write_docs
from auto_research.report.published import load_local, load_published, publish
from auto_research.report.site import write_site
from auto_research.runtime.errors import guard
from auto_research.runtime.paths import code_root


def main() -> int:
    """Parse the command line and write the pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/site"), help="folder of the site")
    parser.add_argument("--docs", action="store_true", help="write the generated pages of docs/ instead")
    parser.add_argument(
        "--publish", type=Path, nargs="+", metavar="RESULT", help="copy finished results into docs/results"
    )
    arguments = parser.parse_args()
    root = code_root()
    cards = discover(root)
    docs = root / "docs"
    if arguments.publish:
        for path in arguments.publish:
            print(publish(path, docs))
    if arguments.docs or arguments.publish:
        for page in write_docs(cards, load_published(docs), docs):
            print(page)
        return 0
    local = load_local()
    here = {(r["adapter"], r["dataset"], r["tier"]) for r in local}
    committed = [r for r in load_published(docs) if (r["adapter"], r["dataset"], r["tier"]) not in here]
    print(write_site(cards, [*local, *committed], arguments.out))
    return 0


if __name__ == "__main__":
    sys.exit(guard(main))
