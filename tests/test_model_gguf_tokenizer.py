"""Tokenizers trained here, put into GGUF metadata and read back, against themselves: pre-tokenizers as transformers has them, SentencePiece's own encoder."""

import json

import gguf
import numpy as np
import pytest
from gguf_files import WIDTH, random_weights, write_gguf
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from mesp_mlx.errors import UserError
from mesp_mlx.model import gguf as ours
from mesp_mlx.model import gguf_tokenizer

TEXT = (
    """The quick brown fox jumps over the lazy dog. It's 1234567 o'clock, they'll say: don't WE'LL go?
    def area(radius):\n        return 3.14159 * radius ** 2  # naïve café\n\n\n— “Ünïcödé” 日本語 😀 end of the text, the end.\n"""
    * 3
)
NASTY = [
    "Hello world", "  two  spaces", " lead", "trail  ", "a\n\n\nb\t\tc \n d", "I'm we'll THEY'RE don't", "12345 3.14 x2y", "naïve — “q” …", "日本語 テスト",
    "😀👩‍👧", "def f(x):\n    return x**2\n", "\r\nwin\r\n", "مرحبا ١٢٣", "e\u0301 \u00a0nbsp", "", "A", "   \n  \n", "<s>x</s>", "the<|end|>the",
    "a<keep>b", "a <keep> b",
]  # fmt: skip


def byte_level_metadata(tokenizer, pre, special=("<|end|>",)):
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda pair: pair[1])
    types = [gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL for token, _ in vocabulary]
    merges = [" ".join(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]
    ids = {"eos": dict(vocabulary)[special[0]]}
    return {"model": "gpt2", "pre": pre, "tokens": [token for token, _ in vocabulary], "types": types, "merges": merges, "ids": ids}


def trained(split, **settings):
    tokenizer = Tokenizer(models.BPE(**settings))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(split)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator([TEXT], trainers.BpeTrainer(vocab_size=400, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False))
    return tokenizer


def built(metadata):
    """The tokenizer that the converted files describe."""
    keys = {"tokens": "tokens", "types": "token_type", "merges": "merges", "scores": "scores", "model": "model", "pre": "pre"}
    flat = {f"tokenizer.ggml.{keys[key]}": value for key, value in metadata.items() if key in keys}
    flat |= {f"tokenizer.ggml.{name}_token_id": value for name, value in metadata.get("ids", {}).items()}
    return Tokenizer.from_str(json.dumps(gguf_tokenizer.files(flat | metadata.get("more", {}), "test")["tokenizer.json"]))


def regex_split(regex):
    return [pre_tokenizers.Split(Regex(regex), behavior="isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]


def byte_level_truths():
    from transformers.convert_slow_tokenizer import TikTokenConverter
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    llama3 = TikTokenConverter.__init__.__defaults__[1]
    return {
        "gpt-2": [byte_level], "default": [byte_level], "smollm": [pre_tokenizers.Digits(individual_digits=True), byte_level],
        "llama-bpe": regex_split(llama3), "qwen2": regex_split(PRETOKENIZE_REGEX),
    }  # fmt: skip


@pytest.mark.parametrize("pre", ["gpt-2", "default", "smollm", "llama-bpe", "qwen2"])
def test_byte_level_tokenizers_cut_text_as_transformers_does(pre):
    pytest.importorskip("transformers")
    truth = trained(byte_level_truths()[pre], ignore_merges=pre == "llama-bpe")
    got = built(byte_level_metadata(truth, pre))
    for text in [*NASTY, TEXT]:
        want = truth.encode(text)
        if pre == "qwen2" and "e\u0301" in text:
            continue  # qwen2 composes first, as its own tokenizer does; `trained` has no normaliser
        assert got.encode(text).ids == want.ids, text
        assert got.decode(want.ids, skip_special_tokens=False) == truth.decode(want.ids, skip_special_tokens=False)


def test_the_end_token_is_special_and_whole():
    got = built(byte_level_metadata(trained([pre_tokenizers.ByteLevel(add_prefix_space=False)]), "gpt-2"))
    assert got.encode("the<|end|>the").tokens.count("<|end|>") == 1
    assert got.get_added_tokens_decoder()[0].special


def test_bos_is_added_when_the_metadata_or_the_family_says_so():
    metadata = byte_level_metadata(trained([pre_tokenizers.ByteLevel(add_prefix_space=False)]), "gpt-2")
    metadata["ids"]["bos"] = 0
    assert built(metadata).encode("the").ids[0] != 0
    assert built(metadata | {"more": {"tokenizer.ggml.add_bos_token": True}}).encode("the").ids[0] == 0
    assert built(metadata | {"pre": "llama-bpe"}).encode("the").ids[0] == 0
    assert built(metadata | {"pre": "llama-bpe", "more": {"tokenizer.ggml.add_bos_token": False}}).encode("the").ids[0] != 0
    assert built(metadata | {"pre": "llama-bpe"}).encode("the", "dog").ids.count(0) == 2


@pytest.fixture(scope="module")
def sentencepiece_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sp")
    sentencepiece = pytest.importorskip("sentencepiece")
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text.txt"), model_prefix=str(folder / "m"), model_type="bpe", vocab_size=480, byte_fallback=True, character_coverage=0.98,
        normalization_rule_name="identity", remove_extra_whitespaces=False, user_defined_symbols=["<keep>"], minloglevel=2,
    )  # fmt: skip
    return sentencepiece.SentencePieceProcessor(model_file=str(folder / "m.model"))


def sentencepiece_metadata(model):
    ids = range(model.get_piece_size())
    kinds = [(model.is_unknown, 2), (model.is_control, 3), (model.is_byte, 6), (model.is_unused, 5)]
    types = [4 if model.id_to_piece(i) == "<keep>" else next((kind for test, kind in kinds if test(i)), 1) for i in ids]
    return {
        "model": "llama", "tokens": [model.id_to_piece(i) for i in ids], "scores": [model.get_score(i) for i in ids], "types": types,
        "ids": {"bos": model.bos_id(), "eos": model.eos_id(), "unk": model.unk_id()},
    }  # fmt: skip


def test_sentencepiece_tokenizers_encode_as_sentencepiece_does(sentencepiece_model):
    got = built(sentencepiece_metadata(sentencepiece_model))
    for text in [text for text in [*NASTY, *TEXT.splitlines()] if "<" not in text and text]:
        want = sentencepiece_model.encode(text)
        assert got.encode(text, add_special_tokens=False).ids == want, text
        assert got.encode(text).ids == [sentencepiece_model.bos_id(), *want]
        assert got.decode(want) == sentencepiece_model.decode(want) == text, text


def test_sentencepiece_ids_that_are_not_said_are_its_own(sentencepiece_model):
    said = sentencepiece_metadata(sentencepiece_model)
    assert built(said | {"ids": {}}).to_str() == built(said).to_str()


def test_sentencepiece_added_tokens_stay_whole(sentencepiece_model):
    got = built(sentencepiece_metadata(sentencepiece_model))
    assert "<keep>" in got.encode("fox<keep>dog").tokens and "<s>" in got.encode("<s>fox", add_special_tokens=False).tokens
    added = {token.content: token.special for token in got.get_added_tokens_decoder().values()}
    assert added == {"<unk>": True, "<s>": True, "</s>": True, "<keep>": False}


def test_tokenizers_that_are_not_served_are_refused_by_name():
    metadata = byte_level_metadata(trained([pre_tokenizers.ByteLevel(add_prefix_space=False)]), "tekken")
    with pytest.raises(UserError, match="'tekken'.*smollm"):
        built(metadata)
    with pytest.raises(UserError, match="'bert'"):
        built(metadata | {"model": "bert"})
    with pytest.raises(UserError, match="no scores"):
        built(metadata | {"model": "llama"})
    with pytest.raises(UserError, match="kind None"):
        gguf_tokenizer.files({}, "m.gguf")


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_transformers_loads_the_tokenizer_with_its_template(tmp_path, sentencepiece_model, kind):
    transformers = pytest.importorskip("transformers")
    byte_level = byte_level_metadata(trained([pre_tokenizers.ByteLevel(add_prefix_space=False)]), "smollm")
    metadata = byte_level if kind == "gpt2" else sentencepiece_metadata(sentencepiece_model)
    size = len(metadata["tokens"])
    weights = random_weights() | {"model.embed_tokens.weight": np.ones((size, WIDTH), np.float32)}
    template = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + eos_token }}{% endfor %}"
    folder = tmp_path / "model"
    folder.mkdir()
    ours.convert(write_gguf(tmp_path / "m.gguf", weights, tokenizer=metadata, chat_template=template), folder)
    loaded, plain = transformers.AutoTokenizer.from_pretrained(folder), Tokenizer.from_file(str(folder / "tokenizer.json"))
    end = "<|end|>" if kind == "gpt2" else "</s>"
    assert loaded.eos_token == end and loaded.model_max_length == 512 and len(loaded) == size
    for text in NASTY:
        assert loaded(text)["input_ids"] == plain.encode(text).ids, text
        assert loaded.decode(loaded(text)["input_ids"]) == plain.decode(plain.encode(text).ids, skip_special_tokens=False)
    assert loaded.apply_chat_template([{"role": "user", "content": "fox"}], tokenize=False) == f"user: fox{end}"
