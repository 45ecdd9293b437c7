"""Where texts come from: Python's own topics, files of every kind, the hub's names."""

import json

import pytest
import torch

from turbomill.calib_data import check_name, known_names, load_texts, load_windows, token_ids
from turbomill.errors import TurbomillError, UsageError


class Words:
    """A tokenizer of characters, with a chat template."""

    chat_template = "yes"

    def __call__(self, text, add_special_tokens=True, **_kwargs):
        return {"input_ids": ([7] if add_special_tokens else []) + [ord(c) for c in text]}

    def apply_chat_template(self, chat, tokenize):
        assert tokenize is False
        return "".join(f"[{m['role']}]{m['content']}" for m in chat)


def test_builtin_is_pythons_topics_split_in_even_and_odd():
    from pydoc_data.topics import topics

    keys = sorted(topics)
    assert load_texts("builtin") == [topics[k] for k in keys[::2]]
    assert load_texts("builtin", "evaluation") == [topics[k] for k in keys[1::2]]


def test_builtin_windows_follow_the_published_recipe():
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[k] for k in sorted(topics)[1::2])
    ids = [ord(c) for c in text]
    made = load_windows("builtin", Words(), 24, 1024, split="evaluation")
    step = len(ids) // 24
    assert made.ids.tolist() == [ids[i * step : i * step + 1024] for i in range(24)]
    assert made.source == "builtin" and made.split == "evaluation" and len(made.fingerprint) == 64


def test_sets_joined_by_commas_share_the_samples(tmp_path):
    other = tmp_path / "other.txt"
    other.write_text("z" * 500)
    made = load_windows(f"builtin,{other}", Words(), 7, 50)
    builtin, own = load_windows("builtin", Words(), 4, 50), load_windows(str(other), Words(), 3, 50)
    assert made.ids.tolist() == builtin.ids.tolist() + own.ids.tolist()
    assert made.source == f"builtin,{other}"
    with pytest.raises(UsageError, match="--calib-samples 1: expected at least one for each"):
        load_windows(f"builtin,{other}", Words(), 1, 50)
    with pytest.raises(TurbomillError, match="500 tokens of text, less than one window of 600"):
        load_windows(f"builtin,{other}", Words(), 4, 600)
    with pytest.raises(UsageError, match="nowhere: no such file"):
        check_name("builtin,nowhere")


def test_limit_stops_reading():
    assert 1 <= len(load_texts("builtin", limit=100)) < len(load_texts("builtin"))


def test_txt_jsonl_parquet_and_folder(tmp_path):
    import pyarrow
    import pyarrow.parquet as parquet

    (tmp_path / "sub").mkdir()
    (tmp_path / "a.txt").write_text("plain ü", encoding="utf-8")
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    sharegpt = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    rows = [{"text": "one"}, {"content": "two"}, {"messages": chat}, {"conversations": sharegpt}]
    lines = "\n".join(json.dumps(row) for row in rows)
    (tmp_path / "sub" / "b.jsonl").write_text(lines + "\n\n", encoding="utf-8")
    parquet.write_table(pyarrow.Table.from_pylist([{"text": "p1"}, {"text": "p2"}]), tmp_path / "c.parquet")
    parquet.write_table(pyarrow.Table.from_pylist([{"messages": chat}]), tmp_path / "sub" / "d.parquet")
    (tmp_path / "ignored.md").write_text("no")
    rendered = ["one", "two", "[user]hi[assistant]yo", "[user]q[assistant]a"]
    assert load_texts(str(tmp_path / "sub" / "b.jsonl"), tokenizer=Words()) == rendered
    assert load_texts(str(tmp_path / "c.parquet")) == ["p1", "p2"]
    everything = load_texts(str(tmp_path), tokenizer=Words())
    assert everything == ["plain ü", "p1", "p2", *rendered, "[user]hi[assistant]yo"]
    assert token_ids(Words(), ["ab", "c"]).tolist() == [97, 98, 10, 10, 99]  # blank line, no special token


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"text": "x"}\n{"text": ', r"a\.jsonl:2: not a JSON document"),
        ("a.jsonl", '{"question": "x"}', r"a\.jsonl:1: none of the fields text, content, .* found question"),
        ("a.jsonl", "[1]", r"a\.jsonl:1: expected a JSON object, found list"),
        ("a.jsonl", '{"messages": [{"role": "user"}]}', r"a\.jsonl:1: a message needs a role and a content"),
        ("a.txt", "", r"a\.txt: the file is empty"),
        ("a.txt", " \n ", r"a\.txt: no text in it"),
        ("a.parquet", "not parquet", r"a\.parquet: not a readable parquet file"),
        ("a.csv", "x", r"a\.csv: unknown kind of file, expected \.txt, \.jsonl, \.parquet"),
    ],
)
def test_bad_files_are_one_line_that_names_the_place(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(TurbomillError, match=message) as caught:
        load_texts(str(tmp_path / name), tokenizer=Words())
    assert "\n" not in str(caught.value)


def test_not_utf8(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"caf\xe9")
    with pytest.raises(TurbomillError, match=r"a\.txt: not UTF-8 text \(byte 3\)"):
        load_texts(str(tmp_path / "a.txt"))


def test_chat_without_a_template(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"messages": [{"role": "user", "content": "x"}]}')
    with pytest.raises(TurbomillError, match="chat template"):
        load_texts(str(tmp_path / "a.jsonl"))


def test_empty_folder(tmp_path):
    with pytest.raises(TurbomillError, match=r"no \.txt, \.jsonl, \.parquet file in this folder"):
        load_texts(str(tmp_path))


def test_unknown_name_lists_the_known_ones():
    for name in (
        "builtin",
        "self",
        "free",
        "wikitext2",
        "c4",
        "ptb",
        "pileval",
        "gsm8k",
        "open-platypus",
        "openwebtext",
    ):
        assert name in known_names()
        check_name(name)
    with pytest.raises(UsageError, match="--calib-dataset wikitext3: no such file, and not one of builtin"):
        load_texts("wikitext3")


def test_bad_sizes():
    with pytest.raises(UsageError, match="--calib-samples 0"):
        load_windows("builtin", Words(), 0, 10)


def rows_of(monkeypatch, rows):
    import datasets

    from turbomill.calib_data import hub

    asked = {}

    def load_dataset(repo, config, **kwargs):
        asked.update(repo=repo, config=config, **kwargs)
        return iter(rows)

    monkeypatch.setattr(hub, "_check_reachable", lambda: None)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return asked


def test_hub_set_with_two_splits(monkeypatch):
    asked = rows_of(monkeypatch, [{"question": "1+1?", "answer": "2"}])
    assert load_texts("gsm8k", "evaluation") == ["1+1?\n2"]
    assert asked["repo"] == "openai/gsm8k" and asked["split"] == "test" and asked["streaming"] is True


def test_hub_set_with_one_split_is_shared_out(monkeypatch):
    rows_of(monkeypatch, [{"text": str(i)} for i in range(5)])
    assert load_texts("pileval") == ["0", "2", "4"]
    rows_of(monkeypatch, [{"text": str(i)} for i in range(5)])
    assert load_texts("pileval", "evaluation") == ["1", "3"]


def test_hub_without_a_network_is_one_line(monkeypatch):
    from turbomill.calib_data import hub

    def unreachable():
        raise OSError("Name or service not known")

    monkeypatch.setattr(hub, "_check_reachable", unreachable)
    with pytest.raises(
        TurbomillError, match=r"cannot read allenai/c4 .*use builtin, self, or a local"
    ) as caught:
        load_texts("c4")
    assert "\n" not in str(caught.value)


def test_self_sampling_is_seeded_goes_on_past_eos_and_follows_the_model():
    from transformers import LlamaConfig, LlamaForCausalLM

    from turbomill.calib_data.sampling import sample_ids

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.lm_head.weight *= 40  # sharp: sampled tokens are likely ones
    a, b, c = (sample_ids(model, 5, 20, seed, batch_size=2) for seed in (3, 3, 4))
    assert a.shape == (5, 20) and torch.equal(a, b) and not torch.equal(a, c)
    assert (a[:, 0] == 1).all() and a[:, 1].unique().numel() > 1
    with torch.no_grad():
        chances = model(a).logits[:, 1:-1].log_softmax(-1)  # with no cache: what it should have sampled from
    openings = torch.arange(3, 63).reshape(3, 20)  # of pieces of 128 tokens
    d, e = (sample_ids(model, 2, 300, 3, batch_size=size, openings=openings) for size in (4, 4))
    assert d.shape == (2, 300) and torch.equal(d, e)
    for row, column, opening in ((0, 0, 0), (0, 128, 1), (0, 256, 2), (1, 0, 0), (1, 128, 1)):
        assert torch.equal(d[row, column : column + 20], openings[opening])
    assert not torch.equal(d[0, 20:128], d[1, 20:128])
    given = chances.gather(-1, a[:, 2:, None]).mean()
    assert float(given) > float(chances.mean()) + 1
