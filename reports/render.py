"""`turbomill report`: one self-contained HTML page, with Markdown and JSON beside it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from turbomill.errors import UsageError
from turbomill.reports.baseline import Changed
from turbomill.reports.runs import Run, write_atomic
from turbomill.reports.view import ReportView, report_view

REPORT_VERSION = 1  # of the JSON
TEMPLATES = Path(__file__).parent / "templates"


def _cell(text: str) -> str:
    """Text in a Markdown table: one line, no column of its own, nothing that a renderer takes for HTML."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;").replace("`", "'")


@cache
def _environment(escape: bool) -> Environment:
    environment = Environment(
        loader=PackageLoader("turbomill.reports"),
        autoescape=escape,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["cell"] = _cell
    return environment


def render_html(view: ReportView) -> str:
    """The page. Scripts and styles are inside it, plotly's once and only where there is a plot."""
    plots = [*view.plots, *view.kv_plots, *view.speed_plots, *view.layer_plots]
    return (
        _environment(True)
        .get_template("report.html.j2")
        .render(
            report=view,
            style=Markup((TEMPLATES / "report.css").read_text(encoding="utf-8")),
            print_script=Markup((TEMPLATES / "print.js").read_text(encoding="utf-8")),
            script=Markup((TEMPLATES / "report.js").read_text(encoding="utf-8")),
            plotly=Markup(get_plotlyjs()) if plots else "",
            specs={plot.id: Markup(plot.spec) for plot in plots},
        )
    )


def render_markdown(view: ReportView) -> str:
    """The same without plots."""
    return _environment(False).get_template("report.md.j2").render(report=view)


def render_json(view: ReportView, runs: Sequence[Run]) -> str:
    """What the page shows, cell by cell, and the runs themselves, whole."""
    document = {
        "schema_version": REPORT_VERSION,
        **{name: part for name, part in asdict(view).items() if name != "runs"},
        "runs": [run.model_dump() for run in runs],
    }
    return json.dumps(document, indent=1, ensure_ascii=False, default=sorted) + "\n"


def write_report(
    runs: Sequence[Run], output: Path, changes: Sequence[Changed] = ()
) -> tuple[Path, Path, Path]:
    """Write `output` (.html) and the same name with .md and .json; returns all three."""
    if output.suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"--output {output}: expected a name that ends in .html")
    view = report_view(runs, changes=changes)
    markdown, data = output.with_suffix(".md"), output.with_suffix(".json")
    page, text, document = render_html(view), render_markdown(view), render_json(view, runs)
    write_atomic(output, page)
    write_atomic(markdown, text)
    write_atomic(data, document)
    return output, markdown, data
