"""Templates in the manners of published ones, for chat_templates.py own: how models' makers write, in words of our own."""

STYLES = {}

# Header marks, a date, tools as JSON in the system turn or in the first question.
STYLES["headers"] = """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}{%- set date_string = strftime_now("%d %b %Y") %}{%- else %}{%- set date_string = "1 Jan 2025" %}{%- endif %}
{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- set tools_first = tools_first if tools_first is defined else true %}
{%- if messages and messages[0]['role'] in ['system', 'developer'] %}
    {%- set rules = messages[0]['content']|trim %}{%- set messages = messages[1:] %}
{%- else %}
    {%- set rules = "" %}
{%- endif %}
{{- "<|head|>system<|/head|>\\n\\n" }}
{%- if builtin_tools is defined or tools is not none %}{{- "Surroundings: shell\\n" }}{%- endif %}
{%- if builtin_tools is defined %}{{- "Helpers: " + builtin_tools | reject('equalto', 'code_interpreter') | join(", ") + "\\n\\n" }}{%- endif %}
{{- "Day: " + date_string + "\\n\\n" }}
{%- if tools is not none and not tools_first %}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
{%- endif %}
{{- rules }}{{- "<|end|>" }}
{%- if tools_first and not tools is none %}
    {%- if messages | length != 0 %}
        {%- set opening = messages[0]['content'] if messages[0]['content'] is string else messages[0]['content'] | map(attribute='text') | join('') %}
        {%- set messages = messages[1:] %}
    {%- else %}
        {{- raise_exception("Tools have no question to stand in!") }}
    {%- endif %}
    {{- '<|head|>user<|/head|>\\n\\nAnswer with {"name": ..., "parameters": ...}.\\n\\n' }}
    {%- for t in tools %}{{- t | tojson(indent=4) ~ "\\n\\n" }}{%- endfor %}
    {{- opening | trim + "<|end|>" }}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|head|>' + message['role'] + '<|/head|>\\n\\n' }}
        {%- if message.content is string %}{{- message['content'] | trim }}
        {%- else %}{%- for part in message.content %}{{- part.text if part.type == 'text' }}{%- endfor %}{%- endif %}
        {{- '<|end|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}{{- raise_exception("One call at a time!") }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|head|>assistant<|/head|>\\n\\n' }}
        {%- if builtin_tools is defined and call.name in builtin_tools %}
            {{- "<|run|>" + call.name + ".call(" }}
            {%- for name, value in call.arguments | items %}{{- name + '="' ~ value ~ '"' }}{%- if not loop.last %}{{- ", " }}{%- endif %}{%- endfor %}
            {{- ")" }}
        {%- else %}
            {{- '{"name": "' + call.name + '", ' }}{{- '"parameters": ' }}{{- call.arguments | tojson }}{{- "}" }}
        {%- endif %}
        {{- "<|end|>" }}
    {%- else %}
        {{- "<|head|>ipython<|/head|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}{%- else %}{{- message.content }}{%- endif %}
        {{- "<|end|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|head|>assistant<|/head|>\\n\\n' }}{%- endif %}
"""

# Turns in brackets, roles that must alternate, tools before the last question, ids of calls.
STYLES["brackets"] = """\
{%- if messages and messages[0]["role"] == "system" %}
    {%- set rules = messages[0]["content"] %}{%- set turns = messages[1:] %}
{%- else %}{%- set turns = messages %}{%- endif %}
{%- set questions = turns | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace(index=0) %}
{%- for m in turns %}
    {%- if not (m.role == "tool" or (m.tool_calls is defined and m.tool_calls is not none)) %}
        {%- if (m["role"] == "user") != (ns.index % 2 == 0) %}{{- raise_exception("Roles must take turns: user, assistant, ...") }}{%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for m in turns %}
    {%- if m["role"] == "user" %}
        {%- if tools is not none and questions and (m == questions[-1]) %}
            {{- "[TOOLS] [" }}
            {%- for t in tools %}
                {%- set t = t.function %}{{- '{"type": "function", "function": {' }}
                {%- for k, v in t.items() if k != "return" %}
                    {%- if v is string %}{{- '"' + k + '": "' + v + '"' }}{%- else %}{{- '"' + k + '": ' + v|tojson }}{%- endif %}
                    {%- if not loop.last %}{{- ", " }}{%- endif %}
                {%- endfor %}
                {{- "}}" }}{%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" }}{%- endif %}
            {%- endfor %}{{- "[/TOOLS]" }}
        {%- endif %}
        {%- if loop.last and rules is defined %}{{- "[ASK] " + rules + "\\n\\n" + (m["content"] if m["content"] is string else m["content"][0]["text"]) + "[/ASK]" }}
        {%- else %}{{- "[ASK] " ~ (m["content"] if m["content"] is string else (m["content"]|first).text) ~ "[/ASK]" }}{%- endif %}
    {%- elif m.tool_calls is defined and m.tool_calls is not none %}
        {{- "[CALLS] [" }}
        {%- for call in m.tool_calls %}
            {%- set out = call.function|tojson %}{{- out[:-1] }}
            {%- if not call.id is defined or call.id|length != 9 %}{{- raise_exception("The id of a call has 9 characters!") }}{%- endif %}
            {{- ', "id": "' + call.id + '"}' }}{%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" + eos_token }}{%- endif %}
        {%- endfor %}
    {%- elif m["role"] == "assistant" %}{{- " " + m["content"]|trim|string + eos_token }}
    {%- elif m["role"] in ("tool_results", "tool") %}
        {%- set content = m.content if m.content is not mapping else m.content.content %}
        {{- '[RESULT] {"content": ' + content|string + ', "call_id": "' + m.tool_call_id|default('none') + '"}[/RESULT]' }}
    {%- else %}{{- raise_exception("Only user, assistant and tool roles are known, and system at the begin!") }}{%- endif %}
{%- endfor %}
"""

# Thoughts that earlier answers lose, results of tools that stand in one turn, a switch of thinking.
STYLES["thinking"] = """\
{%- if tools %}
    {{- '<|im|>system\\n' }}
    {%- if messages and messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n\\n<tools>" }}{%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}{{- "\\n</tools><|/im|>\\n" }}
{%- elif messages and messages[0].role == 'system' %}{{- '<|im|>system\\n' + messages[0].content + '<|/im|>\\n' }}{%- endif %}
{%- set ns = namespace(looking=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.looking and message.role == "user" and message.content is string and not (message.content.startswith('<result>') and message.content.endswith('</result>')) %}
        {%- set ns.looking = false %}{%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}{{- '<|im|>' + message.role + '\\n' + content + '<|/im|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set thought = '' %}
        {%- if message.reasoning_content is string %}{%- set thought = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and (loop.last or (not loop.last and thought)) %}{{- '<|im|>' ~ message.role ~ '\\n<think>\\n' ~ thought.strip('\\n') ~ '\\n</think>\\n\\n' ~ content.lstrip('\\n') }}
        {%- else %}{{- '<|im|>' + message.role + '\\n' + content }}{%- endif %}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if (loop.first and content) or (not loop.first) %}{{- '\\n' }}{%- endif %}
            {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '<call>\\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}
            {%- if tool_call.arguments is string %}{{- tool_call.arguments }}{%- else %}{{- tool_call.arguments | tojson }}{%- endif %}{{- '}\\n</call>' }}
        {%- endfor %}
        {{- '<|/im|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or loop.previtem.role != "tool" %}{{- '<|im|>user' }}{%- endif %}
        {{- '\\n<result>\\n' }}{{- content }}{{- '\\n</result>' }}
        {%- if loop.last or (loop.nextitem.role != "tool") %}{{- '<|/im|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im|>assistant\\n' }}{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""

# A system message that goes into the first question, contents in parts, roles of other names.
STYLES["turns"] = """\
{{ bos_token }}
{%- if messages and messages[0]['role'] == 'system' -%}
    {%- set first_prefix = (messages[0]['content'] if messages[0]['content'] is string else messages[0]['content'][0]['text']) + '\\n\\n' -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_prefix = "" -%}{%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- set role = {'assistant': 'model', 'tool': 'user'}.get(message['role'], message['role']) -%}
    {{ '<turn>' + role + '\\n' + (first_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}{{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'image' -%}{{ '<image>' }}{%- elif item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}
        {%- endfor -%}
    {%- elif message['content'] is none and message.tool_calls is undefined -%}{{ '(nothing)' }}
    {%- else -%}{{ raise_exception("A content is of no known kind: %s" % message['content']) }}{%- endif -%}
    {{ '</turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{'<turn>model\\n'}}{%- endif -%}
"""

# Documents and tools through macros and call blocks, types as another language writes them.
STYLES["documents"] = """\
{%- macro python_type(spec) -%}
  {%- set names = {"string": "str", "integer": "int", "number": "float", "boolean": "bool"} -%}
  {%- if spec.type in names -%}{{ names[spec.type] }}
  {%- elif spec.type == "array" -%}List[{{ python_type(spec['items']) }}]
  {%- elif spec.type == "object" -%}Dict[str, {% if spec.properties %}{{ spec.properties.values() | map(attribute='type') | unique | sort | join(' | ') }}{% else %}Any{% endif %}]
  {%- else -%}Any{%- endif -%}
{%- endmacro -%}
{%- macro section(title, level=2) -%}
{{ '#' * level }} {{ title }}
{{ caller(title|lower|replace(' ', '_')) | trim | indent(2, first=true) }}
{% endmacro -%}
{{ bos_token }}{% if messages and messages[0].role == 'system' %}{% set rules = messages[0].content %}{% set messages = messages[1:] %}{% else %}{% set rules = 'You help.' %}{% endif -%}
{% call(anchor) section('Rules', level=1) %}{{ rules }} ({{ anchor }}){% endcall %}
{% if tools %}{% call(anchor) section('Known Tools') %}
{%- for tool in tools|map(attribute='function') %}
def {{ tool.name }}({% for name, spec in tool.parameters.properties.items() %}{{ name }}: {{ python_type(spec) }}{% if name not in tool.parameters.required|default([]) %} = None{% endif %}{{ ', ' if not loop.last }}{% endfor %}):
    {{ tool.description|default('no words', true) }}
{% endfor -%}
{% endcall %}{% endif %}
{% if documents %}{% call(anchor) section('Documents', 3) %}{% for doc in documents %}Document: {{ loop.index0 }}
{% for key, value in doc|dictsort %}{{ key }}: {{ value }}
{% endfor %}{% endfor %}{% endcall %}{% endif %}
{% for group in messages|groupby('role') %}{{ group.grouper|title }}: {{ group.list|length }}{{ '; ' if not loop.last }}{% endfor %}

{% for message in messages %}<{{ message.role }}>{{ message.content|default('', true) if message.content is not sequence or message.content is string else message.content|map(attribute='text')|join(' ') }}</{{ message.role }}>
{% endfor %}{{ '<assistant>' if add_generation_prompt }}
"""

# Channels, and schemas written by a macro that calls itself.
STYLES["channels"] = """\
{%- macro written_type(spec, inner=false) -%}
    {%- if spec.type == "array" -%}{{ written_type(spec['items'], true) + "[]" if spec['items'] else "any[]" }}{%- if spec.nullable %}{{- " | null" }}{%- endif -%}
    {%- elif spec.type is defined and spec.type is iterable and spec.type is not string and spec.type is not mapping -%}{{ spec.type | join(" | ") }}
    {%- elif spec.oneOf -%}{%- for one in spec.oneOf %}{{- written_type(one) }}{%- if not loop.last %}{{- " | " }}{%- endif %}{%- endfor %}
    {%- elif spec.type == "string" -%}{%- if spec.enum %}{{- '"' + spec.enum|join('" | "') + '"' -}}{%- else %}{{- "string" }}{%- endif %}
    {%- elif spec.type in ("number", "integer") -%}{{- "number" }}
    {%- elif spec.type == "object" -%}
        {%- if spec.properties -%}
            {{- "{\\n" }}
            {%- for name, part in spec.properties.items() -%}{{- name -}}{%- if name not in (spec.required or []) -%}{{- "?" }}{%- endif -%}{{- ": " }}{{ written_type(part) }}{%- if not loop.last %}{{- ", " }}{%- endif -%}{%- endfor -%}
            {{- "}" }}
        {%- else -%}{{- "object" }}{%- endif -%}
    {%- else -%}{{- spec.type|default("any") }}{%- endif -%}
{%- endmacro -%}
{%- macro tool_space(name, tools) -%}
    {{- "## " + name + "\\n\\nnamespace " + name + " {\\n\\n" }}
    {%- for tool in tools -%}
        {%- set tool = tool.function -%}{{- "// " + tool.description + "\\ntype " + tool.name + " = " }}
        {%- if tool.parameters and tool.parameters.properties -%}
            {{- "(_: {\\n" }}
            {%- for name, spec in tool.parameters.properties.items() -%}
                {%- if spec.description -%}{{- "// " + spec.description + "\\n" }}{%- endif -%}
                {{- name }}{%- if name not in (tool.parameters.required or []) -%}{{- "?" }}{%- endif -%}{{- ": " }}{{- written_type(spec) }}
                {%- if spec.default is defined -%}{%- if spec.enum %}{{- ", // default: " + spec.default }}{%- else %}{{- ", // default: " + spec.default|tojson }}{%- endif %}{%- endif -%}{{- ",\\n" }}
            {%- endfor -%}
            {{- "}) => any;\\n\\n" }}
        {%- else -%}{{- "() => any;\\n\\n" }}{%- endif -%}
    {%- endfor -%}
    {{- "} // namespace " + name }}
{%- endmacro -%}
{{- "<|start|>system<|message|>" }}
{%- if model_identity is not defined %}{%- set model_identity = "You are a model of nobody's." %}{%- endif %}
{{- model_identity + "\\nToday: " + strftime_now("%Y-%m-%d") + "\\n\\nEffort: " + (reasoning_effort | default("medium", true)) + "\\n\\n" }}
{{- "# Channels: analysis, final.<|end|>" }}
{%- if messages and messages[0].role in ["developer", "system"] %}{%- set developer = messages[0].content %}{%- set rest = messages[1:] %}{%- else %}{%- set rest = messages %}{%- endif %}
{%- if developer or tools %}
    {{- "<|start|>developer<|message|>" }}{%- if developer %}{{- "# Instructions\\n\\n" + developer }}{%- endif %}
    {%- if tools -%}{{- "\\n\\n# Tools\\n\\n" }}{{- tool_space("functions", tools) }}{%- endif -%}{{- "<|end|>" }}
{%- endif %}
{%- set last_call = namespace(name=none) %}
{%- for message in rest -%}
    {%- if message.role == 'assistant' -%}
        {%- if "<|channel|>" in (message.content or '') %}{{- raise_exception("Marks of channels belong to the template.") }}{%- endif %}
        {%- if "tool_calls" in message %}
            {%- set call = message.tool_calls[0].function or message.tool_calls[0] %}
            {%- if message.content %}{{- "<|start|>assistant<|channel|>analysis<|message|>" + message.content + "<|end|>" }}{%- endif %}
            {{- "<|start|>assistant to=functions." + call.name + "<|channel|>commentary json<|message|>" }}{{- call.arguments if call.arguments is string else call.arguments|tojson }}{{- "<|call|>" }}
            {%- set last_call.name = call.name %}
        {%- elif loop.last and not add_generation_prompt %}
            {%- if "reasoning_content" in message %}{{- "<|start|>assistant<|channel|>analysis<|message|>" + message.reasoning_content + "<|end|>" }}{%- endif %}
            {{- "<|start|>assistant<|channel|>final<|message|>" ~ message.content ~ "<|return|>" }}
        {%- else %}{{- "<|start|>assistant<|channel|>final<|message|>" ~ message.content ~ "<|end|>" }}{%- set last_call.name = none %}{%- endif %}
    {%- elif message.role == 'tool' -%}
        {%- if last_call.name is none %}{{- raise_exception("A result follows a call.") }}{%- endif %}
        {{- "<|start|>functions." + last_call.name }}{{- " to=assistant<|channel|>commentary<|message|>" + message.content|tojson + "<|end|>" }}
    {%- elif message.role == 'user' -%}{{- "<|start|>user<|message|>" ~ message.content ~ "<|end|>" }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}
"""

# Roles in marks, controls, tools without some keys, blocks that a filter trims.
STYLES["roles"] = """\
{%- set ns = namespace(rules='', told=false) -%}
{%- if messages and messages[0].role == 'system' %}{% set ns.rules = messages[0].content | trim %}{% set messages = messages[1:] %}{% set ns.told = true -%}
{%- else %}{% set ns.rules %}Today is {{ strftime_now('%B %d, %Y') }}. You are a helper.
{% filter trim %}

{%- if tools and documents %} You know tools and documents.{% elif tools %} You know tools.{% elif documents %} You know documents.{% endif %}

{% endfilter %}
{% endset %}
{%- endif -%}
{{ '<|role|>system<|/role|>' + ns.rules | trim }}<|eot|>
{% if controls %}{{ '<|role|>controls<|/role|>' ~ controls | tojson }}<|eot|>
{% endif -%}
{%- if tools %}<|role|>available<|/role|>
{%- for tool in tools %}
{%- set shown = dict(tool.function, strict=true) %}
{{ shown | dictsort | rejectattr(0, 'in', ['return', 'strict']) | list | tojson(indent=2) }}
{% endfor -%}
<|eot|>
{% endif -%}
{%- for document in documents or [] %}<|role|>document {{ '{"id": "%03d"}' % loop.index }}<|/role|>
{{ document.text|default(document.title) | wordcount }} words: {{ document.text|truncate(20, end='…') }}<|eot|>
{% endfor -%}
{%- for message in messages %}
{%- with role = message.role, content = message.content %}
{%- if role not in ['user', 'assistant', 'tool', 'system', 'developer'] %}{{ raise_exception('Unknown role: {!r}'.format(role)) }}{% endif %}
<|role|>{{ role }}<|/role|>{{ content if content is string else (content or [])|map(attribute='text')|join('\\n') }}
{%- for call in message.tool_calls|default([]) %}<|call|>{{ dict(name=call.function.name, arguments=call.function.arguments) | tojson }}{% endfor %}<|eot|>
{%- endwith %}
{% endfor %}
{%- if add_generation_prompt %}<|role|>assistant{{ ' ' ~ {'thinking': thinking|default(false)}|tojson if thinking is defined }}<|/role|>{% endif %}
"""

# Flags in a namespace, outputs that share a turn, formats with %.
STYLES["flags"] = """\
{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}{% set ns = namespace(is_first=false, is_tool=false, is_output_first=true, system='', count=0) %}
{%- for message in messages if message['role'] == 'system' %}{% set ns.system = ns.system ~ ('\\n\\n' if ns.system else '') ~ message['content'] %}{% endfor %}{{ bos_token }}{{ ns.system }}
{%- for message in messages %}
{%- if message['role'] == 'system' %}{% continue %}{% endif %}
{%- if message['role'] == 'user' %}{% set ns.is_tool = false %}{{ '<|User|>%s' % (message['content'],) }}{% endif %}
{%- if message['role'] == 'assistant' and message['tool_calls'] is defined and message['tool_calls'] is not none %}{% set ns.is_tool = false %}
{%- for tool in message['tool_calls'] %}
{%- set text = '<|call|>%(type)s<|sep|>%(name)s\\n```json\\n%(arguments)s\\n```<|/call|>' % {'type': tool['type'], 'name': tool.function.name, 'arguments': tool.function.arguments if tool.function.arguments is string else tool.function.arguments|tojson} %}
{%- if not ns.is_first %}{{ '<|Assistant|>%s<|calls|>%s' % (message['content'] or '', text) }}{% set ns.is_first = true %}{% else %}{{ '\\n' + text }}{% endif %}{% set ns.count = ns.count + 1 %}
{%- endfor %}{{ '<|/calls|><|eos|>' }}{% endif %}
{%- if message['role'] == 'assistant' and message['tool_calls'] is not defined %}
{%- if ns.is_tool %}{{ '<|/outputs|>' + (message['content'] or '') + '<|eos|>' }}{% set ns.is_tool = false %}
{%- else %}{% set content = message['content'] or '' %}{% if '</think>' in content %}{% set content = content.rpartition('</think>')[2] %}{% endif %}{{ '<|Assistant|>' + content + '<|eos|>' }}{% endif %}{% endif %}
{%- if message['role'] == 'tool' %}{% set ns.is_tool = true %}{% if ns.is_output_first %}{{ '<|outputs|><|output|>' + message['content'] + '<|/output|>' }}{% set ns.is_output_first = false %}{% else %}{{ '\\n<|output|>' + message['content'] + '<|/output|>' }}{% endif %}{% endif %}
{%- endfor %}{% if ns.is_tool %}{{ '<|/outputs|>' }}{% endif %}{% if add_generation_prompt and not ns.is_tool %}{{ '<|Assistant|>' }}{% if ns.count %}{{ '{:>3}|{:03d}|{:.1%}'.format(ns.count, ns.count, ns.count / 4) }}{% endif %}{% endif %}
"""

# Signatures of tools, rules in set blocks, generation marks around answers.
STYLES["signatures"] = """\
{%- set rules -%}
{%- if messages and messages[0].role == "system" -%}{{ messages[0].content.replace("/no_think", "").rstrip() }}{%- else -%}You are a careful helper.{%- endif -%}
{%- endset -%}
{%- if enable_thinking is not defined %}{%- set enable_thinking = true %}{%- endif -%}
{%- set mode = "/think" if enable_thinking and "/no_think" not in (messages[0].content if messages else '') else "/no_think" -%}
{{- "<|im|>system\\n## Facts\\n\\nYear limit: {year}\\nToday: {today:>12}\\nMode: {mode}\\n\\n## Rules\\n\\n".format(year=2024, today=strftime_now("%d %B %Y"), mode=mode) -}}
{{- rules ~ "\\n\\n" -}}
{%- if tools -%}
{%- set ns = namespace(xml="") -%}
{%- for tool in tools -%}{%- set ns.xml = ns.xml ~ (tool.function|string|replace("'", '"')) ~ "\\n" -%}{%- endfor -%}
{{- "### Tools\\n\\n<tools>\\n" + ns.xml + "</tools>\\n\\n" -}}
{%- for tool in tools|selectattr("type", "==", "function")|sort(attribute="function.name") -%}
{{ loop.index }}. {{ tool["function"]["name"] | upper | center(14) }}|{{ tool.function.parameters.properties | length }}{{ ", " if not loop.last else "\\n" }}
{%- endfor -%}
{%- endif -%}
{{- "<|/im|>\\n" -}}
{%- for message in messages -%}
{%- set content = message.content if message.content is string else "" -%}
{%- if message.role == "user" -%}{{ "<|im|>user\\n" + content + "<|/im|>\\n" }}
{%- elif message.role == "assistant" -%}
{%- generation -%}
{%- if mode == "/think" -%}{{ "<|im|>assistant\\n" + content.lstrip("\\n") + "<|/im|>\\n" }}{%- else -%}{{ "<|im|>assistant\\n<think>\\n\\n</think>\\n" + content.lstrip("\\n") + "<|/im|>\\n" }}{%- endif -%}
{%- endgeneration -%}
{%- elif message.role == "tool" -%}{{ "<|im|>user\\n" + message.content|string + "<|/im|>\\n" }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ "<|im|>assistant\\n" }}{{ "<think>\\n\\n</think>\\n" if mode == "/no_think" }}{%- endif -%}
"""

# Arguments as tags, schemas by a recursive loop, separators that a joiner writes.
STYLES["tags"] = """\
{%- macro visible(content) -%}
{%- if content is string -%}{{ content }}{%- elif content is iterable and content is not mapping -%}
{%- for item in content -%}{%- if item is mapping and item.type == 'text' -%}{{ item.text }}{%- elif item is string -%}{{ item }}{%- endif -%}{%- endfor -%}
{%- else -%}{{ content|default('', true) }}{%- endif -%}
{%- endmacro -%}
[gMASK]
{%- if tools %}
<|system|>
{% for tool in tools %}
{%- set skipped = ['type', 'description', 'properties', 'required', 'enum'] %}
<function name="{{ tool.function.name|e }}">{{ tool.function.description|e }}
{%- for name, spec in tool.function.parameters.properties.items() recursive %}
{{ '  ' * loop.depth }}<{{ name }} type="{{ spec.type }}"{{ ' required' if loop.depth0 == 0 and name in tool.function.parameters.required|d([]) }}>
{%- if spec.properties %}{{ loop(spec.properties.items()) }}
{{ '  ' * loop.depth }}{% endif %}
{%- for key in spec if key not in skipped %}{{ ' ' ~ key ~ '=' ~ (spec[key]|tojson|safe if spec[key] is mapping or (spec[key] is sequence and spec[key] is not string) else spec[key]|string) }}{% endfor -%}
</{{ name }}>
{%- endfor %}
</function>
{% endfor %}
{%- endif -%}
{%- set last_user = messages|map(attribute='role')|list|reverse|list -%}
{%- set comma = joiner(' | ') -%}
{%- for message in messages -%}
{%- if loop.changed(message.role) %}{{ comma() }}<|{{ message.role }}|>{% endif %}
{{ visible(message.content)|trim }}{{ '/nothink' if message.role == 'user' and enable_thinking is defined and not enable_thinking and not visible(message.content).endswith("/nothink") }}
{%- if message.tool_calls %}
{%- for call in message.tool_calls %}
<call>{{ call.function.name }}
{%- set arguments = call.function.arguments %}
{%- if arguments is mapping %}{% for key, value in arguments.items() %}
<key>{{ key }}</key><value>{{ value|tojson(ensure_ascii=False) if value is not string else value }}</value>{% endfor %}{% else %}{{ arguments }}{% endif %}
</call>{% endfor %}
{%- endif %}
{%- endfor %}
{%- set letters = cycler('a', 'b') %}
{{ last_user|length }}{{ letters.next() }}{{ letters.next() }}{{ letters.next() }}{{ last_user[:2]|join('<') }}
{%- if add_generation_prompt %}<|assistant|>{{ '\\n<think></think>' if (enable_thinking is defined and not enable_thinking) else '' }}{% endif -%}
"""

# A short one on one line, as many models have it.
STYLES["line"] = ("{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must alternate') }}"
                  "{% endif %}{% if message['role'] == 'user' %}{{ '### Q: ' + message['content']|string + '\\n' }}{% elif message['role'] == 'assistant' %}{{ '### A: ' + message['content'] + eos_token + '\\n' }}"
                  "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '### A: ' }}{% endif %}")

# Macros with more arguments than they name, defaults that look at others, whole texts made by slices and joins.
STYLES["macros"] = """\
{%- macro tag(name, end=none) -%}<{{ name }}{% for key, value in kwargs|dictsort %} {{ key }}="{{ value }}"{% endfor %}>{{ varargs|join('') }}{{ caller() if caller }}</{{ end or name }}>{%- endmacro -%}
{%- macro turn(message, index, role=message.role|default('user')) -%}
{%- set name = role if role in ('user', 'assistant', 'tool') else 'system' -%}
{%- call tag(name, index=index, **({'id': message.tool_call_id} if message.tool_call_id else {})) -%}
{%- set content = message.content -%}
{%- if content is mapping or (content is sequence and content is not string) -%}{%- for part in content -%}{{ tag('part', *[part.text, loop.index]) }}{%- endfor -%}
{%- elif content -%}{{ content.strip().splitlines()|map('trim')|select|join(' / ') }}{%- endif -%}
{%- for call in message.tool_calls or [] -%}{{ tag('call', call.function.arguments|string if call.function.arguments is string else call.function.arguments|tojson(indent=None, separators=(',', ':')), name=call.function.name) }}{%- endfor -%}
{%- endcall -%}
{%- endmacro -%}
{{ bos_token }}
{%- for message in messages %}{{ turn(message, loop.index) }}{{ '\\n' if not loop.last else '' }}{% else %}{{ tag('empty') }}{% endfor -%}
{%- set roles = messages|map(attribute='role')|list -%}
{%- if roles[-1:] == ['assistant'] and add_generation_prompt -%}{{ raise_exception('The last message is an answer already') }}{%- endif -%}
{{ '\\n<assistant>' if add_generation_prompt -}}
"""

# Conversations of chat_templates.py, by name and the place of what is given besides.
CHATS = ["user, 0", "system turns, 2", "thinking, 3", "reasoning, 0", "parts, 4", "nothing, 0", "no content, 0", "unknown role, 0",
         "called, 4", "called with text, 5", "called as text, 0", "calls, 3", "answered, 1"]
