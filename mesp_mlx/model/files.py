"""What the files of a model folder are called, weights apart."""

TOKENIZER_FILES = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "special_tokens_map.json",
    "added_tokens.json",
)
TEMPLATE_FILES = ("chat_template*", "additional_chat_templates/*")
CODE_FILES = ("*.py",)  # of a model or a tokenizer that comes with its own: run only where the user trusts it
SETTINGS_FILES = ("config.json", "generation_config.json")  # they name the tokenizer's class and the tokens that stop a reply
