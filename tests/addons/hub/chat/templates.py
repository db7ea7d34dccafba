"""Chat templates in the forms of the field, and conversations for them; also read by `make_golden.py`."""

from __future__ import annotations

from typing import Any

#: Names of special tokens.
SPECIAL = [
    *("<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|eot_id|>"),
    *(
        "<|start_header_id|>",
        "<|end_header_id|>",
        "[INST]",
        "[/INST]",
        "<start_of_turn>",
        "<end_of_turn>",
    ),
    *("<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<tool_call>", "</tool_call>"),
]

TEMPLATES: dict[str, str] = {
    "chatml": """{% for message in messages %}
{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}
{%- endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\n' }}
{%- endif %}
""",
    "chatml-marked": """{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' }}
        {%- generation %}
        {{- message.content + '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
""",
    "headers": """{{- bos_token }}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = 'Answer shortly.' %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\n' + system + '<|eot_id|>' }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' + message.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
""",
    "inst": """{{ bos_token }}{% for message in messages %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Roles must alternate user/assistant/user/assistant/...') }}
{%- endif %}
{%- if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}
{%- else %}{{ message['content'] + eos_token }}{% endif %}
{%- endfor %}""",
    "turns": """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for message in messages %}
{%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{- '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}""",
    "bars": """{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\n' + message['content'] + '<|end|>' }}
{% elif message['role'] == 'system' %}
{{ '<|system|>\n' + message['content'] + '<|end|>' }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\n'  + message['content'] + '<|end|>' }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}""",
    "tools": """{%- if tools %}
    {{- '<|im_start|>system\nTools:\n' }}
    {%- for tool in tools %}
        {{- tool | tojson }}
        {{- '\n' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role }}
    {%- if message.content %}{{- '\n' + message.content }}{%- endif %}
    {%- for call in message.tool_calls or [] %}
        {{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
        {{- call.function.arguments | tojson }}
        {{- '}\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
""",
    "indented": """{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = message.content | map(attribute='text') | join(' ') %}
    {%- endif %}
    {{- '<|im_start|>' ~ message.role ~ '\n' ~ content ~ '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
""",
    "namespaces": """{%- set ns = namespace(count=0) %}
{%- for message in messages %}
    {%- if message.role == 'system' %}{%- continue %}{%- endif %}
    {%- set ns.count = ns.count + 1 %}
    {%- if message.role == 'assistant' %}
        {{- ns.count ~ ' A: ' }}{% generation %}{{ message.content | trim }}{{ eos_token }}{% endgeneration %}
    {%- else %}
        {{- ns.count ~ ' Q: ' ~ message.content | trim ~ '\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- (ns.count + 1) ~ ' A: ' }}{%- endif %}
""",
    "macros": """{%- macro turn(role, content) -%}
<|im_start|>{{ role | upper }}
{{ content | trim }}<|im_end|>
{% endmacro -%}
{{- bos_token -}}
{% for message in messages %}{{ turn(message.role, message.content) }}{% endfor %}
{%- if add_generation_prompt %}<|im_start|>ASSISTANT
{% endif %}""",
}

_CALL = {
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "Zürich", "days": 2}},
}
CONVERSATIONS: dict[str, dict[str, Any]] = {
    "short": {
        "messages": [
            {"role": "user", "content": "Name a colour."},
            {"role": "assistant", "content": "Blue."},
        ]
    },
    "system": {
        "messages": [
            {"role": "system", "content": "  Be polite & brief <b>. "},
            {"role": "user", "content": "Hello\nthere!"},
            {"role": "assistant", "content": "Good day. "},
            {"role": "user", "content": "What is 2 < 3?"},
            {"role": "assistant", "content": "It is true, naïvely: ✓"},
        ]
    },
    "tools": {
        "messages": [
            {"role": "user", "content": "Will it rain?"},
            {"role": "assistant", "content": "", "tool_calls": [_CALL]},
            {"role": "tool", "content": '{"rain": true}'},
            {"role": "assistant", "content": "Yes."},
        ],
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": "weather",
                    "description": "The weather of a city's <next> days",
                    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
                },
            }
        ],
    },
    "parts": {
        "messages": [
            {
                "role": "user",
                "content": [{"type": "text", "text": "One"}, {"type": "text", "text": "two"}],
            },
            {"role": "assistant", "content": "Three."},
        ]
    },
}
