"""Chat templates of many families, and conversations for them."""

from typing import Any

TOOLS_OF_HERMES = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string %}
        {%- set ns.multi_step_tool = false %}{%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set content = message.content or '' %}{%- set thought = '' %}
        {%- if message.reasoning_content is defined and message.reasoning_content is not none %}
            {%- set thought = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.last or loop.index0 > ns.last %}{{- '<think>' + thought.strip('\\n') + '</think>' }}{%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {%- if call.function %}{%- set call = call.function %}{%- endif %}
            {{- '<tool_call>{"name": "' ~ call.name ~ '", "arguments": ' }}
            {%- if call.arguments is string %}{{- call.arguments }}{%- else %}{{- call.arguments | tojson }}{%- endif %}
            {{- '}</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""

HEADERS_WITH_A_DATE = """{{- bos_token }}
{%- if custom_tools is defined %}{%- set tools = custom_tools %}{%- endif %}
{%- if not date_string is defined %}{%- set date_string = strftime_now("%Y") %}{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system_message = "" %}{%- endif %}
{{- "<|start|>system<|end|>\\n\\nToday: " + date_string + "\\n" + system_message }}
{%- if tools is not none %}{%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}{%- endif %}
{{- eos_token }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start|>' + message['role'] + '<|end|>\\n\\n' + message['content'] | trim + eos_token }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}{{- raise_exception("one call at a time") }}{%- endif %}
        {%- for name, value in message.tool_calls[0].function.arguments | items %}
            {{- name + '="' ~ value ~ '"' }}{%- if not loop.last %}{{- ", " }}{%- endif %}
        {%- endfor %}
    {%- else %}
        {%- if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}
        {%- else %}{{- message.content }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant<|end|>\\n\\n' }}{%- endif %}
"""

ALTERNATING = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}
{% set loop_messages = messages[1:] %}{% set first = messages[0]['content'] %}
{% else %}{% set loop_messages = messages %}{% set first = '' %}{% endif %}
{% for message in loop_messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {% endif %}
    {% if message['role'] == 'user' %}
{{ '[INST] ' + (first ~ '\\n\\n' if loop.first and first else '') + message['content'].strip() + ' [/INST]' }}
    {% else %}{{ ' ' + message['content'] | trim + eos_token }}{% endif %}
{% endfor %}"""

TURNS = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for message in messages -%}
{%- set role = 'model' if message.role == 'assistant' else message.role -%}
{{ '<start_of_turn>' + role + '\\n' }}
{%- if message['content'] is string -%}{{ message['content'] | trim }}
{%- elif message['content'] is iterable -%}
{%- for item in message['content'] -%}
{%- if item['type'] == 'image' -%}{{ '<image>' }}{%- elif item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}
{%- endfor -%}
{%- else -%}{{ raise_exception("Invalid content type") }}{%- endif -%}
{{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}"""

GROUNDED = """{%- macro kind(schema) -%}{%- if schema.type == "array" -%}List[{{ kind(schema["items"]) }}]
{%- else -%}{{ {"number": "float", "string": "str"}.get(schema.type, "Any") }}{%- endif -%}{%- endmacro -%}
{{ bos_token }}{% set system = messages | selectattr('role', 'equalto', 'system') | map(attribute='content') | join(' / ') %}
{{- '<|system|>' ~ (system or 'Default') }}
{%- if tools %}{% for tool in tools %}
def {{ tool.function.name }}({% for name, schema in tool.function.parameters.properties | dictsort %}{{ name }}: {{ kind(schema) }}
{%- if not loop.last %}, {% endif %}{% endfor %})
{% endfor %}{% endif %}
{%- if documents %}<results>{% for document in documents %}
Document: {{ loop.index0 }}
{% for key, value in document.items() %}{{ key }}: {{ value }}
{% endfor %}{% endfor %}</results>{% endif %}
{%- if documents is none and tools is not none %}no documents{% endif %}
{%- set rest = messages | rejectattr('role', 'equalto', 'system') | list %}
{%- for message in rest %}{% if loop.changed(message.role) %}<|{{ message.role | upper }}|>{% endif %}
{%- if message.content is not string %}{% continue %}{% endif %}
{{- message.content | replace('\\n', ' ') | default('', true) }}{% generation %}{{ loop.length }}{% endgeneration %}
{%- if loop.index > 6 %}{% break %}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '%s|' | format('<|answer|>') }}{% endif %}"""

KINDS = {
    name: value for name, value in globals().items() if name.isupper() and isinstance(value, str)
}
ADD = {
    "type": "object",
    "properties": {
        "b": {"type": "number"},
        "a": {"type": "array", "items": {"type": "string"}},
        "é": {},
    },
    "required": ["a"],
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "description": "Adds <b> & 'é'.", "parameters": ADD},
    }
]
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"function": {"name": "add", "arguments": {"a": "1", "b": 2}}}],
}
DOCUMENTS = [{"title": "Mills", "text": "A wheel\nturns."}, {"title": "é", "text": "<b>"}]
CHATS: dict[str, Any] = {
    "one": [{"role": "user", "content": " Hi <b>\n"}],
    "system": [{"role": "system", "content": " Be brief. "}, {"role": "user", "content": "1+1"}],
    "turns": [
        {"role": role, "content": text}
        for role, text in (("user", "a"), ("assistant", "b "), ("user", "c"))
    ],
    "thought": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nb"},
    ],
    "reasoning": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "thinking": "hm"},
        {"role": "user", "content": "c"},
    ],
    "calls": [
        {"role": "user", "content": "add"},
        CALL,
        {"role": "tool", "content": "3"},
        {"role": "tool", "content": "4"},
    ],
    "twice": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}],
    "parts": [
        {
            "role": "user",
            "content": [{"type": "text", "text": " look "}, {"type": "text", "text": "here "}],
        }
    ],
}
