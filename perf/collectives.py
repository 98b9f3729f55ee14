"""Print every public measurement of a collective beside what the model says of it.

`fit`: the model that has seen the row; `left out`: one that has not. Rows of role `check` are in
no fit. Run: python perf/collectives.py
"""

from __future__ import annotations

from statistics import median

from k3c.targets.collective_fit import left_out, models, predict, rows


def main() -> None:
    """Print a Markdown table, and the errors of all left-out rows."""
    unseen = {id(row): us for model in models().values() for row, us in left_out(model.rows)}
    print(
        "| collective | implementation | device | ranks | KiB | public us | fit | left out | off |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for row in (row for row in rows() if row.hosts == 1 and row.role != "kept"):
        seen = predict(models()[row.implementation], row)
        us = unseen.get(id(row), seen)
        fit = f"{seen:.1f}" if id(row) in unseen else "-"
        print(
            f"| {row.kind} | {row.implementation} | {row.target} | {row.ranks} |"
            f" {row.nbytes / 1024:.0f} | {row.us:g} | {fit} | {us:.1f} | {us / row.us - 1:+.0%} |"
        )
    errors = [abs(unseen[id(r)] / r.us - 1) for r in rows() if id(r) in unseen]
    print(f"\n{len(errors)} rows left out: median {median(errors):.1%}, largest {max(errors):.1%}")


if __name__ == "__main__":
    main()
