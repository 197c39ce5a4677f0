"""keepd-nano adapted to evictions by distillation and by rewards, and both compared with the model as it is.

    python adapt_nano.py --run RUN --minutes 20

One command for reinforce.py and distill.py: answers of the model as it is, under eviction, for distillation; the two trainings,
--minutes each; then held-out questions to the three models and to those that the rewards had made on the way, and a table. Seeded;
started again, it goes on.
"""

import argparse
import sys
from pathlib import Path

import distill
import reinforce
from options import count, positive

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "bundled/keepd-nano"


def arguments():
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ap.add_argument("--run", type=Path, required=True, help="folder of all that is made")
    ap.add_argument("--minutes", type=positive, default=20, help="of each training")
    ap.add_argument("--threads", type=count, default=2)
    ap.add_argument("--daemon", type=Path, default=ROOT / "build/keepd")
    ap.add_argument("--length", type=count, default=1024, help="tokens of a dialogue")
    ap.add_argument("--records", type=count, default=12, help="steps of reinforce.py whose answers distill.py learns from")
    ap.add_argument("--cases", type=count, default=600, help="held-out questions")
    ap.add_argument("--seed", type=int, default=1)
    return ap.parse_args()


def call(program, *words):
    sys.argv = [program.__name__, *map(str, words)]
    program.main()


def main():
    a = arguments()
    a.run.mkdir(parents=True, exist_ok=True)
    common = ("--threads", a.threads, "--seed", a.seed)
    asking = (*common, "--daemon", a.daemon, "--length", a.length)
    records, distilled, rewarded = a.run / "records.jsonl", a.run / "distilled", a.run / "rewarded"
    if not records.exists():
        part = records.with_suffix(".part")
        call(reinforce, MODEL, *asking, "--max-steps", a.records, "--run", a.run / "as-it-is", "--record", part)
        part.rename(records)
    if not distilled.exists():
        call(distill, MODEL, *common, "--records", records, "--minutes", a.minutes, "--lr", 1e-4, "--no-bf16",
             "--run", a.run / "distill", "--out", distilled)
    if not rewarded.exists():
        call(reinforce, MODEL, *asking, "--minutes", a.minutes, "--run", a.run / "reinforce", "--out", rewarded)
    curve = a.run / "curve.jsonl"
    curve.unlink(missing_ok=True)
    for model in (MODEL, distilled, *sorted((a.run / "reinforce").glob("step-*")), rewarded):
        call(reinforce, model, *asking, "--cases", a.cases, "--evaluate", curve)
    call(reinforce, "--table", curve)


if __name__ == "__main__":
    main()
