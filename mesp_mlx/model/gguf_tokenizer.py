"""The tokenizer that a GGUF file's metadata describes, as Hugging Face's tokenizer.json and tokenizer_config.json.

Two kinds: byte-level BPE with its merges (tokenizer.ggml.model "gpt2"), split into words by the rule that
tokenizer.ggml.pre names, and SentencePiece BPE with scores ("llama"), whose merges are recovered from the scores.
"""

from collections.abc import Mapping
from typing import Any

from mesp_mlx.errors import UserError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # tokenizer.ggml.token_type
SPACE = "\u2581"

# How text is cut before merging, as the models' own tokenizer.json say it.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3, _QWEN2, _GPT2, _SMOLLM = _WORDS % "{1,3}", _WORDS % "", "gpt-2", "smollm"
RULES = {
    "llama-bpe": _LLAMA3, "llama3": _LLAMA3, "llama-v3": _LLAMA3, "smaug-bpe": _LLAMA3,
    "qwen2": _QWEN2, "deepseek-r1-qwen": _QWEN2, "gpt-2": _GPT2, "default": _GPT2, "smollm": _SMOLLM,
}  # fmt: skip


def token_ids(metadata: Mapping[str, Any], name: str) -> list[int]:
    """Ids of a special token, "bos", "eos" (also those that end a turn), "unk" or "pad"; empty if there is none."""
    keys = {"bos": ["bos"], "eos": ["eos", "eot", "eom"], "unk": ["unknown"], "pad": ["padding"]}[name]
    count = len(metadata.get("tokenizer.ggml.tokens", ()))
    unsaid = {"unknown": 0, "bos": 1, "eos": 2} if metadata.get("tokenizer.ggml.model") == "llama" else {}  # SentencePiece's own
    found = [metadata.get(f"tokenizer.ggml.{key}_token_id", unsaid.get(key)) for key in keys]
    return list(dict.fromkeys(id for id in found if isinstance(id, int) and id < count))


def files(metadata: Mapping[str, Any], source: str) -> dict[str, dict[str, Any]]:
    """Contents of tokenizer.json and tokenizer_config.json; `source` names the file in errors.

    Raises:
        UserError: no vocabulary, or a kind of tokenizer that is not served.
    """
    tokens, kind = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.model")
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens) or kind not in ("gpt2", "llama"):
        raise UserError(f"reading {source}: its tokenizer is of kind {kind!r}; served: gpt2, llama. Give the Hugging Face model it was made from.")
    types = metadata.get("tokenizer.ggml.token_type", [NORMAL] * len(tokens))
    scores = metadata.get("tokenizer.ggml.scores", [0.0] * len(tokens))
    if not isinstance(types, list) or not isinstance(scores, list) or not len(types) == len(scores) == len(tokens):
        raise UserError(f"reading {source}: its tokenizer has {len(tokens)} tokens, but not as many types and scores. Download it again.")
    special = {name: tokens[ids[0]] for name in ("bos", "eos", "unk", "pad") if (ids := token_ids(metadata, name))}
    shared = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": id, "content": token, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": its_type != USER_DEFINED}
            for id, (token, its_type) in enumerate(zip(tokens, types, strict=True))
            if its_type in (UNKNOWN, CONTROL, USER_DEFINED)
        ],
    }
    build = _byte_level if kind == "gpt2" else _sentencepiece
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": metadata.get(f"{metadata.get('general.architecture')}.context_length", 2048),
        "clean_up_tokenization_spaces": False,
        **{f"{name}_token": token for name, token in special.items()},
    }
    if "tokenizer.chat_template" in metadata:
        config["chat_template"] = metadata["tokenizer.chat_template"]
    return {"tokenizer.json": shared | build(metadata, tokens, types, special, source), "tokenizer_config.json": config}


def _byte_level(metadata: Mapping[str, Any], tokens: list[str], types: list[int], special: Mapping[str, str], source: str) -> dict[str, Any]:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    rule = RULES.get(pre)
    if rule is None:
        raise UserError(f"reading {source}: its tokenizer splits text by {pre!r}; served: {', '.join(RULES)}. Give the Hugging Face model it was made from.")
    if rule in (_GPT2, _SMOLLM):
        steps = [{"type": "Digits", "individual_digits": True}] if rule == _SMOLLM else []
        steps.append(_bytes(use_regex=True))
    else:
        steps = [{"type": "Split", "pattern": {"Regex": rule}, "behavior": "Isolated", "invert": False}, _bytes(use_regex=False)]
    after = [_bytes(use_regex=True, trim_offsets=False)]
    if metadata.get("tokenizer.ggml.add_bos_token", rule == _LLAMA3) and "bos" in special:
        after.append(_starting_with(special["bos"], tokens))
    return {
        "normalizer": {"type": "NFC"} if rule == _QWEN2 else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "post_processor": {"type": "Sequence", "processors": after},
        "decoder": _bytes(use_regex=True),
        "model": _model(tokens, types, metadata.get("tokenizer.ggml.merges", []), ignore_merges=rule == _LLAMA3),
    }


def _bytes(use_regex: bool, trim_offsets: bool = True) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": trim_offsets, "use_regex": use_regex}


def _sentencepiece(metadata: Mapping[str, Any], tokens: list[str], types: list[int], special: Mapping[str, str], source: str) -> dict[str, Any]:
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None:
        raise UserError(f"reading {source}: its tokenizer is SentencePiece's but has no scores. Give the Hugging Face model it was made from.")
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    decoders = [{"type": "Replace", "pattern": {"String": SPACE}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}]
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    starts = metadata.get("tokenizer.ggml.add_bos_token", True) and "bos" in special
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*([{"type": "Prepend", "prepend": SPACE}] if prefix else []), spaces]},
        "pre_tokenizer": None,
        "post_processor": _starting_with(special["bos"], tokens) if starts else None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _model(tokens, types, merges(tokens, types, scores), unk_token=special.get("unk"), fuse_unk=True, byte_fallback=True),
    }


def merges(tokens: list[str], types: list[int], scores: list[float]) -> list[str]:
    """Every way to make a token from two others, best score first: SentencePiece merges the pair whose result scores highest."""
    ids = {token: id for id, (token, kind) in enumerate(zip(tokens, types, strict=True)) if kind == NORMAL}
    ways = [
        (-scores[id], ids[token[:cut]], ids[token[cut:]])
        for token, id in ids.items()
        for cut in range(1, len(token))
        if token[:cut] in ids and token[cut:] in ids
    ]
    return [f"{tokens[left]} {tokens[right]}" for _, left, right in sorted(ways)]


def _model(tokens: list[str], types: list[int], merges: list[str], **settings: Any) -> dict[str, Any]:
    vocabulary = {token: id for id, (token, kind) in enumerate(zip(tokens, types, strict=True)) if kind != UNUSED}
    return {"type": "BPE", "dropout": None, "unk_token": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False} | settings | {
        "continuing_subword_prefix": None, "end_of_word_suffix": None, "vocab": vocabulary, "merges": merges,
    }  # fmt: skip


def _starting_with(token: str, tokens: list[str]) -> dict[str, Any]:
    """Text begins with the token, and each text of a pair does."""
    one, other = ([{"SpecialToken": {"id": token, "type_id": i}}, {"Sequence": {"id": name, "type_id": i}}] for i, name in ((0, "A"), (1, "B")))
    return {
        "type": "TemplateProcessing",
        "single": one,
        "pair": one + other,
        "special_tokens": {token: {"id": token, "ids": [tokens.index(token)], "tokens": [token]}},
    }
