"""Templates for chat_templates.py own: each construct that Thimble knows, and what Jinja2 refuses."""

MESSAGES = [{"role": "system", "content": " Be brief. "}, {"role": "user", "content": "Hi <b> \"you\"\n"},
            {"role": "assistant", "content": "Grüße, 空\U0001f600", "tool_calls": [
                {"id": "c1", "function": {"name": "f", "arguments": {"a": 1, "b": [1.5, None, True, "x"], "c": {}}}}]},
            {"role": "user", "content": "Why?"}]
DATA = {"messages": MESSAGES, "n": 7, "x": -2.5, "yes": True, "no": False, "nothing": None, "word": "héllo wörld",
        "numbers": [3, 1, 2, 3], "words": ["b", "A", "c", "a"], "empty": [], "table": {"b": 2, "a": 1, "C": [1, 2]},
        "people": [{"name": "Zoe", "age": 3}, {"name": "adam", "age": 30}, {"name": "Bob"}], "long": "a,b,,c"}

# What is written between {{ and }}, one case each.
EXPRESSIONS = """
1 + 2 * 3 - 4
7 // 2, -7 // 2, 7 % 3, -7 % 3, 7 % -3, 2 ** 10, 7 / 2, 2 ** -1
1.5 + 1, 3 * 0.1, 1e3, 1e16, 1e-5, 123456789.125, 100.0 / 3, -0.0, 1_000
1 < 2 < 3, 1 < 3 < 2, 1 == 1.0, true == 1, 'a' < 'b', [1, 2] < [1, 3], 'a' == 1, none == false
-n, +n, -n|abs, - x, (n)
'a' ~ 1 ~ none ~ true ~ 1.5 ~ undefined_name
'a' 'b' "c" '\\n\\t\\'\\"\\\\ \\x41 \\u00e9 \\101 \\q'
'ab' * 3, [1] * 2, 3 * 'x', 'x' * -1
[1, 'a', none, true, [2], {'k': 'v'}], (1,), (1, 2), ()
{'a': 1, 'b': [1, 2], 'a': 3, 4: 'four'}, {}
{4: 'four'}[4], {4: 'four'}.get(4), 4 in {4: 1}, {4: 1}|list, {1: 2}|tojson
"it's", ["it's", 'a"b', 'a\\'"b', 'tab\\t', 'é\\x01']
'a' in 'cat', 'x' not in 'cat', 1 in [1, 2], 'a' in table, 'z' in table, 3 not in numbers, 'a' in undefined_name
yes and no, yes or no, not yes, not no and yes, 0 or 'x', '' and 1, none or undefined_name or 'end'
'a' if yes else 'b', 'a' if no else 'b', 'a' if no, ('a' if yes) ~ 'b' if yes else 'c'
word[0], word[-1], word[1:3], word[::-1], word[:-1], word[5:], word[::2], word[100:], word[3:1], word[-3:-1], word[99]
numbers[0], numbers[-1], numbers[1:], numbers[::-1], numbers[:2], numbers[9], numbers[-9:2], numbers[3:0:-2]
messages[0].role, messages[0]['role'], messages[0].nope, messages[0]['nope'], table.a, table['b'], messages.0.role
messages[2].tool_calls[0].function.arguments
messages[2].content|length, word|length, numbers|length, table|length, undefined_name|length, ''|length
table.items is mapping, table['items'] is mapping, table['items'] is callable, table.items()|list
messages|tojson
messages|tojson(indent=2)
messages|tojson(ensure_ascii=true)
table|tojson(separators=(',', ':')), table|tojson(sort_keys=true), [1, [], {}, [{}]]|tojson(indent=1)
'</script>&\\'\\x7f\\x1f'|tojson, 1e100|tojson, 0.1|tojson
'{"a": [1, 2.5, "\\\\u00e9\\\\ud83d\\\\ude00", null, true]}'|from_json, '3'|from_json + 1
' a '|trim, 'xxaxx'|trim('x'), none|trim, undefined_name|trim, '\\u3000a\\u2003'|trim
numbers|join, numbers|join(', '), words|join('-'), people|join('|', attribute='name'), undefined_name|join, 'abc'|join(',')
undefined_name|default('d'), none|default('d'), none|default('d', true), ''|default('d', boolean=true), undefined_name|default, ''|d('x')
'wör'|lower, 'abc'|upper, 'ABC'|lower, 'heLLo wOrld'|capitalize, 'heLLo wOrld'|title
numbers|sort, numbers|sort(reverse=true), words|sort, words|sort(case_sensitive=true), people|sort(attribute='name')
table|dictsort, table|dictsort(case_sensitive=true), table|dictsort(by='key', reverse=true), {'a': 2, 'b': 1}|dictsort(by='value')
numbers|unique|list, words|unique|list, words|unique(case_sensitive=true)|list, people|unique(attribute='name')|list
numbers|min, numbers|max, words|min, words|max, empty|max, people|max(attribute='name')
numbers|sum, [1.5, 2]|sum, people|sum(attribute='age') if false else 0, numbers|sum(start=10)
numbers|first, numbers|last, empty|first, word|first, word|last, words|reverse|list, word|reverse
people|map(attribute='name')|list, people|map(attribute='age', default=0)|list, words|map('upper')|list, [' a ']|map('trim')|list
words|map('replace', 'a', 'z')|list, [[1, 2], [3]]|map('length')|list, [[1, 2], [3]]|map('join', '+')|list
people|selectattr('age')|list, people|selectattr('age', 'defined')|list, people|selectattr('name', 'equalto', 'Bob')|list
people|rejectattr('age', 'defined')|map(attribute='name')|list, numbers|select('gt', 1)|list, numbers|reject('equalto', 3)|list
numbers|select|list, [0, 1]|reject|list, none|selectattr('a')|list, undefined_name|map('upper')|list, numbers|select('odd')|list
messages|selectattr('tool_calls', 'defined')|map(attribute='tool_calls.0.function.name')|list
'a\\nb\\n\\nc'|indent, 'a\\nb\\n\\nc'|indent(2, first=true), 'a\\nb\\n\\nc\\n'|indent(2, blank=true), 'a\\nb'|indent('> ')
'abcabc'|replace('b', 'X'), 'abc'|replace('', '-'), 5|replace(5, 6)
'42'|int, '4.9'|int, 'x'|int, 'x'|int(7), 'ff'|int(0, 16), 4.9|int, true|int, none|int, ' 12 '|int, '1.5'|float, 'x'|float, 3|float
'a'|string, 1|string, [1]|string, none|string, undefined_name|string
'abc'|list, table|list, table|items|list, undefined_name|items|list, 'a'|safe
-3|abs, -2.5|abs, (0 - 3)|abs
long.split(','), long.split(',', 2), ' a  b '.split(), 'a b c'.split(none, 1), 'a'.split('x'), ''.split(','), ''.split()
long.rsplit(',', 1), 'a\\nb\\r\\nc\\n'.splitlines(), 'aXbX'.split('X')[-1], 'a--b'.split('--')
' a '.strip(), 'xxaxx'.strip('x'), 'abcba'.lstrip('ab'), 'abcba'.rstrip('ab'), '\\n a \\n'.lstrip('\\n'), ' é '.strip(' é')
'abc'.startswith('a'), 'abc'.endswith('bc'), 'abc'.startswith(('x', 'a')), 'abc'.endswith('abcd')
'a.b.c'.replace('.', '-'), 'a.b.c'.replace('.', '-', 1), 'abc'.replace('', '-')
'abc'.upper(), 'ABC'.lower(), 'aBC'.capitalize(), 'cabac'.find('a'), 'cabac'.rfind('a'), 'x'.find('y'), 'banana'.count('an')
'-'.join(words), ''.join([]), 'abc'.removeprefix('a'), 'abc'.removesuffix('c'), '12'.isdigit(), 'a1'.isalpha(), 'ab'.isalpha()
'{} and {}'.format(1, 'b'), '{0}{1}{0}'.format('a', 'b'), '{x}{{}}'.format(x=none)
table.get('a'), table.get('z'), table.get('z', 5), table.keys()|list, table.values()|list, table.items()|list
dict(a=1, b=2), dict({'a': 1}, b=3), range(3)|list, range(1, 4)|list, range(5, 0, -2)|list, range(0)|list
strftime_now('%Y-%m-%d %H:%M:%S'), strftime_now('%d %b %Y'), strftime_now('%B %d, %Y %A %a %y %I %p 100%%')
namespace(a=1).a, namespace({'b': 2}).b
""".strip().splitlines()

TESTS = """boolean defined false float integer iterable mapping none number sequence string true undefined""".split()
VALUES = "1 2.5 true false none 'a' 'A' [1] (1,) {'a':1} undefined_name range".split()

STATEMENTS = {
    "if": "{% if n > 5 %}a{% elif n %}b{% else %}c{% endif %}{% if no %}a{% elif not n %}b{% else %}c{% endif %}{% if no %}x{% endif %}",
    "for": "{% for m in messages %}{{ loop.index }}{{ loop.index0 }}{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.first }}"
           "{{ loop.last }}{{ loop.length }}{{ loop.depth }}{{ (loop.previtem or {}).role }}{{ (loop.nextitem or {}).role }};{% endfor %}{{ m }}",
    "for over what": "{% for k in table %}{{ k }}{% endfor %}{% for k, v in table.items() %}{{ k }}={{ v }},{% endfor %}"
                     "{% for c in 'añb' %}{{ c }}.{% endfor %}{% for x in undefined_name %}x{% endfor %}{% for (a, b) in [(1, 2)] %}{{ a + b }}{% endfor %}",
    "for if": "{% for x in numbers if x > 1 %}{{ loop.index }}:{{ x }}{{ ',' if not loop.last }}{% endfor %}",
    "for else": "{% for x in empty %}a{% else %}none{% endfor %}{% for x in numbers %}{{ x }}{% else %}none{% endfor %}"
                "{% for x in numbers if x > 9 %}a{% else %}none{% endfor %}",
    "nested for": "{% for x in numbers %}{% for y in words %}{{ loop.depth }}{{ x }}{{ y }} {% endfor %}{{ loop.index }}\n{% endfor %}",
    "break": "{% for x in numbers %}{% if x == 2 %}{% break %}{% endif %}{{ x }}{% endfor %}|"
             "{% for x in numbers %}{% if x == 1 %}{% continue %}{% endif %}{{ x }}{% endfor %}",
    "cycle": "{% for x in numbers %}{{ loop.cycle('a', 'b') }}{% endfor %}",
    "set": "{% set a = 1 %}{% set b, c = 2, 3 %}{% set d = 4, 5 %}{{ a }}{{ b }}{{ c }}{{ d }}",
    "set in for": "{% set a = 1 %}{% for x in numbers %}{{ a }}{% set a = a + x %}{{ a }} {% endfor %}{{ a }}",
    "set in if": "{% if yes %}{% set a = 5 %}{% endif %}{{ a }}",
    "set block": "{% set a %}x{{ n }}y{% endset %}[{{ a }}]{% set b | upper | trim %} <b> {% endset %}[{{ b }}]",
    "set block scope": "{% set a = 1 %}{% set b %}{% set a = 2 %}{{ a }}{% endset %}{{ a }}{{ b }}",
    "namespace": "{% set ns = namespace(count=0, seen=[]) %}{% for x in numbers %}{% set ns.count = ns.count + x %}"
                 "{% set ns.seen = ns.seen + [x] %}{% endfor %}{{ ns.count }}{{ ns.seen }}{{ ns.nope }}",
    "namespace block": "{% set ns = namespace(t='') %}{% set ns.t %}text{% endset %}{{ ns.t }}",
    "macro": "{% macro greet(name, mark='!', end=mark ~ '?') %}{{ name }}{{ mark }}{{ end }}{% endmacro %}"
             "{{ greet('a') }} {{ greet('b', '.') }} {{ greet(mark='-', name='c') }} {{ greet('d', end='') }} {{ greet() }}",
    "macro sees": "{% set a = 1 %}{% macro f() %}{{ a }}{{ n }}{{ later }}{% set a = 9 %}{% endmacro %}{{ f() }}{% set later = 5 %}{{ f() }}{{ a }}",
    "macro recurses": "{% macro f(x) %}{% if x is mapping %}{% for k, v in x|items %}{{ k }}({{ f(v) }}){% endfor %}"
                      "{% else %}{{ x }}{% endif %}{% endmacro %}{{ f({'a': {'b': {'c': 1}}, 'd': 2}) }}",
    "macro in for": "{% for x in numbers %}{% macro f() %}<{{ x }}>{% endmacro %}{{ f() }}{% endfor %}",
    "macro as value": "{% macro f() %}m{% endmacro %}{% set g = f %}{{ g() }}{{ f is callable }}",
    "filter block": "{% filter upper|trim %} a{{ long }} {% endfilter %}|{% filter indent(2) %}a\nb{% endfilter %}",
    "generation": "a{% generation %}{% set q = 1 %}b{{ q }}{% endgeneration %}c",
    "append and pop": "{% set l = [] %}{% for x in numbers %}{% set _ = l.append(x) %}{% endfor %}{{ l }}{{ l.pop(0) }}{{ l.pop() }}{{ l }}"
                      "{% set _ = l.extend([7]) %}{% set _ = l.insert(0, 8) %}{{ l }}{{ l.index(7) }}{% set m = l %}{% set _ = m.append(0) %}{{ l }}",
    "dict methods": "{% set d = {'a': 1} %}{% set _ = d.update({'b': 2}, c=3) %}{{ d }}{{ d.pop('a') }}{{ d.pop('z', 0) }}{{ d }}{% set e = d.copy() %}"
                    "{% set _ = e.update(b=9) %}{{ d.b }}{{ e.b }}",
    "white space": "a  \n  {%- if yes -%}  \n b \n {%- endif -%} \n c\n  {% if yes %}\n  d\n  {% endif %}\n e {{- 'f' -}} \n g",
    "lines": "{% if yes %}\n\nx\n  {% endif %}  y\n\t{# note #}\nz\n  {# note #} w\n",
    "plus": "  {%+ if yes %}a{% endif +%}\nb\n  {%+ set q = 1 +%}\nc",
    "comments": "a{# {{ x }} {% if %} #}b {#- c -#} d\n{# e #}\nf",
    "carriage returns": "a\r\nb{% if yes %}\r\nc{% endif %}\rd\r\n",
    "braces": "{{ {'a': {'b': 1}} }}{{ {'a':{}}['a'] }}{ { } } {{ '{{' }}{{ '%}' }}",
    "end newline": "a\n\n",
    "no end newline": "{% if yes %}a{% endif %}\n",
    "chat": "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>\n{{ m['content'] | trim }}<|end|>\n{% endfor %}"
            "{% if add_generation_prompt is defined and add_generation_prompt %}<|assistant|>\n{% endif %}",
}

# Jinja2 refuses these when they run.
REFUSED = """
{{ undefined_name.x }}
{{ undefined_name['x'] }}
{{ undefined_name + 1 }}
{{ 'a' + undefined_name }}
{{ undefined_name < 1 }}
{{ messages.nope.more }}
{{ 'a' + 1 }}
{{ [1] + (2,) }}
{{ 1 / 0 }}
{{ 1 // 0 }}
{{ 1 % 0 }}
{{ 'a' < 1 }}
{{ 1 in 5 }}
{{ 1 in 'a' }}
{{ 'a' in none }}
{{ none|length }}
{{ none|items|list }}
{{ n|items|list }}
{{ none is even }}
{% for x in none %}{% endfor %}
{% for x in 5 %}{% endfor %}
{% for a, b in [(1, 2, 3)] %}{% endfor %}
{% set a.b = 1 %}
{% set table.b = 1 %}
{{ undefined_name|tojson }}
{{ range|tojson }}
{{ raise_exception('in its own words') }}
{{ range(1000000) }}
{{ ''.split('') if false else 'a'.split('') }}
{{ [].pop() }}
{{ {}.pop('a') }}
{{ [1].index(2) }}
{{ '{} {}'.format(1) }}
{{ '{a}'.format(1) }}
{{ '{'.format() }}
{% macro f(a) %}{% endmacro %}{{ f(1, 2) }}
{% macro f(a) %}{% endmacro %}{{ f(b=2) }}
{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}
{{ none.strip() }}
{{ '{'|from_json }}
{{ [1, 'a']|sort }}
{{ [1, 'a']|max }}
{{ 'a'[1:2:0] }}
{{ -'a' }}
{{ people|sum(attribute='age') }}
{{ words|map('nope')|list }}
{{ words|select('nope')|list }}
""".strip().splitlines()

everything = [("all", DATA)]
GROUPS = [(e, "{{ " + e + " }}", everything) for e in EXPRESSIONS]
GROUPS += [(f"is {t}", "".join("{{ %s is %s }},{{ %s is not %s }} " % (v, t, v, t) for v in VALUES), everything) for t in TESTS]
GROUPS += [("tests with arguments", "{{ 1 is eq 1 }}{{ 1 is equalto(2) }}{{ 1 is ne 1 }}{{ 1 is lt 2 }}{{ 1 is gt(2) }}{{ 2 is ge 2 }}{{ 3 is le 2 }}"
            "{{ 9 is divisibleby 3 }}{{ 'a' is lower }}{{ 'aB' is lower }}{{ 'A' is upper }}{{ 4 is even }}{{ 4 is odd }}{{ 3 is odd }}{{ 3 is even }}{{ -1 is odd }}{{ 1 is in [1] }}{{ 'a' is in('b') }}{{ 1 is lessthan 2 and 2 is greaterthan 1 }}"
            "{{ 'y' if n is defined and n is not none else 'z' }}", everything)]
GROUPS += [(name, source, everything) for name, source in STATEMENTS.items()]
GROUPS[-1] = ("chat", STATEMENTS["chat"], [("with", {**DATA, "bos_token": "<s>", "add_generation_prompt": True}), ("without", DATA)])
GROUPS += [(source, source, everything) for source in REFUSED]
