"""Turns to ids and masks, with small tokenizers made here: ids against transformers' own, masks against the replies written out by hand."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_tokenizers import CHATML, TEMPLATES, assistant, make_tokenizer, user, write

from mesp_mlx.data import tokens
from mesp_mlx.data.masks import assistant_spans, token_mask
from mesp_mlx.data.tokens import TokenSet, decode, encode
from mesp_mlx.errors import UserError

PROMPT = [{"role": "user", "content": "What is the sea?"}]


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """A function from a template's name to (model folder, tokenizer)."""
    made = {}

    def get(name, **options):
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            tokenizer = make_tokenizer(TEMPLATES.get(name), metaspace=name == "mistral", **options)
            tokenizer.save_pretrained(folder)
            made[name] = folder, tokenizer
        return made[name]

    return get


@pytest.fixture
def child_here(monkeypatch):
    """The child's work done in this process, which is quicker; gives the list of the requests made."""
    requests = []

    def serve(request):
        requests.append(request)
        return json.loads(json.dumps(tokens._serve(json.loads(json.dumps(request)))))

    monkeypatch.setattr(tokens, "_ask_child", serve)
    return requests


def supervised(tokenizer, ids, mask):
    """The text of every run of supervised tokens."""
    runs, previous = [], 0
    for token, bit in zip(ids, mask, strict=True):
        if bit and not previous:
            runs.append([])
        if bit:
            runs[-1].append(int(token))
        previous = bit
    return [tokenizer.decode(run, clean_up_tokenization_spaces=False) for run in runs]


def masked(tokenizer, messages, tools=None):
    """What the child does with one row, in this process: (ids, mask)."""

    def render(part, add_generation_prompt=False):
        return tokenizer.apply_chat_template(part, tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt)

    text = render(messages)
    ((ids, ends),) = tokens._tokenize(tokenizer, [text], chat=True)
    assert ends is not None
    return ids, token_mask(ids, ends, text, assistant_spans(render, messages, text), {*tokenizer.added_tokens_decoder})


CALL = {"type": "function", "function": {"name": "clock", "arguments": {}}}
CALLED = '{"name": "clock", "arguments": {}}'
THREE = [user("Hi."), assistant("Hello there!"), user("Time?"), assistant("It is noon. ☀️"), user("Bye"), assistant("Good-bye,\n\nfriend.")]
SYSTEM = {"role": "system", "content": "The sea is calm."}
THOUGHT = [user("Hi."), assistant("<think>\na\n</think>\n\nHello there!"), user("Time?"), assistant("<think>\nnoon\n</think>\n\nIt is noon.")]
TOOLS = [user("Time?"), assistant(None, tool_calls=[CALL]), {"role": "tool", "content": "noon"}, assistant("Noon."), user("And now?"), assistant("Late.")]


@pytest.mark.parametrize(
    "name, messages, expected",
    [
        ("chatml", THREE, ["Hello there!<|im_end|>", "It is noon. ☀️<|im_end|>", "Good-bye,\n\nfriend.<|im_end|>"]),
        ("chatml", [SYSTEM, *THREE[:2]], ["Hello there!<|im_end|>"]),
        ("chatml", [assistant("Hello"), *THREE[:2]], ["Hello<|im_end|>", "Hello there!<|im_end|>"]),
        ("chatml", [user("Hi."), assistant("One."), assistant("Two.")], ["One.<|im_end|>", "Two.<|im_end|>"]),
        ("chatml", [user("Hi."), assistant("")], ["<|im_end|>"]),
        ("chatml", THREE[:3], ["Hello there!<|im_end|>"]),
        ("chatml", [user("assistant\nHello there!"), assistant("Hello there!")], ["Hello there!<|im_end|>"]),
        ("chatml", [user("Hi.")], []),
        ("chatml", TOOLS, [f"<tool_call>{CALLED}</tool_call><|im_end|>", "Noon.<|im_end|>", "Late.<|im_end|>"]),
        ("llama", [SYSTEM, *THREE], ["Hello there!<|eot|>", "It is noon. ☀️<|eot|>", "Good-bye,\n\nfriend.<|eot|>"]),
        ("llama", [user(" Hi. "), assistant("\n Hello ")], ["Hello<|eot|>"]),
        ("mistral", THREE[:2], ["Hello there!</s>"]),
        ("mistral", [SYSTEM, *THREE[:2], user("Time?"), assistant("It is noon.")], ["Hello there!</s>", "It is noon.</s>"]),
        ("qwen", THREE, ["Hello there!<|im_end|>", "It is noon. ☀️<|im_end|>", "<think>\n\n</think>\n\nGood-bye,\n\nfriend.<|im_end|>"]),
        ("qwen", THOUGHT, ["Hello there!<|im_end|>", "<think>\nnoon\n</think>\n\nIt is noon.<|im_end|>"]),
        ("qwen", TOOLS, [f"<tool_call>\n{CALLED}\n</tool_call><|im_end|>", "Noon.<|im_end|>", "<think>\n\n</think>\n\nLate.<|im_end|>"]),
        ("qwen", TOOLS[:4], [f"<tool_call>\n{CALLED}\n</tool_call><|im_end|>", "<think>\n\n</think>\n\nNoon.<|im_end|>"]),
        (
            "qwen",
            [user("?"), assistant("Hm.", tool_calls=[CALL]), *TOOLS[2:]],
            [f"Hm.\n<tool_call>\n{CALLED}\n</tool_call><|im_end|>", "Noon.<|im_end|>", "<think>\n\n</think>\n\nLate.<|im_end|>"],
        ),
        ("deepseek", [user("Hi."), assistant("a</think>Hello"), user("Hi"), assistant("Hello")], ["Hello</s>", "Hello</s>"]),
        ("plain", THREE[:2] + [user("Bye")], ["Hello there!\n"]),
    ],
)
def test_each_assistant_turn_is_supervised_with_the_token_that_ends_it(models, name, messages, expected):
    _, tokenizer = models(name)
    ids, mask = masked(tokenizer, messages)
    assert ids == tokenizer.apply_chat_template(messages, return_dict=False)
    assert mask.dtype == np.uint8 and supervised(tokenizer, ids, mask) == expected


CONTENT = st.text(st.sampled_from("ab .\n!é☀") | st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=12).filter(
    lambda s: s == s.strip()
)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(st.sampled_from(["chatml", "llama", "qwen"]), st.lists(st.tuples(CONTENT, CONTENT), min_size=1, max_size=3))
def test_any_conversation_is_supervised_exactly_on_its_replies(models, name, pairs):
    _, tokenizer = models(name)
    messages = [turn for question, answer in pairs for turn in (user(question), assistant(answer))]
    ids, mask = masked(tokenizer, messages)
    closing = {"chatml": "<|im_end|>", "llama": "<|eot|>", "qwen": "<|im_end|>"}[name]
    expected = [answer + closing for _, answer in pairs]
    if name == "qwen":
        expected[-1] = "<think>\n\n</think>\n\n" + expected[-1]
    assert supervised(tokenizer, ids, mask) == expected
    assert ids == tokenizer.apply_chat_template(messages, return_dict=False)


def test_a_turn_that_cannot_be_placed_is_named():
    def render(messages, add_generation_prompt=False):
        return f"{len(messages)} turns of {sum(len(m['content']) for m in messages)} letters"

    with pytest.raises(LookupError) as caught:
        assistant_spans(render, THREE, render(THREE))
    assert caught.value.args == (2,)


def test_a_file_of_rows_end_to_end(models, tmp_path):
    """The child, the cache and the rows it gives back; 300 rows are more than one batch."""
    folder, tokenizer = models("chatml")
    rows = [
        {"messages": THREE},
        {"prompt": "Hi.", "completion": "Hello there!"},
        {"text": "The sea is calm."},
        {"text": "The tide.</s>"},
        {"messages": TOOLS, "tools": [CALL]},
    ]
    file = write(tmp_path / "train.jsonl", rows * 60)
    found = encode(folder, {"train": file, "valid": None}, tmp_path / "cache", prompt=PROMPT)
    assert found.sets.keys() == {"train"}
    train = found.sets["train"]
    assert len(train) == 300 and train.ids.dtype == np.int32 and train.mask.dtype == np.uint8 and train.offsets.dtype == np.int64
    expected_ids = [
        tokenizer.apply_chat_template(THREE, return_dict=False),
        tokenizer.apply_chat_template([user("Hi."), assistant("Hello there!")], return_dict=False),
        [*tokenizer.encode("The sea is calm."), tokenizer.eos_token_id],
        tokenizer.encode("The tide.</s>"),
        tokenizer.apply_chat_template(TOOLS, tools=[CALL], return_dict=False),
    ]
    for i in range(300):
        ids, mask = train.row(i)
        assert ids.tolist() == expected_ids[i % 5] and len(mask) == len(ids) and mask[0] == 0
    assert supervised(tokenizer, *train.row(1)) == ["Hello there!<|im_end|>"]
    assert train.row(2)[1].tolist() == [0] + [1] * (len(expected_ids[2]) - 1)
    assert found.prompt_ids == tokenizer.apply_chat_template(PROMPT, add_generation_prompt=True, return_dict=False)
    assert found.stop_ids == [tokenizer.eos_token_id]

    cut_ids, cut_mask = train.row(5, limit=10)
    assert cut_ids.tolist() == expected_ids[0][:10] and cut_mask.tolist() == train.row(5)[1][:10].tolist()
    assert train.lengths(10).tolist() == [min(10, len(ids)) for ids in expected_ids] * 60
    for limit in (None, 10):
        assert train.supervised(limit).tolist() == [int(train.row(i, limit)[1].sum()) for i in range(300)]

    assert decode(folder, [found.prompt_ids, train.row(3)[0].tolist()]) == ["user\nWhat is the sea?\nassistant\n", "The tide."]


def test_the_cache_is_keyed_by_content_and_rebuilt_when_broken(models, tmp_path, child_here):
    folder, _ = models("chatml")
    train = write(tmp_path / "train.jsonl", [{"messages": THREE}] * 3)
    same = write(tmp_path / "valid.jsonl", [{"messages": THREE}] * 3)
    cache = tmp_path / "cache"
    first = encode(folder, {"train": train, "valid": same}, cache, prompt=PROMPT)
    assert [[job["file"] for job in request["jobs"]] for request in child_here] == [[str(train), str(same)]]
    assert first.sets["valid"].row(2)[0].tolist() == first.sets["train"].row(0)[0].tolist()
    again = encode(folder, {"train": same}, cache, prompt=PROMPT)
    assert len(child_here) == 1 and again.prompt_ids == first.prompt_ids and isinstance(again.sets["train"].ids, np.memmap)
    assert not list(cache.glob("unfinished*"))

    (entry,) = (path for path in cache.iterdir() if path.is_dir())
    for damage in (lambda: (entry / "mask.npy").unlink(), lambda: os.truncate(entry / "ids.npy", 200), lambda: np.save(entry / "offsets.npy", np.arange(4))):
        damage()
        assert encode(folder, {"train": train}, cache, prompt=PROMPT).sets["train"].row(1)[0].tolist() == first.sets["train"].row(1)[0].tolist()
    assert len(child_here) == 4

    all_tokens = encode(folder, {"train": train}, cache, prompt=PROMPT, mask_prompt=False).sets["train"]
    assert len(child_here) == 5 and all_tokens.row(1)[1].tolist() == [0] + [1] * (int(all_tokens.lengths()[1]) - 1)
    write(train, [{"messages": THREE}] * 2)
    assert len(encode(folder, {"train": train}, cache, prompt=PROMPT).sets["train"]) == 2
    (folder / "chat_template.jinja").write_text(CHATML.replace("<|im_end|>", "<|eot|>"))
    assert (
        len(child_here) == 6
        and encode(folder, {"train": train}, cache, prompt=PROMPT).sets["train"].row(0)[0].tolist() != first.sets["train"].row(0)[0].tolist()
    )
    (folder / "chat_template.jinja").write_text(CHATML)


@pytest.mark.parametrize(
    "name, rows, expected",
    [
        (
            "mistral",
            [{"messages": THREE[:2]}, {"messages": [user("a"), user("b")]}],
            "{file}:2: the model's chat template can't take this row: Roles must alternate user/assistant.",
        ),
        ("bare", [{"text": "a"}, {"messages": THREE}], "{file}:2: this row is a chat, but the tokenizer in {folder} has no chat template"),
        ("chatml", [{"messages": THREE}, {"nothing": 1}], '{file}:2: this row has none of the known sets of keys. Found "nothing"'),
        ("chatml", [], "{file}: the file holds no rows"),
    ],
)
def test_a_row_the_child_cannot_take_is_one_clear_message(models, tmp_path, child_here, name, rows, expected):
    folder, _ = models(name)
    file = write(tmp_path / "train.jsonl", rows)
    with pytest.raises(UserError) as caught:
        encode(folder, {"train": file}, tmp_path / "cache", prompt=PROMPT)
    assert expected.format(file=file, folder=folder) in str(caught.value)
    assert list((tmp_path / "cache").iterdir()) == []  # nothing half-written is left


def test_without_a_chat_template_texts_train_and_the_prompt_is_their_like(models, tmp_path, child_here):
    folder, tokenizer = models("bare-bos", bos=True)
    file = write(tmp_path / "train.jsonl", [{"text": "The sea"}])
    found = encode(folder, {"train": file}, tmp_path / "cache", prompt=PROMPT)
    assert encode(folder, {"train": file}, tmp_path / "cache", prompt=[]).prompt_ids == []
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    plain = tokenizer.encode("The sea", add_special_tokens=False)
    assert found.sets["train"].row(0)[0].tolist() == [bos, *plain, eos]
    assert found.prompt_ids == [bos, *tokenizer.encode(PROMPT[0]["content"], add_special_tokens=False)]


def test_missing_and_broken_tokenizers(tmp_path):
    file = write(tmp_path / "train.jsonl", [{"text": "a"}])
    (tmp_path / "model").mkdir()
    with pytest.raises(UserError, match="found neither tokenizer.json nor any other tokenizer file"):
        encode(tmp_path / "model", {"train": file}, tmp_path / "cache", prompt=PROMPT)
    (tmp_path / "model" / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match="^Reading the tokenizer in"):  # from the real child
        encode(tmp_path / "model", {"train": file}, tmp_path / "cache", prompt=PROMPT)


def test_a_tokenizer_without_offsets_is_read_by_decoding(tmp_path):
    from transformers import ByT5Tokenizer

    tokenizer = ByT5Tokenizer(extra_ids=0, additional_special_tokens=["<|im_start|>", "<|im_end|>"])
    tokenizer.chat_template = CHATML
    assert not tokenizer.is_fast
    ids, mask = masked(tokenizer, THREE)
    assert supervised(tokenizer, ids, mask) == ["Hello there!<|im_end|>", "It is noon. ☀️<|im_end|>", "Good-bye,\n\nfriend.<|im_end|>"]


def test_a_tokenizer_that_decodes_to_another_text_gives_no_ends():
    class Lossy:
        def decode(self, ids, clean_up_tokenization_spaces):
            return "".join(map(chr, ids)).lower()

    assert tokens._ends_by_decoding(Lossy(), [65, 98], "Ab") is None
    ends = tokens._ends_by_decoding(Lossy(), [97, 98], "ab")
    assert ends is not None and ends.tolist() == [1, 2]


def test_stop_ids_are_the_tokenizers_and_the_settings(tmp_path, models):
    _, tokenizer = models("chatml")
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 3]}')
    (tmp_path / "config.json").write_text('{"eos_token_id": 3}')
    assert tokens._stop_ids(tokenizer, tmp_path) == sorted({3, 5, tokenizer.eos_token_id})


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.integers(1, 12))
def test_blocks_cover_every_row_once_in_bounded_pieces(lengths, budget):
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
    rows = TokenSet(np.zeros(offsets[-1], np.int32), np.zeros(offsets[-1], np.uint8), offsets)
    blocks = list(rows.blocks(budget))
    assert [i for block in blocks for i in range(*block)] == list(range(len(rows)))
    assert all(offsets[j] - offsets[i] <= budget or j == i + 1 for i, j in blocks)


def test_this_process_never_imports_transformers():
    code = "import sys, mesp_mlx.data.tokens, mesp_mlx.data.batches; assert not {'transformers', 'tokenizers', 'mlx'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
