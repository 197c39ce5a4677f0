"""From stored dialogues to tables, goals, QUALITY.md and quality.json of bench/results/nano."""
import json
import string

import numpy as np

from . import anatomy, plan, plots, statistics, tasks

FEW = 12                      # questions of one depth: too few to say much
NOT_YET = "*Not measured yet: run `make quality`.*"


class Results:
    """Samples by cell, and everything computed from them."""

    def __init__(self, store, trained, methods):
        self.store, self.trained, self.methods = store, trained, methods
        self.memo = {}

    def once(self, key, compute):
        if key not in self.memo:
            self.memo[key] = compute()
        return self.memo[key]

    def rows(self, cell):
        return self.store.under(cell.name)

    def sample(self, cell):
        return self.once(cell, lambda: statistics.sample(self.rows(cell)))

    def cell(self, task, length, method, share):
        return plan.Cell(task, length, method, 1.0 if method == "full" else share)

    def refusal(self, cell):
        return next((r["refused"] for r in self.rows(cell) if "refused" in r), None)

    def score(self, cell):
        return self.once(("score", cell), lambda: statistics.mean(*statistics.aligned(self.sample(cell))))

    def minus(self, cell, other):
        return self.once((cell, other), lambda: statistics.paired(self.sample(cell), self.sample(other)))

    def row(self, cell):
        """Everything about one cell, as it goes to the JSON file; None where nothing was measured."""
        values = self.sample(cell)
        if not values:
            refused = self.refusal(cell)
            return {"cell": cell.name, "refused": refused} if refused else None
        mean, low, high = self.score(cell)
        out = {"cell": cell.name, "task": cell.task, "length": cell.length, "method": cell.method, "share": cell.share,
               "variant": cell.variant, "dialogues": len(values), "cases": int(sum(of for _, of in values.values())),
               "tokens": float(np.mean([r["tokens"] for r in self.rows(cell) if "got" in r])),
               "score": mean, "low": low, "high": high}
        plain = self.cell(cell.task, cell.length, cell.method, cell.share)
        others = {"full": self.cell(cell.task, cell.length, "full", 1.0),
                  "global": self.cell(cell.task, cell.length, "global", cell.share)}
        if cell.variant:
            others["default"] = plain
        for name, other in others.items():
            if other != cell and cell.method != "full":
                out[f"minus_{name}"] = self.minus(cell, other)
        return out

    def mean_of_tasks(self, method, share, length=None):
        """(mean, low, high) over the answered tasks; None when one is missing."""
        cells = [self.cell(t, length or self.trained, method, share) for t in tasks.ANSWERED]
        return statistics.over_tasks([statistics.aligned(self.sample(c))[0] for c in cells])

    def mean_minus(self, method, other, share, length=None):
        pairs = [(self.cell(t, length or self.trained, method, share), self.cell(t, length or self.trained, other, share))
                 for t in tasks.ANSWERED]
        return statistics.over_tasks([statistics.differences(self.sample(a), self.sample(b)) for a, b in pairs])

    def depths(self, method, length):
        """(share of right answers, questions) per depth bin of the needle task at a quarter; None where unasked."""
        got, of = np.zeros(tasks.DEPTHS), np.zeros(tasks.DEPTHS)
        for row in self.rows(self.cell("needle", length, method, plan.QUARTER)):
            for depth, right in zip(row.get("depths", ()), row.get("right", ())):
                b = min(tasks.DEPTHS - 1, int(depth * tasks.DEPTHS))
                got[b] += right
                of[b] += 1
        return [(float(g / n), int(n)) if n else None for g, n in zip(got, of)]


# --- words and tables -----------------------------------------------------------------------------

def share_name(share):
    return "all" if share == 1.0 else f"1/{round(1 / share)}"


def percent(triple):
    """A share or a difference of shares in points with its interval."""
    if triple is None:
        return ""
    return f"{100 * triple[0]:.1f} [{100 * triple[1]:.1f}, {100 * triple[2]:.1f}]"


def nats(triple):
    return "" if triple is None else f"{triple[0]:.3f} [{triple[1]:.3f}, {triple[2]:.3f}]"


def table(head, rows):
    """Markdown; the first column is left, the others right."""
    lines = ["| " + " | ".join(head) + " |", "|---" + "|--:" * (len(head) - 1) + "|"]
    return "\n".join(lines + ["| " + " | ".join(str(v) for v in row) + " |" for row in rows])


def or_refused(results, cell, show):
    if results.sample(cell):
        return show(cell)
    return "refused" if results.refusal(cell) else ""


def shares_table(results, task):
    """Methods by share; differences at a quarter."""
    rows = []
    for method in results.methods:
        cells = [results.cell(task, results.trained, method, s) for s in plan.SHARES]
        shown = [or_refused(results, c, lambda c: percent(results.score(c))) for c in cells]
        if method == "full":
            rows.append([method, shown[0], "", "", "", "", ""])
            continue
        quarter = cells[plan.SHARES.index(plan.QUARTER)]
        rows.append([method, *shown, *(percent(results.minus(quarter, results.cell(task, results.trained, other, plan.QUARTER)))
                                       if other != method else "" for other in ("full", "global"))])
    return table(["method", *map(share_name, plan.SHARES), "1/4 minus full", "1/4 minus global"], rows)


def means_table(results):
    rows = []
    for method in results.methods:
        if method == "full":
            rows.append([method, percent(results.mean_of_tasks(method, 1.0)), "", "", "", "", ""])
            continue
        less = [percent(results.mean_minus(method, other, plan.QUARTER)) if other != method else "" for other in ("full", "global")]
        rows.append([method, *(percent(results.mean_of_tasks(method, s)) for s in plan.SHARES), *less])
    return table(["method", *map(share_name, plan.SHARES), "1/4 minus full", "1/4 minus global"], rows)


def known_table(results, methods):
    """Means of the tasks with the question known when the cache is compressed."""
    def mean(cells):
        return statistics.over_tasks([statistics.aligned(results.sample(c))[0] for c in cells])

    def over_full(cells):
        return statistics.over_tasks([statistics.differences(results.sample(c), results.sample(plan.Cell(c.task, c.length, "full")))
                                      for c in cells])

    columns, full = {}, [c for c in plan.known(results.trained, methods) if c.method == "full"]
    for c in plan.known(results.trained, methods):
        if c.method != "full":
            columns.setdefault((c.method, dict(c.extra).get("window")), {}).setdefault(c.share, []).append(c)
    rows = [["full", *[percent(mean(full)), ""] * len(plan.KNOWN_SHARES)]]
    for (method, window), cells in columns.items():
        rows.append([method + (f", window {window}" if window else ""),
                     *(percent(f(cells[s])) for s in plan.KNOWN_SHARES for f in (mean, over_full))])
    head = ["method"] + [x for s in plan.KNOWN_SHARES for x in (share_name(s), f"{share_name(s)} - full")]
    return table(head, [row for row in rows if any(row[1:])])


def longer_table(results, length):
    """All tasks at a length beyond the trained one, a quarter of the tokens, minus the full cache."""
    rows = []
    for method in results.methods:
        cells = [results.cell(t, length, method, plan.QUARTER) for t in tasks.ANSWERED]
        shown = [or_refused(results, c, lambda c: percent(results.score(c))) for c in cells]
        less = "" if method == "full" else percent(results.minus(cells[0], results.cell("memory", length, "full", 1.0)))
        rows.append([method, *shown, less])
    return table(["method", *tasks.ANSWERED, "memory minus full"], rows)


def loss_table(results):
    """Nats per token; the increase over the full cache is paired."""
    columns = [(results.trained, s) for s in plan.SHARES] + [(2 * results.trained, plan.QUARTER), (4 * results.trained, plan.QUARTER)]
    rows = []
    for method in results.methods:
        row = [method]
        for length, share in columns:
            cell = results.cell("loss", length, method, share)
            if method == "full":
                row.append(nats(results.score(cell)) if results.sample(cell) else "")
            else:
                row.append(or_refused(results, cell, lambda c: "+ " + nats(results.minus(c, results.cell("loss", c.length, "full", 1.0)))))
        rows.append(row)
    return table(["method", *(f"{length} tokens, {share_name(share)}" for length, share in columns)], rows)


def costs(results):
    return [c for c in (anatomy.summary(results.store, m, results.trained) for m in results.methods) if c]


def costs_table(measured):
    return table(["method", "prompt tokens/s", "generated tokens/s", "ms per eviction", "evicting, % of the time", "KiB per sequence"],
                 [[c["method"], f"{c['prompt_tokens_per_s']:.0f}", f"{c['tokens_per_s']:.0f}", f"{c['eviction_ms']:.2f}",
                   f"{100 * c['eviction_share']:.1f}", f"{c['bytes'] / 1024:.0f}"] for c in measured])


# --- goals ----------------------------------------------------------------------------------------

def goal(what, met, value):
    return {"goal": what, "met": None if met is None else bool(met), "value": value}


def against(what, difference, least, lower_bound=False):
    """A goal on a paired difference: its mean (or its lower bound) is at least `least`."""
    if difference is None:
        return goal(what, None, "not measured")
    judged = difference[1] if lower_bound else difference[0]
    return goal(what, judged > least if lower_bound and least == 0 else judged >= least, f"{percent(difference)} points")


def goals(results):
    """The bars this project set itself. Judged by the mean unless a bound is named."""
    at = lambda method, share=plan.QUARTER: results.cell("memory", results.trained, method, share)   # noqa: E731
    full, ours = results.score(at("full")), results.score(at("global"))
    out = [goal("the full cache answers at least 95 % at the trained length (memory)",
                None if full is None else full[0] >= 0.95, percent(full) + " %" if full else "not measured")]
    known = full is not None and ours is not None
    out.append(goal("`global` with a quarter has at least 95 % of the full cache's score (memory)",
                    ours[0] >= 0.95 * full[0] if known else None,
                    f"{100 * ours[0] / max(full[0], 1e-9):.1f} %" if known else "not measured"))
    out.append(against("lower bound of `global` minus `streaming` above 0 (memory, 1/4)", results.minus(at("global"), at("streaming")), 0, True))
    out.append(against("lower bound of `global` minus `trimkv` at least -1 point (memory, 1/4)", results.minus(at("global"), at("trimkv")), -0.01, True))
    for task in ("memory", "trace"):
        cell = results.cell(task, results.trained, "global", plan.QUARTER)
        out.append(against(f"`global` with a quarter at or above the full cache ({task})",
                           results.minus(cell, results.cell(task, results.trained, "full", 1.0)), 0))
    for share in plan.SHARES[1:]:
        out.append(best_of_all(results, share))
    double = 2 * results.trained
    out.append(against("`global` with a quarter at or above the full cache at twice the trained length (memory)",
                       results.minus(results.cell("memory", double, "global", plan.QUARTER), results.cell("memory", double, "full", 1.0)), 0))
    out.append(against("the same on the mean of the tasks", results.mean_minus("global", "full", plan.QUARTER, double), 0))
    return out


def best_of_all(results, share):
    """`global` not below any other bounded method on the mean of the tasks: the closest or worst rival."""
    what = f"`global` not below any other method with {share_name(share)} (mean of the tasks)"
    rivals = {m: results.mean_minus("global", m, share) for m in results.methods if m not in ("full", "global")}
    rivals = {m: d for m, d in rivals.items() if d is not None}
    if not rivals:
        return goal(what, None, "not measured")
    worst = min(rivals, key=lambda m: rivals[m][0])
    return goal(what, rivals[worst][0] >= 0, f"{percent(rivals[worst])} points against `{worst}`, the strongest of {len(rivals)} others")


def goals_text(judged):
    mark = {True: "met", False: "**missed**", None: "not measured"}
    return "\n".join(f"- {mark[g['met']]}: {g['goal']}" + (f" ({g['value']})" if g["met"] is not None else "") for g in judged)


# --- pictures -------------------------------------------------------------------------------------

def draw_scores(results, out):
    names = [share_name(s) for s in reversed(plan.SHARES)]
    panels = []
    for title, score in [("mean of the tasks", results.mean_of_tasks)] + [(t, scorer(results, t)) for t in tasks.ANSWERED]:
        series = {m: {share_name(s): v for s in plan.SHARES if (v := score(m, 1.0 if m == "full" else s))} for m in results.methods}
        panels.append((title, names, series))
    by_length = {m: {str(n): v for n in (results.trained, 2 * results.trained, 4 * results.trained)
                     if (v := results.score(results.cell("memory", n, m, plan.QUARTER)))} for m in results.methods}
    panels.append(("memory, 1/4 of the tokens, by length", [str(n * results.trained) for n in (1, 2, 4)], by_length))
    out.write_text(plots.charts(panels, results.methods, "Right answers, %, by the share of the tokens that is held "
                                f"({results.trained} tokens; bars: 95 % intervals)"))


def scorer(results, task):
    return lambda method, share: results.score(results.cell(task, results.trained, method, share))


def draw_needles(results, out):
    lengths = [results.trained // 2, results.trained, 2 * results.trained, 4 * results.trained]
    maps = {}
    for method in results.methods:
        columns = [[at and (at[0], f"{100 * at[0]:.0f}" if at[1] >= FEW else f"({100 * at[0]:.0f})") for at in results.depths(method, n)]
                   for n in lengths]
        if any(at for c in columns for at in c):
            maps[method] = [[c[d] for c in columns] for d in range(tasks.DEPTHS)]
    rows = [f"{100 * d / tasks.DEPTHS:.0f}-{100 * (d + 1) / tasks.DEPTHS:.0f} %" for d in range(tasks.DEPTHS)]
    out.write_text(plots.heats(maps, "Needle: right answers, %, by depth of the fact (down) and length of the text (across), 1/4 of the tokens; "
                               f"in brackets: fewer than {FEW} questions", lengths, rows, (44, 20), top=1.0))


def draw_kept(measured, density, allocation):
    bounded = [c for c in measured if c["method"] != "full"]
    density.write_text(plots.densities({c["method"]: c["density"] for c in bounded},
                                       "Where the kept entries stand in the text (dashed: evenly spread; square-root scale)"))
    layers = range(len(bounded[0]["lengths"]) if bounded else 0)
    heads = range(len(bounded[0]["lengths"][0]) if bounded else 0)
    grids = {c["method"]: [[(n, f"{n:.0f}") for n in row] for row in c["lengths"]] for c in bounded}
    allocation.write_text(plots.heats(grids, "Entries kept by layer (down) and KV head (across)", [f"h{h}" for h in heads],
                                      [f"layer {n}" for n in layers], (46, 22), per_row=5))


# --- ablations ------------------------------------------------------------------------------------

def ablations_text(results):
    """One row per variant that has data: each task's score and the mean difference to the defaults."""
    rows = []
    for extra in ((),) + plan.ABLATIONS:
        asked = [plan.Cell(t, results.trained, "global", plan.QUARTER, 1.0, extra) for t, _ in plan.ABLATED]
        if not all(results.sample(c) for c in asked):
            continue
        plain = [results.cell(t, results.trained, "global", plan.QUARTER) for t, _ in plan.ABLATED]
        pairs = [statistics.differences(results.sample(a), results.sample(b)) for a, b in zip(asked, plain)]
        rows.append([f"`{asked[0].variant}`" if extra else "defaults", *(percent(results.score(c)) for c in asked),
                     percent(statistics.over_tasks(pairs)) if extra else ""])
    if len(rows) < 2:
        return ""
    return table(["`global`, 1/4 of the tokens", *(t for t, _ in plan.ABLATED), "mean minus defaults"], rows)


def gates_order(kinds):
    """Labels: the model's own, then those of its kind, of which the first is what others are compared with."""
    alike = lambda k: tuple(k[name] for name in ("type", "tying", "width", "trained_budget"))     # noqa: E731
    return sorted(kinds, key=lambda n: (n != "", alike(kinds[n]) != alike(kinds[""]), alike(kinds[n]), n))


def gates_text(results, kinds):
    """Gates beside each other: scores with a quarter and an eighth, and the mean's difference to the base."""
    def samples(label, share):
        return [results.sample(c) for c in plan.with_gates(results.trained, label) if c.share == share]

    order = [n for n in gates_order(kinds) if all(all(samples(n, s)) for s in plan.GATES_SHARES)] if kinds else []
    if len(order) < 2:
        return ""
    rows = []
    for label in order:
        kind, cells = kinds[label], plan.with_gates(results.trained, label)
        one = [percent(results.score(c)) for c in cells if c.task in ("memory", "trace") and c.share == plan.QUARTER]
        means = [percent(statistics.over_tasks([statistics.aligned(s)[0] for s in samples(label, share)])) for share in plan.GATES_SHARES]
        less = [percent(statistics.over_tasks([statistics.differences(x, y) for x, y in zip(samples(label, share), samples(order[1], share))]))
                if label not in ("", order[1]) else "" for share in plan.GATES_SHARES]
        name = f"`{label.rpartition('-')[0]}`" if label else "the model's own"
        rows.append([name, kind["tying"], kind["width"], kind["trained_budget"], f"{kind['parameters'] / 1000:.0f} k", *one, *means, *less])
    base = order[1].rpartition("-")[0]
    return table(["gates", "last projection", "width", "training M", "parameters", "memory 1/4", "trace 1/4", "mean 1/4", "mean 1/8",
                  f"1/4 minus `{base}`", f"1/8 minus `{base}`"], rows)


# --- documents ------------------------------------------------------------------------------------

def notes_for(folder, sha):
    """Notes people wrote about one set of weights; others' numbers would mislead."""
    path = folder / "QUALITY.notes.md"
    if not path.exists():
        return ""
    first, _, rest = path.read_text().partition("\n")
    return rest.strip() if sha[:12] in first else ""


def document(results, facts, cells, template):
    judged, measured = goals(results), costs(results)
    refused = sorted({f"- `{r['cell']}`: {r['refused']}" for c in cells if (r := results.row(c)) and "refused" in r})
    absent = [f"- `{name}`: {why}" for name, why in facts["not_offered"].items()]
    present = {c.method for c in cells if results.rows(c)}
    empty = {c.method for c in cells if not results.rows(c)}
    for where, methods in (("any", empty - present), ("every", empty & present)):
        names = ", ".join(f"`{m}`" for m in sorted(methods))
        absent += [f"- Not in {where} cell: {names}. What is empty was not measured."] if names else []
    counts = [len(results.sample(c)) * tasks.FORKS for c in cells if c.task != "loss" and c.length == results.trained and results.sample(c)]
    fields = {
        "sha": facts["sha"][:12], "trained": results.trained, "date": facts["date"], "daemon": facts["daemon"],
        "goals": goals_text(judged), "means": means_table(results), "costs": costs_table(measured),
        "loss": loss_table(results), "cases": f"{min(counts)} to {max(counts)}" if counts else "no",
        "tasks": "\n\n".join(f"### {t}\n\n{shares_table(results, t)}" for t in tasks.ANSWERED),
        "double": longer_table(results, 2 * results.trained), "fourfold": longer_table(results, 4 * results.trained),
        "missing": "\n".join(absent + refused) or "Every method of the list was measured.",
        "ablations": ablations_text(results) or NOT_YET.replace("quality`", "quality ARGS=ablations`"),
        "gates": gates_text(results, facts["gates"]) or NOT_YET.replace("quality`", "quality ARGS='gates NAME=FILE ...'`"),
        "resamples": statistics.RESAMPLES, "sharing": facts["sharing"], "notes": facts["notes"], "completeness": facts["completeness"],
        "twice": 2 * results.trained, "four": 4 * results.trained}
    return string.Template(template.read_text()).substitute(fields), judged, measured


def write(results, facts, cells, template, out):
    """Everything into the folder `out`: QUALITY.md, quality.json, the pictures."""
    out.mkdir(parents=True, exist_ok=True)
    facts = {**facts, "notes": notes_for(out, facts["sha"])}
    page, judged, measured = document(results, facts, cells, template)
    compared = [c for label in facts["gates"] if label for c in plan.with_gates(results.trained, label)]
    rows = [r for c in cells + plan.ablations(results.trained) + compared if (r := results.row(c))]
    (out / "quality.json").write_text(json.dumps({
        "model_sha256": facts["sha"], "daemon": facts["daemon"], "date": facts["date"], "trained_length": results.trained,
        "not_offered": facts["not_offered"], "goals": judged, "rows": rows, "costs": measured}, indent=1) + "\n")
    draw_scores(results, out / "quality.svg")
    draw_needles(results, out / "quality-needle.svg")
    draw_kept(measured, out / "quality-density.svg", out / "quality-allocation.svg")
    (out / "QUALITY.md").write_text(page)
