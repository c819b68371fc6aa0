"""Chat templates in the styles that public models have, written for these tests, and conversations for them."""

from typing import Any

CHATML = """\
{%- if messages[0].role == 'system' %}{{ '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- else %}{{ '<|im_start|>system\\nBe helpful.<|im_end|>\\n' }}{% endif %}
{%- for message in messages if message.role != 'system' or not loop.first %}
    {{- '<|im_start|>' ~ message['role'] ~ '\\n' ~ message['content'] ~ '<|im_end|>' ~ '\\n' }}
{%- endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
HEADERS = """\
{{- bos_token }}
{%- if not date_string is defined %}{% set date_string = strftime_now('%Y') %}{% endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}{% set messages = messages[1:] %}
{%- else %}{% set system_message = '' %}{% endif %}
{{- '<|header|>system<|/header|>\\n\\nToday: ' + date_string + '\\n' }}
{%- if tools is not none %}{{ 'Environment: ipython\\n' }}
    {%- for t in tools %}{{ t | tojson(indent=4) }}{{ '\\n\\n' }}{% endfor %}
{%- endif %}
{{- system_message ~ '<|eot|>' }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|header|>' + message['role'] + '<|/header|>\\n\\n' + message['content'] | trim + '<|eot|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}{{ raise_exception('one tool call at once') }}{% endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' }}{{ call.arguments | tojson }}{{ '}<|eot|>' }}
    {%- else %}
        {{- '<|header|>ipython<|/header|>\\n\\n' }}
        {%- if message.content is mapping or message.content is not string %}{{ message.content | tojson }}
        {%- else %}{{ message.content }}{% endif %}{{ '<|eot|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|header|>assistant<|/header|>\\n\\n' }}{% endif %}
"""
TURNS = """\
{{ bos_token }}{% set ns = namespace(system='', turn=0) %}
{%- if messages[0].role == 'system' %}{% set ns.system = messages[0].content %}{% set loop_messages = messages[1:] %}
{%- else %}{% set loop_messages = messages %}{% endif %}
{%- for m in loop_messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- if m.role == 'user' %}
{{- ' [INST] ' }}{% if loop.last and ns.system %}{{ ns.system + '\\n\\n' }}{% endif %}{{ m.content + ' [/INST]' }}
{%- elif m.role == 'assistant' %}{{ ' ' + m.content.strip() + eos_token }}
{%- else %}{{ raise_exception('only user and assistant') }}{% endif %}
{%- endfor %}
"""
MODEL = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{% for message in messages %}
{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}
{{ '<turn>' + role + '\\n' + message['content'] | trim + '</turn>\\n' }}
{% endfor %}
{% if add_generation_prompt %}{{'<turn>model\\n'}}{% endif %}
"""
CALLS = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(multi_step=true, last=messages | length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages | length - 1) - loop.index0 %}
    {%- if ns.multi_step and message.role == "user" %}
        {%- set ns.multi_step = false %}{%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}{%- set content = message.content %}
    {%- else %}{%- set content = '' %}{%- endif %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set thought = '' %}
        {%- if message.reasoning_content is string %}{%- set thought = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last and (loop.last or thought) %}
            {{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in message.tool_calls %}
            {%- if (loop.first and content) or (not loop.first) %}{{- '\\n' }}{%- endif %}
            {%- if call.function %}{%- set call = call.function %}{%- endif %}
            {{- '<call>\\n{"name": "' + call.name + '", "arguments": ' }}
            {%- if call.arguments is string %}{{- call.arguments }}{%- else %}{{- call.arguments | tojson }}{%- endif %}
            {{- '}\\n</call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<answer>\\n' + content + '\\n</answer>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""
DOCUMENTS = """\
{{ bos_token }}{% if documents %}{{ '<results>' }}
{% for document in documents %}{{ '\\nDocument: ' ~ loop.index0 }}
{% for key, value in document | dictsort %}{{ key }}: {{ value }}
{% endfor %}{% endfor %}{{ '</results>' }}{% else %}{{ 'no documents: ' ~ (documents is none) }}{% endif %}
{% for m in messages %}{{ '<|' ~ m.role | upper ~ '|>' ~ (m.content or '') }}{% endfor %}
{{- '<|CHATBOT|>' if add_generation_prompt else '' }}"""
MARKED = """\
{% for message in messages %}
{% if message.role == 'assistant' %}
<|assistant|>
{% generation %}
{{ message.content }}{{ eos_token }}
{% endgeneration %}
{% else %}
{% generation -%}{% set hidden = 'x' %}{%- endgeneration %}
<|{{ message.role }}|>{{ hidden }}
{{ message.content }}{{ eos_token }}
{% endif %}
{% endfor %}
{% if add_generation_prompt %}<|assistant|>
{% endif %}"""
BREAKS = """\
{%- for message in messages -%}
  {%- if message.role == 'system' %}{% continue %}{% endif -%}
  {%- for word in (message.content or '').split() %}
    {%- if loop.index > 3 %}{{ '…' }}{% break %}{% endif %}{{ word }} {% endfor %}
{{ eos_token }}
{%- endfor -%}"""
JSON = """\
{# role, content #}{{ messages | tojson }}
{{ tools | tojson(indent=2) }}{{ tools | tojson(separators=(',', ':'), sort_keys=true) }}
{{ messages[0] | tojson(ensure_ascii=true) }}{{ '<b>&\\'"é終' | tojson }}{{ none | tojson }}{{ 1.0 | tojson }}"""
MACRO = """\
{%- macro shape(type) %}{% if type.type == 'array' %}list[{{ shape(type['items']) }}]
{%- elif type.properties is defined %}{ {% for name, inner in type.properties.items() %}
    {{- name }}: {{ shape(inner) }}{{ ', ' if not loop.last }}{% endfor %} }
{%- else %}{{ type.type | replace('number', 'float') | default('any', true) }}{% endif %}{% endmacro %}
{%- for tool in tools or [] %}{% set f = tool.function %}{{ f.name }}({{ shape(f.parameters) }}
{{- '): ' ~ f.description | e }}
{% endfor %}
{%- for m in messages %}{{ m.role }}/{{ m.name | default('-') }}: {{ m.content if m.content is defined else '' }}
{%- if m.tool_calls is defined and m.tool_calls is iterable %}
    {{- m.tool_calls | map(attribute='function.name') | join(', ') }}{% endif %}
{% endfor %}{{ '#' * (messages | length) }}{{ range(3) | list }}{{ dict(a=1).items() | list }}"""
PARTS = """\
{% for m in messages %}{{ m.role }}:
{%- if m.content is string %}{{ m.content }}{% else %}{% for part in m.content or [] %}
{%- if part.type == 'text' %}{{ part.text }}{% else %}<{{ part.type }}>{% endif %}{% endfor %}{% endif %}{{ eos_token }}
{% endfor %}
{%- if add_generation_prompt %}assistant:{% endif %}
{{- pad_token ~ unknown_name }}{% if level is defined %}{{ level.deep[0] }}{% endif %}"""
TEMPLATES = {
    "chatml": CHATML, "headers": HEADERS, "turns": TURNS, "model": MODEL, "calls": CALLS, "documents": DOCUMENTS,
    "marked": MARKED, "breaks": BREAKS, "json": JSON, "macro": MACRO, "parts": PARTS,
    "thinking": "{% for m in messages %}{{ m.thinking }}/{{ m.reasoning_content }}: {{ m.content }}{% endfor %}",
    "null": "{% for m in messages %}{{ m.role }}: {{ '?' if m.content is none else m.content }}{% endfor %}",
    "trimmed": "{% for m in messages %}<{{ m.role }}>{{ (m.content or '') | trim }}</>{% endfor %}",
}  # fmt: skip

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather <in> a town & its \"name\"",
        "parameters": {
            "type": "object",
            "properties": {"town": {"type": "string"}, "days": {"type": "array", "items": {"type": "number"}}},
            "required": ["town"],
        },
    },
}  # fmt: skip
CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "weather", "arguments": {"town": "Ål", "days": [1, 2.5]}},
}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one": [{"role": "user", "content": "Hi <b>there</b> & you's  "}],
    "system": [{"role": "system", "content": " You are é終. "}, {"role": "user", "content": "Hi"}],
    "turns": [
        {"role": "user", "content": "What is 2 and 2?"},
        {"role": "assistant", "content": "<think>\nsum\n</think>\n\nFour. "},
        {"role": "user", "content": "And 3 and 3, and then 4 and 4?"},
        {"role": "assistant", "content": "Six,\nand eight", "reasoning": "easy"},
    ],
    "tools": [
        {"role": "system", "content": "Call."},
        {"role": "user", "content": "Weather in Ål?", "name": "ann"},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "I should ask"},
        {"role": "tool", "content": '{"t": 3}', "tool_call_id": "c1", "name": "weather"},
        {"role": "assistant", "content": "Cold. ", "tool_calls": None},
    ],
    "parts": [
        {"role": "user", "content": [{"type": "text", "text": "See: "}, {"type": "image"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "A cat,"}]},
    ],
    "strange": [
        {"role": "user", "content": "a\u2028\x00\U0001f600"},
        {"role": "critic", "content": "no", "x": {"y": [1]}},
    ],
    "wrong": [{"role": "assistant", "content": "I begin"}, {"role": "assistant", "content": ""}],
}  # fmt: skip
HOSTILE = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "string": '{{ "a" * (3 * 10**9) }}',
    "format": '{{ "%3000000000d" % 1 }}',
    "power": "{{ (8 + messages | length) ** (9 ** 9) }}",
    "folded": "{{ 9 ** (9 ** 9) }}",
    "doubling": "{% set n = namespace(t='a') %}{% for i in range(60) %}{% set n.t = n.t ~ n.t %}{% endfor %}{{ n.t }}",
    "long": "{% for a in range(9999) %}{{ 'a' * 9999 }}{% endfor %}",
    "list": "{% set n = namespace(t=[1]) %}{% for i in range(60) %}{% set n.t = n.t + n.t %}{% endfor %}{{ n.t }}",
    "recursion": "{% macro m(x) %}{{ m(x) }}{% endmacro %}{{ m(1) }}",
    "parentheses": "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    "minuses": "{{ " + "-" * 3000 + "1 }}",
    "blocks": "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    "fors": "{% for a in messages %}" * 60 + "{% endfor %}" * 60,
    "filters": "{{ messages" + " | list" * 3000 + " }}",
    "sum": "{{ " + "1 + " * 3000 + "1 }}",
    "escape": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "format map": "{{ '{0.__class__.__init__.__globals__}'.format(raise_exception) }}",
    "globals": "{{ raise_exception.__globals__ }}",
    "cycler": "{{ cycler.__init__.__globals__.os.system('true') }}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import 'os' as os %}{{ os }}",
    "raise": "{{ raise_exception('\\x1b[2J\\n' ~ 'x' * 10**6) }}",
    "undefined": "{{ nothing.at.all }}",
    "time": "{{ strftime_now('%' * 99999) }}",
    "surrogate": "{{ '%c' % 55357 }}",
}  # fmt: skip
