"""What `turbomill lite` writes about each linear becomes a table of the report."""

import json

import pytest

from turbomill.errors import TurbomillError
from turbomill.quant.options import LayerRow
from turbomill.quant.written import write_log
from turbomill.reports.quant_log import is_quantization, load_quantization
from turbomill.reports.render import write_report

ROWS = [
    LayerRow(0, "self_attn.q_proj", "gptq", 0.011, 0.04, 0.0123456, False, 1.25, 4096, "w4g64asym"),
    LayerRow(0, "mlp.experts.3.up_proj", "rtn", 0.012, None, None, True, 0.5, 7),
    LayerRow(1, "mlp.down_proj", "rtn", 0.013, 0.05, 0.05, True, 2.0, 4096),
]


@pytest.fixture
def work_dir(tmp_path):
    made = {
        "method": "gptq",
        "seconds": 12.5,
        "command": "turbomill lite auto_gptq m",
        "options": {"bits": 4},
    }
    (tmp_path / "turbomill.json").write_text(json.dumps(made))
    write_log(tmp_path / "quant_log.csv", ROWS)
    return tmp_path


def test_every_row_comes_back(work_dir):
    assert is_quantization(work_dir)
    run = load_quantization(work_dir)
    for row, found in zip(ROWS, run.layers, strict=True):
        assert found.model_dump() == row.__dict__
    assert run.provenance["settings"] == {"bits": 4}


def test_the_report_has_the_table(work_dir):
    html, markdown, _ = write_report([load_quantization(work_dir)], work_dir / "report.html")
    page, text = html.read_text(), markdown.read_text()
    rows = (
        "| 0 self_attn.q_proj | w4g64asym | gptq | 0.040000 | 0.012346 | 0.011000 | 4,096 | 1.25 |",
        "| 0 mlp.experts.3.up_proj | - | rtn, fell back | - | - | 0.012000 | 7 | 0.50 |",
    )
    for row in rows:
        assert row in text
    assert "gptq: 3 linears in 12.5 s" in text and "2 fell back to rounding" in text
    assert "1 mlp.down_proj" in page and "turbomill lite auto_gptq m" in page


def test_a_damaged_log_is_named(work_dir):
    (work_dir / "quant_log.csv").write_text("layer,linear\n0,x\n")
    with pytest.raises(TurbomillError, match=r"quant_log\.csv: not what turbomill lite writes"):
        load_quantization(work_dir)


def test_the_command_takes_a_quantized_checkpoint(work_dir, monkeypatch, capsys):
    import sys

    from turbomill.__main__ import main

    monkeypatch.setattr(sys, "argv", ["turbomill", "report", str(work_dir), "--json"])
    main()
    assert json.loads(capsys.readouterr().out)["html"] == str(work_dir / "report.html")
