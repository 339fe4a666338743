"""Small tokenizers made here, the chat templates of known families, and rows to write with them."""

import json

CHATML = """{%- if tools %}<|im_start|>system
Tools: {{ tools | tojson }}<|im_end|>
{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content or '' }}
{%- for call in m.tool_calls or [] %}
<tool_call>{{ call.function | tojson }}</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

LLAMA = """{{ '<|begin|>' }}
{%- for m in messages %}{{ '<|start_header|>' + m.role + '<|end_header|>\\n\\n' + m.content | trim + '<|eot|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start_header|>assistant<|end_header|>\\n\\n' }}{% endif %}"""

# As Mistral's: no generation prompt, the system prompt stands before the last user turn, roles must alternate
MISTRAL = """{%- if messages[0].role == 'system' %}{% set system = messages[0].content + '\\n\\n' %}{% set turns = messages[1:] %}
{%- else %}{% set system = '' %}{% set turns = messages %}{% endif %}{{ '<s>' }}
{%- for m in turns %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate user/assistant') }}{% endif %}
{%- if m.role == 'user' %}{{ '[INST] ' + (system if loop.index0 >= turns | length - 2 else '') + m.content + ' [/INST]' }}
{%- else %}{{ ' ' + m.content + '</s>' }}{% endif %}
{%- endfor %}"""

# As Qwen3's: turns before the last question lose their thinking, the last one gets an empty block if it has none
QWEN = """{%- set ns = namespace(last=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- set think = '' %}{% set content = m.content or '' %}
{%- if '</think>' in content %}
{%- set think = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}{% set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.last and (loop.last or think) %}{{ '<think>\\n' + think + '\\n</think>\\n\\n' }}{% endif %}{{ content }}
{%- for call in m.tool_calls or [] %}
{%- if content or not loop.first %}{{ '\\n' }}{% endif %}{{ '<tool_call>\\n' + call.function | tojson + '\\n</tool_call>' }}
{%- endfor %}{{ '<|im_end|>\\n' }}
{%- else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# As DeepSeek-R1's: the generation prompt opens a block that the rendered conversation does not have
DEEPSEEK = """{{ '<s>' }}
{%- for m in messages %}
{%- if m.role == 'user' %}{{ '<|User|>' + m.content }}{% else %}{{ '<|Assistant|>' + m.content.split('</think>')[-1] + '</s>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|Assistant|><think>\\n' }}{% endif %}"""

PLAIN = "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"

TEMPLATES = {"chatml": CHATML, "llama": LLAMA, "mistral": MISTRAL, "qwen": QWEN, "deepseek": DEEPSEEK, "plain": PLAIN}
ADDED = ["<|im_start|>", "<|im_end|>", "<|begin|>", "<|start_header|>", "<|end_header|>", "<|eot|>", "<s>", "</s>", "<|User|>", "<|Assistant|>"]
TEXT = ["The sea is calm tonight, the tide is full.", "user assistant system tool\n\n", "What is the time? It is noon.", "Hello there! Hi. Good-bye, friend."]


def user(content):
    return {"role": "user", "content": content}


def assistant(content, **more):
    return {"role": "assistant", "content": content, **more}


def make_tokenizer(template=None, metaspace=False, bos=False):
    """A byte-level BPE (or, as Mistral's, one over words that start with ▁) trained on a few lines."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE(unk_token="<unk>" if metaspace else None))
    bpe.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first") if metaspace else pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.Metaspace(prepend_scheme="first") if metaspace else decoders.ByteLevel()
    alphabet = [] if metaspace else pre_tokenizers.ByteLevel.alphabet()
    specials = (["<unk>"] if metaspace else []) + ADDED
    bpe.train_from_iterator(TEXT * 8, trainers.BpeTrainer(vocab_size=400, special_tokens=specials, initial_alphabet=alphabet, show_progress=False))
    bpe.add_tokens([AddedToken(token, normalized=False) for token in ("<think>", "</think>", "<tool_call>", "</tool_call>")])
    if bos:
        bpe.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bpe.token_to_id("<s>"))])
    fast = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="</s>", bos_token="<s>")
    fast.chat_template = template
    return fast


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
