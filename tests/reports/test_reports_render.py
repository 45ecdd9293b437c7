"""The report: complete, self-contained, escaped, readable without scripts."""

import json
import random
import re
from html.parser import HTMLParser
from itertools import pairwise

import pytest
from reports_models import PROVENANCE, bench_run, card, demo_run, policy

from turbomill.errors import UsageError
from turbomill.reports.latency import RequestResult, summarize
from turbomill.reports.plots import front
from turbomill.reports.plots_lines import layer_loss
from turbomill.reports.render import render_html, render_markdown, write_report
from turbomill.reports.runs import LayerResult, Run, Score
from turbomill.reports.summary import headline
from turbomill.reports.view import report_view

VOID = {"meta", "link", "br", "img", "input"}


class Page(HTMLParser):
    """Checks that tags nest, and keeps what matters."""

    def __init__(self, html):
        super().__init__()
        self.open, self.tags, self.text, self.scripts = [], [], [], []
        self.feed(html)
        assert not self.open, self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)
        elif data.strip():
            self.text.append(data.strip())

    def all(self, tag):
        return [attrs for name, attrs in self.tags if name == tag]


def kv_run():
    rows = [policy(16), policy(8, 12.01, 0.0009), policy(4, 13.3, 0.11)]
    return Run(kind="kv", model=card("awq"), reference=card("awq"), policies=rows, provenance=PROVENANCE)


def serve_run(failed=1):
    results = [RequestResult(8, 0.0, 1.0, [0.25, 0.5, 1.0], 3), RequestResult(8, error="HTTP 500")][
        : 1 + failed
    ]
    load = {"model_id": "smol", "request_rate": "inf", "max_concurrency": 4, **summarize(results, 2.0)}
    return Run(kind="bench_serve", serve=[load], provenance=PROVENANCE)


ALL = [demo_run(), kv_run(), bench_run(), serve_run()]


@pytest.fixture(scope="module")
def html():
    return render_html(report_view(ALL))


def test_every_number_is_in_a_table(html):
    text = " ".join(Page(html).text)
    for number in ("0.2971", "0.1389", "0.1212", "15.700", "270.0 MB", "120.0 MB", "23,040", "5,760"):
        assert number in text, number
    for number in ("160.0", "250.0", "375.0", "1,000.0"):  # decode tok/s; TTFT, TPOT and E2EL in ms
        assert number in text, number


def test_summary_comes_first_and_is_measured(html):
    page = Page(html)
    summary = page.text[page.text.index("Summary") + 1 :]
    assert summary.pop(0) == "gptq stays closest to fp16: KL 0.1212 at 44.4 % of its size."
    assert summary[0].startswith("Of the quantized variants, gptq stays closest to fp16: KL 0.1212")
    assert "0.1389 for awq and 0.2971 for rtn" in summary[0] and "13.30 against 11.97" in summary[0]
    assert "44.4 % of fp16's bytes on disk" in summary[1] and "1.80 times as fast" in summary[1]
    assert "With 8 bits in the KV cache gptq takes 50.0 % of the bytes per token" in summary[2]


def test_page_needs_no_network(html):
    page = Page(html)
    assert not [tag for tag in page.all("script") if "src" in tag]
    assert all(tag["href"].startswith("data:") for tag in page.all("link"))
    assert not page.all("img") and not page.all("iframe")
    styles = re.findall(r"<style>(.*?)</style>", html, re.DOTALL)
    assert styles and not re.search(r"@import|url\(", styles[0])
    assert sum("Plotly" in script and len(script) > 1e6 for script in page.scripts) == 1, "plotly once"


def test_plots_have_data_words_and_a_table_to_stand_for_them(html):
    page = Page(html)
    plots = [tag for tag in page.all("div") if tag.get("class") == "plot"]
    assert [plot["id"] for plot in plots] == ["size-quality", "quality-speed"]
    assert all("gptq" in plot["aria-label"] and plot["role"] == "img" for plot in plots)
    assert len(page.all("figcaption")) == len(page.all("noscript")) == 2
    specs = re.findall(
        r'<script type="application/json" data-plot="([\w-]+)">(.*?)</script>', html, re.DOTALL
    )
    assert {name for name, _ in specs} == {"size-quality", "quality-speed"}
    figure = json.loads(dict(specs)["quality-speed"])
    assert [trace["name"] for trace in figure["data"]] == ["KV 16", "KV 8", "KV 4", "Pareto front"]
    assert figure["data"][0]["text"] == ["fp16", "rtn", "awq", "gptq"]
    assert figure["data"][0]["x"] == [40.0, 70.0, 71.0, 72.0]


def test_semantics(html):
    page = Page(html)
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch(r"h\d", tag)]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(later - earlier <= 1 for earlier, later in pairwise(levels))
    assert page.all("html") == [{"lang": "en"}]
    assert len(page.all("caption")) == len(page.all("table")) == 5
    assert all(tag["scope"] in ("row", "col") for tag in page.all("th"))
    assert any(tag.get("name") == "viewport" for tag in page.all("meta"))
    assert "prefers-color-scheme: dark" in html and "@media print" in html


def test_what_users_wrote_is_escaped():
    evil = "</script><script>alert(1)</script>"
    run = demo_run()
    variants = [v.model_copy(update={"name": f"{v.name}{evil}"}) for v in run.variants]
    run = run.model_copy(update={"variants": variants, "answer": f"<img src=x> {evil}"})
    view = report_view([run], title=evil)
    page = Page(render_html(view))
    assert not any(
        "alert(1)" in script and "Plotly.react" not in script
        for script in page.scripts
        if not script.lstrip().startswith("{") and len(script) < 1e6
    )
    assert not page.all("img") and any("alert(1)" in text for text in page.text)
    assert len(page.scripts) >= 4 and all("</script" not in script for script in page.scripts)
    assert "<img" not in render_markdown(view)


def test_markdown_tables():
    text = render_markdown(report_view(ALL))
    lines = text.splitlines()
    assert lines[0] == "# Turbomill report" and lines[2] == "## Summary"
    row = "| gptq | gptq w4g64asym | 13.300 | 0.1212 | 87.9 % | 120.0 MB | 420.0 MB | 72.0 |"
    assert row in lines
    for index, line in enumerate(lines):
        if line.startswith("|---"):
            width = line.count("|")
            assert lines[index - 1].count("|") == width and lines[index + 1].count("|") == width
            assert lines[index - 2] == ""
    assert "> The capital of France is Paris." in lines
    assert "\n\n\n" not in text


def test_failed_runs_and_requests_are_shown():
    failed = Run(kind="ppl", status="failed", error="window 3: NaN", model=card(), provenance=PROVENANCE)
    page = Page(render_html(report_view([demo_run(), failed])))
    summary = page.text[page.text.index("Summary") + 1 :]
    assert summary[:2] == ["1 of 2 runs failed.", "FAILED: ppl: window 3: NaN"]
    assert any(
        "answered 1 of 2 requests" in text for text in Page(render_html(report_view([serve_run()]))).text
    )


def test_a_lone_score_needs_no_plotly():
    score = Score(ppl=13.3, kl=0.12, top1=0.82, positions=100)
    run = Run(
        kind="ppl", model=card("awq", "awq w4g64asym"), reference=card(), score=score, provenance=PROVENANCE
    )
    html = render_html(report_view([run]))
    assert "Plotly" not in html and len(html) < 20_000
    assert any(t.startswith("awq: perplexity 13.300; KL 0.1200") for t in Page(html).text)


def test_scores_of_several_runs_make_a_plot():
    runs = [
        Run(
            kind="ppl",
            model=card(name, scheme, disk),
            score=Score(ppl=ppl, kl=kl, top1=0.8, positions=9),
            provenance=PROVENANCE,
        )
        for name, scheme, disk, ppl, kl in (("a", "awq w4g64asym", 1, 13.0, 0.1), ("b", None, 2, 12.0, 0.0))
    ]
    assert [plot.id for plot in report_view(runs).plots] == ["size-quality"]


def test_files_appear_together(tmp_path):
    html, markdown, data = write_report([demo_run()], tmp_path / "sub" / "page.html")
    assert html.read_text().startswith("<!doctype html>") and markdown == tmp_path / "sub" / "page.md"
    assert sorted(p.name for p in html.parent.iterdir()) == ["page.html", "page.json", "page.md"]
    found = json.loads(data.read_text())
    assert found["schema_version"] == 1 and found["verdict"]["text"].startswith("gptq stays closest")
    assert Run.model_validate(found["runs"][0]) == demo_run()
    (variants,) = found["tables"]
    assert variants["columns"][2] == "perplexity" and variants["rows"][3][2] == "13.300"
    assert variants["best"] == [3] and json.loads(found["plots"][0]["spec"])["data"]
    with pytest.raises(UsageError, match=r"--output .*\.html"):
        write_report([demo_run()], tmp_path / "page.txt")


def test_the_verdict_comes_first_whatever_it_is():
    """Failures before regressions before the KV cache's verdict before the closest variant."""
    safe = kv_run().model_copy(update={"verdict": "safe"})
    never = kv_run().model_copy(update={"verdict": "do not use"})
    failed = Run(kind="ppl", status="failed", error="x", provenance=PROVENANCE)
    cases = [
        ([demo_run(), safe], 0, "A quantized KV cache for awq: safe.", "good"),
        ([safe, never], 0, "A quantized KV cache for awq: safe; awq: do not use.", "bad"),
        ([demo_run(), safe], 2, "2 figures are worse than the baseline's.", "bad"),
        ([failed, safe], 2, "1 of 2 runs failed.", "bad"),
    ]
    for runs, worse, text, tone in cases:
        found = headline(runs, worse)
        assert (found.text, found.tone) == (text, tone)
    assert headline([bench_run()]) is None
    page = render_html(report_view([safe]))
    assert '<p class="verdict good">A quantized KV cache for awq: safe.</p>' in page
    assert "**A quantized KV cache for awq: safe.**" in render_markdown(report_view([safe]))


def test_the_front_holds_what_no_other_beats():
    """Against the definition: every point, every other one."""
    rng = random.Random(0)
    for more_x_is_good in (False, True):
        points = [(str(i), rng.randrange(12), rng.randrange(12)) for i in range(30)]
        sign = -1 if more_x_is_good else 1

        def beaten(point, other, sign=sign):
            x, y = sign * (other[1] - point[1]), other[2] - point[2]
            return x <= 0 and y <= 0 and (x < 0 or y < 0)

        kept = {p[1:] for p in points if not any(beaten(p, other) for other in points)}
        found = front(points, more_x_is_good)
        assert {p[1:] for p in found} == kept and [p[1] for p in found] == sorted(p[1] for p in found)


def test_layers_are_drawn_but_for_single_ones():
    def row(layer, linear, loss):
        return LayerResult(
            **{"layer": layer, "linear": linear, "method": "awq", "weight_error": 0.01, "rtn_loss": 2 * loss},
            **{"loss": loss, "fallback": False, "seconds": 0.1, "tokens": 9, "scheme": "w4g64asym"},
        )

    rows = [row(layer, name, 0.1 * layer) for layer in range(3) for name in ("q", "mlp.experts.0.up")]
    figure = json.loads(layer_loss(rows, "awq", 0).spec)
    by_view = [[t["x"] for t in figure["data"] if t["meta"]["view"] == view] for view in range(3)]
    # No logarithm of a loss of 0, and no line for each expert.
    assert by_view == [[[1, 2]], [[1, 2]], [[0, 1, 2]]] and [v["log"] for v in figure["views"]] == [True] * 3
    assert "in layer 2" in layer_loss(rows, "awq", 0).alt and layer_loss(rows[:2], "awq", 0) is None
