"""A diff in words that a person would paste into a pull request."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pandas as pd

from dspark_lab.analysis.captures import Capture

#: Less kernel time with a counterpart, or more kernels a step by this factor, is another model or engine.
ALIKE_SHARE, MORE_KERNELS = 0.5, 1.5


def sentence(
    before: float,
    delta: float,
    verdict: str,
    reason: str,
    parts: pd.DataFrame,
    sides: list[list[Capture]],
    withheld: str,
) -> str:
    captures = "captures" if any(len(s) > 1 for s in sides) else "capture"
    head = (
        f"{delta:+.0f} µs of {before:.0f} a step in {'these' if captures == 'captures' else 'this'} profiled {captures}"
    )
    if withheld:
        return f"Withheld, verdict and causes: {withheld}; the steps that are there differ by {head}."
    unlike = f" {different_work(parts)}".rstrip()
    if verdict == "tie":
        kinds = parts.groupby("kind")["delta_us"].sum()
        apart = kinds[(kinds.abs() >= max(2.0, 0.01 * before)).to_numpy()]
        cancel = (
            "; parts that cancel: " + ", ".join(f"{k} {v:+.0f} µs" for k, v in apart.items()) if len(apart) > 1 else ""
        )
        what = "Tie" if "interval holds" in reason or "captures of the same" in reason else "No verdict"
        return f"{what}: {head}; {reason}{cancel}.{unlike}"
    least = max(2.0, 0.08 * abs(delta))
    big = parts[(parts["delta_us"].abs() >= least).to_numpy()]
    with_delta = big[(np.sign(big["delta_us"]) == np.sign(delta)).to_numpy()]
    against = big[(np.sign(big["delta_us"]) != np.sign(delta)).to_numpy()]
    said = [_phrase(r, sides) for r in with_delta.head(4).to_dict("records")]
    if len(against):
        said.append("against it " + ", ".join(_phrase(r, sides) for r in against.head(2).to_dict("records")))
    if not len(with_delta):
        kinds = parts.groupby("kind")["delta_us"].sum().sort_values(key=abs, ascending=False)
        said.insert(
            0, "many small parts, the most in " + ", ".join(f"{k} ({v:+.0f} µs)" for k, v in kinds.head(2).items())
        )
    leads = [float(np.mean([c.lead_us for c in side])) for side in sides]
    if not any(math.isnan(x) for x in leads) and abs(leads[1] - leads[0]) > 100:
        how = "fell" if leads[1] < leads[0] else "rose"
        said.append(f"launch lead {how} from {leads[0] / 1000:+.1f} to {leads[1] / 1000:+.1f} ms")
    text = "; ".join([*said, head])
    return f"{text[:1].upper()}{text[1:]}.{unlike}"


def different_work(parts: pd.DataFrame) -> str:
    """A sentence where the two sides do not look like one engine before and after a change; "" where they do."""
    kernels = parts[parts["kind"].isin(["kernel", "communication"]).to_numpy()]
    times, counts = kernels[["before_us", "after_us"]].sum(), kernels[["count_before", "count_after"]].sum()
    found = kernels[kernels["matched"].isin(["name", "template"]).to_numpy()][["before_us", "after_us"]].sum()
    share = min((float(found[k] / times[k]) for k in times.index if times[k] > 0), default=1.0)
    few, many = sorted(map(float, counts))
    if share < ALIKE_SHARE:
        why = f"only {100 * share:.0f} % of a side's kernel time has a counterpart on the other"
    elif few > 0 and many > MORE_KERNELS * few:
        why = f"{counts['count_before']:.0f} kernels a step against {counts['count_after']:.0f}"
    else:
        return ""
    return f"The two run different work ({why}): this tells models or engines apart, not a change of one."


def _phrase(part: dict[str, Any], sides: list[list[Capture]]) -> str:
    us, kind, name = part["delta_us"], part["kind"], str(part["name"])
    if kind == "wait":
        more = part["after_us"] > part["before_us"]
        copy = _new_copy(sides if more else sides[::-1])
        site = str(part["site"])
        where = f", at {site}" if site else ""
        return ("" if more else "without ") + f"{copy}{_call(name, sides, site, more)} a step{where} ({us:+.0f} µs)"
    words = {
        "kernel": "kernel", "communication": "communication in", "copy": "copy", "peer_wait": "", "bubble": "the device waiting for", "launch": "", "graph_gap": "",
    }[kind]  # fmt: skip
    more = part["count_after"] - part["count_before"]
    times = f", {more:+.3g} a step" if kind in ("kernel", "communication", "copy") and abs(more) >= 0.5 else ""
    return f"{words} {_short(name)} ({us:+.0f} µs{times})".strip()


def _call(name: str, sides: list[list[Capture]], site: str, more: bool) -> str:
    side = sides[1 if more else 0]
    count = round(float(np.mean([c.waits.get((name, site), 1.0) for c in side])))
    kinds = {"StreamSynchronize": "stream synchronise", "DeviceSynchronize": "device synchronise", "EventSynchronize": "event wait", "Query": "wait by polling", "Memcpy": "blocking copy"}  # fmt: skip
    word = next((w for k, w in kinds.items() if k in name), name)
    return f"{'a' if count <= 1 else count} {word}{'' if count <= 1 else 's'} ({name})"


def _new_copy(sides: list[list[Capture]]) -> str:
    """The copies that one side has more of a step, as words with "and" behind; "" where none."""

    def mean(side: list[Capture]) -> dict[tuple[str, str], float]:
        keys = {k for c in side for k in c.copies}
        return {k: float(np.mean([c.copies.get(k, 0.0) for c in side])) for k in keys}

    less, more = (mean(s) for s in sides)
    added = {
        k: v - less.get(k, 0.0)
        for k, v in more.items()
        if v - less.get(k, 0.0) > 0.5 and ("HtoD" in k[0] or "DtoH" in k[0])
    }
    if not added:
        return ""
    (kind, size), count = max(added.items(), key=lambda kv: ("Pageable" in kv[0][0], kv[1]))
    word = "pageable " if "Pageable" in kind else ""
    number = "one" if round(count) == 1 else str(round(count))
    way = "host-to-device" if "HtoD" in kind else "device-to-host"
    return f"{number} {word}{size}-byte {way} copy{'' if number == 'one' else ' each'} and "


def _short(name: str, most: int = 70) -> str:
    text = re.sub(r"^void ", "", name)
    return text if len(text) <= most else text[: most - 1] + "…"
