"""`eval tasks`: the generated documents, our engine as the harness's model, a server in its place."""

import json
import math
import re

import numpy as np
import pytest
from click.testing import CliRunner
from reports_models import PROVENANCE, card

from turbomill.cli import cli
from turbomill.engine.config import EngineConfig
from turbomill.engine.requests import EngineError, GenerationOutput, TokenLogprob, Usage
from turbomill.engine.turbomind import TurbomindEngine
from turbomill.errors import TurbomillError, UsageError
from turbomill.reports.baseline import against, figures
from turbomill.reports.harness import data, find
from turbomill.reports.runs import Run, TaskScore, load_run, save_run
from turbomill.reports.scores import LogitsError
from turbomill.reports.server_process import server
from turbomill.reports.tasks import TaskOptions, evaluate_tasks
from turbomill.reports.view import report_view

pytest.importorskip("lm_eval")
pytest.importorskip("turbomill._core")
# Raised inside the harness and what it imports.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

CHECKS = '''
"""Tasks for tests: every kind of request, with values that differ wherever an answer does."""
import zlib
from datasets import Dataset

def documents(**_):
    return {"test": Dataset.from_list([{"text": f"line {i}: {i * i}", "n": i} for i in range(5)])}

def digest(document, results):
    return {"digest": float(zlib.crc32(results[0].encode()) % 997)}
'''
COMMON = 'dataset_path: ""\ntest_split: test\ncustom_dataset: !function checks.documents\nnum_fewshot: 0\n'
YAML = {
    "check_choice": 'output_type: multiple_choice\ndoc_to_text: "{{text}}"\ndoc_to_target: 0\n'
    'doc_to_choice: ["yes", "no, never", "maybe"]\nmetric_list:\n  - metric: acc\n  - metric: acc_norm\n',
    "check_rolling": "output_type: loglikelihood_rolling\ndoc_to_text: ''\n"
    "doc_to_target: '{{text}}'\nmetric_list:\n  - metric: byte_perplexity\n",
    "check_text": 'output_type: generate_until\ndoc_to_text: "{{text}}"\ndoc_to_target: "x"\n'
    "generation_kwargs: {until: ['q', 'zz'], max_gen_toks: 24, do_sample: false}\n"
    "process_results: !function checks.digest\n"
    "metric_list:\n  - {metric: digest, aggregation: mean, higher_is_better: true}\n",
}


@pytest.fixture(scope="session")
def checks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checks")
    (folder / "checks.py").write_text(CHECKS)
    for name, text in YAML.items():
        (folder / f"{name}.yaml").write_text(f"task: {name}\n{COMMON}{text}")
    return folder


@pytest.fixture
def options(checks, tmp_path):
    return TaskOptions(
        tasks=tuple(YAML), include_path=checks, num_threads=2, batch_size=3, cache=tmp_path / "cache"
    )


@pytest.fixture(scope="module")
def engine(tiny_store):
    config = EngineConfig(session_len=64, max_batch_size=4, num_threads=2)
    with TurbomindEngine(tiny_store, config) as engine:
        yield engine


def request(*args):
    from lm_eval.api.instance import Instance

    return Instance(request_type="", doc={}, arguments=args, idx=0)


def model_of(engine):
    from turbomill.reports.harness.model import EngineLM

    return EngineLM(engine, "tiny", 4)


async def log_q(engine, ids):
    """Slow and obvious: log-softmax of the engine's own logits, fp64."""
    logits = (await engine.logits(ids)).astype(np.float64)
    return (
        logits
        - np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1, keepdims=True))
        - logits.max(1, keepdims=True)
    )


async def slow_score(engine, context, continuation):
    ids = [*context, *continuation]
    rows = await log_q(engine, ids)
    at = range(len(context), len(ids))
    return sum(rows[i - 1, ids[i]] for i in at), all(rows[i - 1].argmax() == ids[i] for i in at)


def test_copies_hold_what_is_asked_for():
    for make in (data.copy_identifiers, data.copy_edits, data.copy_quotes):
        documents = make()["test"]
        assert len(documents) == data.COPIES and len(set(documents["context"])) == data.COPIES
        assert make()["test"][:] == documents[:], "the same every time"
        for document in documents:
            asked = document["context"].rsplit("\n\n", 1)[1]
            answer = document["answer"]
            assert "\n\n" not in answer  # which ends a generation
            if make is data.copy_edits:
                old, new = re.findall(r"with (\w+) renamed to (\w+)", asked)[0]
                assert answer.replace(new, old) in asked and answer.count(new) == 2 and old not in answer
            else:
                assert answer in asked
            assert data.judge_copy(document, [f" {answer}\n"]) == {"exact_match": 1.0}
            assert data.judge_copy(document, [answer[:-1]]) == {"exact_match": 0.0}


def test_passkeys_lie_at_their_depth():
    documents = data.passkey(200)["test"]
    assert len(documents) == data.KEYS * 3 and len(set(documents["answer"])) > 20
    for document in documents:
        text, key = document["context"], document["answer"]
        assert text.count(key) == 2 and 200 < len(text.split()) < 270
        before = text[: text.index("The pass key is")].split()
        assert abs(len(before) - len(data.TASK.split()) - 2 * document["depth"]) <= 1
    depth = f"depth_{documents[0]['depth']}"
    right = data.judge_passkey(documents[0], [f" {documents[0]['answer']}. Remember 1"])
    assert right == {"exact_match": 1.0, depth: 1.0}
    assert data.judge_passkey(documents[0], ["none"]) == {"exact_match": 0.0, depth: 0.0}


@pytest.mark.parametrize("operation", ["+", "-", "*"])
def test_sums_are_right(operation):
    documents = data.arithmetic(operation)["test"]
    assert len(documents) == data.SUMS
    for document in documents:
        for line in (document["context"] + document["answer"]).splitlines():
            asked, result = line.split("=")
            assert eval(asked) == int(result) >= 0


async def test_log_probabilities_are_the_engines_own(engine):
    """Against its logits, with the continuation that greedy decoding gives, and with others."""
    lm = model_of(engine)
    greedy = int((await engine.logits([70, 71, 72]))[-1].argmax())
    pairs = [([70, 71, 72], [greedy]), ([70, 71, 72], [greedy, 5]), ([9], [8, 7, 6]), ([1] * 40, [2] * 30)]
    found = [await lm._score(pair) for pair in pairs]
    # Of the last 63 of 70 tokens alone: one token of the session is left to be generated.
    expected = [await slow_score(engine, *pair) for pair in [*pairs[:3], ([1] * 33, [2] * 30)]]
    for (logprob, sure), (slow, right) in zip(found, expected, strict=True):
        assert logprob == pytest.approx(slow, abs=2e-4) and sure == right
    assert found[0][1] and lm.truncated == 1


def test_requests_are_batched_and_come_back_in_order(engine):
    lm = model_of(engine)
    texts = [("abc", " de"), ("", "xyz"), ("a ", "b"), *((f"n{i}", f"={i}") for i in range(9))]
    found = lm.loglikelihood([request(*pair) for pair in texts])
    alone = [lm.loglikelihood([request(*pair)])[0] for pair in texts]
    assert [sure for _, sure in found] == [sure for _, sure in alone]
    assert [p for p, _ in found] == pytest.approx([p for p, _ in alone], abs=1e-4)
    assert len({round(p, 3) for p, _ in found}) == len(texts)


async def test_whole_texts_are_scored_token_by_token(engine):
    """Each token once: the first 62 behind the prefix token, then as much context as there is room for."""
    import asyncio

    lm = model_of(engine)
    text = "the quick brown fox " * 5
    (found,) = await asyncio.to_thread(lm.loglikelihood_rolling, [request(text)])
    ids = lm.tok_encode(text)
    assert len(ids) == 100
    rows = await log_q(engine, [lm.prefix_token_id, *ids[:62]])
    slow = sum(rows[i, ids[i]] for i in range(62))
    window = ids[100 - 62 - 1 : 100]  # 63 tokens: the last 38 are new
    rows = await log_q(engine, window)
    slow += sum(rows[i - 1, window[i]] for i in range(63 - 38, 63))
    assert found == pytest.approx(slow, abs=1e-3)


def test_texts_end_at_stop_strings_and_limits(engine):
    lm = model_of(engine)
    (whole,) = lm.generate_until([request("abc", {"until": [], "max_gen_toks": 20})])
    assert 0 < len(whole) <= 20
    stop = whole[4]
    (cut,) = lm.generate_until([request("abc", {"until": [stop], "max_gen_toks": 20})])
    assert cut == whole[: whole.index(stop)]
    (short,) = lm.generate_until([request("abc", {"until": stop, "max_gen_toks": 3})])
    assert short == whole[:3]


@pytest.fixture(scope="module")
def in_process(tiny, checks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("in process")
    names = ",".join([*YAML, "turbomill_arithmetic"])
    arguments = ["eval", "tasks", str(tiny), "--tasks", names, "--include-path", str(checks), "--limit", "4"]
    arguments += ["--num-threads", "2", "--json"]
    result = CliRunner().invoke(cli, [*arguments, "--work-dir", str(folder)])
    assert result.exit_code == 0, result.output
    return arguments, json.loads(result.stdout), load_run(folder)


def test_results_lie_in_the_run(in_process):
    _, printed, run = in_process
    rows = {(row.task, row.metric): row for row in run.tasks}
    assert [row["task"] for row in printed["tasks"]] == [row.task for row in run.tasks]
    assert run.kind == "tasks" and run.model.name == printed["model"]["name"]
    text = rows["check_text", "digest"]
    assert len(set(text.items)) > 1 and text.value == pytest.approx(np.mean(text.items))
    assert text.stderr == pytest.approx(np.std(text.items, ddof=1) / math.sqrt(4)) and text.documents == 4
    assert rows["check_rolling", "byte_perplexity"].items is None  # no mean of the documents'
    assert rows["check_choice", "acc"].stderr is not None and rows["check_choice", "acc"].higher_is_better
    group = rows["turbomill_arithmetic", "acc"]
    assert group.group and group.documents == 12 and rows["turbomill_arithmetic_add", "acc"].documents == 4
    assert not rows["turbomill_arithmetic_add", "perplexity"].higher_is_better
    assert rows["turbomill_arithmetic_add", "acc"].version == "1.0"
    # The same documents, asked alike, and others.
    assert text.items_sha256 == rows["check_choice", "acc"].items_sha256
    assert text.items_sha256 != rows["turbomill_arithmetic_add", "acc"].items_sha256


def test_a_server_gives_the_same_numbers(in_process, tiny):
    """The harness's own `local-completions` against our HTTP server."""
    arguments, _, run = in_process
    with server(str(tiny), "served", ("--num-threads", "2", "--max-batch-size", "4")) as url:
        result = CliRunner().invoke(cli, [*arguments, "--base-url", url])
    assert result.exit_code == 0, result.output
    over_http = json.loads(result.stdout)["tasks"]
    assert len(over_http) == len(run.tasks) > 8
    for ours, theirs in zip(run.tasks, over_http, strict=True):
        assert (ours.task, ours.metric) == (theirs["task"], theirs["metric"])
        assert theirs["value"] == pytest.approx(ours.value, rel=1e-4), ours.task
        assert (ours.stderr is None) == (theirs["stderr"] is None)


def test_no_server(tiny, options):
    with pytest.raises(TurbomillError, match=r"127\.0\.0\.1:9.*no OpenAI-compatible server"):
        evaluate_tasks(str(tiny), TaskOptions(**{**vars(options), "base_url": "http://127.0.0.1:9/v1"}))


def test_interrupted_tasks_go_on(tiny, options, monkeypatch, tmp_path):
    """To the same numbers, asking only what was not answered."""
    generate = TurbomindEngine.generate
    asked, stop = [], None

    def counted(self, prompt, gen=None):
        if len(asked) == stop:
            raise EngineError("the engine died")
        asked.append(prompt)
        return generate(self, prompt, gen)

    monkeypatch.setattr(TurbomindEngine, "generate", counted)
    whole = evaluate_tasks(str(tiny), options)
    total, stop = len(asked), 7
    asked.clear()
    with pytest.raises(EngineError):
        evaluate_tasks(str(tiny), options, work_dir=tmp_path / "run")
    assert load_run(tmp_path / "run").status == "failed"
    (folder,) = options.cache.glob("unfinished-*")
    kept = len((folder / "answers.jsonl").read_text().splitlines())
    assert 0 < kept <= 7
    with (folder / "answers.jsonl").open("a") as file:
        file.write('["half a li')
    asked.clear()
    stop = None
    resumed = evaluate_tasks(str(tiny), options, work_dir=tmp_path / "run")
    assert len(asked) == total - kept and len(resumed.tasks) == len(whole.tasks)
    for one, other in zip(resumed.tasks, whole.tasks, strict=True):  # other batches round otherwise
        assert one.value == pytest.approx(other.value, rel=1e-5) and one.items == pytest.approx(other.items)
    assert not list(options.cache.glob("unfinished-*"))


def test_logits_that_are_nan_fail_the_run_by_name(tiny, options, monkeypatch, tmp_path):
    async def broken(self, prompt, gen=None):
        row = TokenLogprob(1, math.nan, ((1, math.nan),))
        yield GenerationOutput("", (1,), Usage(1, 1), "length", (), tuple([row] * (len(prompt) - 1)))

    monkeypatch.setattr(TurbomindEngine, "generate", broken)
    options = TaskOptions(**{**vars(options), "tasks": ("check_choice",)})
    with pytest.raises(LogitsError, match=r"text that begins with 'line \d.*NaN or inf"):
        evaluate_tasks(str(tiny), options, work_dir=tmp_path)
    run = load_run(tmp_path)
    assert run.status == "failed" and "NaN" in run.error and run.tasks == []


def test_unknown_tasks_are_refused_with_their_neighbours(checks):
    with pytest.raises(UsageError, match=r"--tasks turbomill_copi: .*did you mean turbomill_copy"):
        find.load_tasks(["turbomill_copi"])
    with pytest.raises(UsageError, match=r"--include-path .*no such directory"):
        find.load_tasks(["check_text"], checks / "nowhere")


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (
            ConnectionError("Couldn't reach 'somebody/some-set' on the Hub (offline)"),
            r"load_dataset\('somebody/some-set', 'part'\).*HF_HUB_OFFLINE=1; turbomill_offline needs no",
        ),
        (ImportError("No module named 'wonderwords'"), "needs a package that is missing.*wonderwords"),
    ],
)
def test_a_task_that_is_missing_offline_says_how_to_get_it(tmp_path, monkeypatch, error, told):
    import datasets

    (tmp_path / "far.yaml").write_text(
        "task: far\ndataset_path: somebody/some-set\ndataset_name: part\noutput_type: loglikelihood\n"
        "test_split: test\ndoc_to_text: a\ndoc_to_target: b\n"
    )

    def unreachable(*_, **__):
        raise error

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(TurbomillError, match=f"--tasks far: .*{told}"):
        find.load_tasks(["far"], tmp_path)


def test_the_harness_itself_may_be_missing(monkeypatch, tiny):
    monkeypatch.setattr(find.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'turbomill\[eval\]'"):
        evaluate_tasks(str(tiny))


@pytest.mark.parametrize(
    ("changes", "option"),
    [
        ({"tasks": ()}, "--tasks"),
        ({"tasks": ("a", "")}, "--tasks"),
        ({"limit": 0}, "--limit"),
        ({"num_fewshot": -1}, "--num-fewshot"),
        ({"batch_size": 0}, "--batch-size"),
    ],
)
def test_options_are_checked(changes, option):
    with pytest.raises(UsageError, match=option):
        TaskOptions(**changes)


def test_own_tasks_are_found_without_the_harness_index(monkeypatch):
    """Reading 14,000 task files takes seconds."""
    import lm_eval.tasks

    made = []
    manager = lm_eval.tasks.TaskManager

    def noted(**given):
        made.append(given.get("include_defaults", True))
        return manager(**given)

    monkeypatch.setattr(lm_eval.tasks, "TaskManager", noted)
    loaded = find.load_tasks(["turbomill_offline"])
    assert made == [False] and len(loaded["tasks"]) == 3 + 4 + 3


def task_run(name, items, sha="same", **changes):
    """A run of one task with these scores of its documents."""
    row = {
        **{"task": "t", "metric": "acc", "filter": "none", "value": float(np.mean(items)), "stderr": 0.1},
        **{"higher_is_better": True, "documents": len(items), "fewshot": 0, "version": "1"},
        **{"items": list(items), "items_sha256": sha, **changes},
    }
    return Run(kind="tasks", model=card(name), tasks=[TaskScore(**row)], provenance=PROVENANCE)


def compared(tmp_path, *runs):
    for number, run in enumerate(runs):
        save_run(run, tmp_path / str(number))
    paths = [str(tmp_path / str(number)) for number in range(len(runs))]
    return CliRunner().invoke(cli, ["eval", "compare", *paths, "--json"])


def test_models_are_compared_document_by_document(tmp_path):
    """Ten of a hundred lost is more than chance when the others stay; gained and lost alike it is none."""
    base = np.array([1.0] * 60 + [0.0] * 40)
    worse, same = base.copy(), base.copy()
    worse[:10] = 0
    same[:7], same[60:66] = 0, 1
    result = compared(tmp_path, task_run("a", base), task_run("b", worse), task_run("c", same))
    assert result.exit_code == 0, result.output
    found = {row["name"]: row for row in json.loads(result.stdout)["comparisons"]}
    assert found["b"]["verdict"] == "worse" and found["b"]["difference"] == pytest.approx(-0.1)
    assert found["c"]["verdict"] == "no difference shown" and found["b"]["metric"] == "t, acc"
    table = CliRunner().invoke(cli, ["eval", "compare", str(tmp_path / "0"), str(tmp_path / "1")])
    assert "worse" in table.output and "in nats" not in table.output
    # Where less is good, less is better.
    down = {"higher_is_better": False}
    result = compared(tmp_path, task_run("a", base, **down), task_run("b", worse, **down))
    assert json.loads(result.stdout)["comparisons"][0]["verdict"] == "better"


def test_other_documents_are_not_compared(tmp_path):
    result = compared(tmp_path, task_run("a", [1, 0]), task_run("b", [1, 0], "other"))
    assert "t was asked other documents" in str(result.exception)
    assert "a single run" in str(compared(tmp_path, task_run("a", [1, 0])).exception)
    lone = compared(tmp_path, task_run("a", [1]), task_run("b", [0]))
    assert "shares no task" in str(lone.exception)


def test_a_report_shows_tasks_and_their_regressions():
    base = [1.0] * 60 + [0.0] * 40
    run = task_run("a", base)
    view = report_view([run])
    (table,) = view.tables
    assert table.rows == (("t", "acc", "0.6000", "0.1000", "100", "0"),)
    assert view.summary == ["a: t acc 0.600 (standard error 0.100)."]
    lost = task_run("a", [0.0] * 10 + base[10:])
    assert [(c.metric, c.change) for c in against([lost], [run])] == [("t, acc", "worse")]
    # A document gained for every one lost: no regression, and neither is what is within the tolerance.
    moved = task_run("a", [0.0] * 9 + [1.0] * 57 + [0.0] * 34)
    assert [c.change for c in against([moved], [run])] == ["same"]
    loose = task_run("a", base, "same", higher_is_better=None)
    assert figures([loose]) == {}
