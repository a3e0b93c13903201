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
'abc'|list, table|list, table|items|list, undefined_name|items|list
-3|abs, -2.5|abs, (0 - 3)|abs
long.split(','), long.split(',', 2), ' a  b '.split(), 'a b c'.split(none, 1), 'a'.split('x'), ''.split(','), ''.split()
long.rsplit(',', 1), 'a\\nb\\r\\nc\\n'.splitlines(), 'aXbX'.split('X')[-1], 'a--b'.split('--')
' a '.strip(), 'xxaxx'.strip('x'), 'abcba'.lstrip('ab'), 'abcba'.rstrip('ab'), '\\n a \\n'.lstrip('\\n'), ' é '.strip(' é')
'abc'.startswith('a'), 'abc'.endswith('bc'), 'abc'.startswith(('x', 'a')), 'abc'.endswith('abcd')
'a.b.c'.replace('.', '-'), 'a.b.c'.replace('.', '-', 1), 'abc'.replace('', '-')
'abc'.upper(), 'ABC'.lower(), 'aBC'.capitalize(), 'cabac'.find('a'), 'cabac'.rfind('a'), 'x'.find('y'), 'banana'.count('an')
'-'.join(words), ''.join([]), 'abc'.removeprefix('a'), 'abc'.removesuffix('c'), '12'.isdigit(), 'a1'.isalpha(), 'ab'.isalpha()
'{} and {}'.format(1, 'b'), '{0}{1}{0}'.format('a', 'b'), '{x}{{}}'.format(x=none)
table.get('a'), table.get('z'), table.get('z', 5), table.get('z', undefined_name), table.keys()|list, table.values()|list, table.items()|list
dict(a=1, b=2), dict({'a': 1}, b=3), range(3)|list, range(1, 4)|list, range(5, 0, -2)|list, range(0)|list
people|selectattr('name', '==', 'Bob')|list, people|selectattr('name', 'eq', 'Bob')|list, people|rejectattr('name', '!=', 'Bob')|list, people|selectattr('name', 'ne', 'Bob')|list
numbers|select('<', 3)|list, numbers|select('lt', 3)|list, numbers|select('lessthan', 3)|list, numbers|select('<=', 2)|list, numbers|select('le', 2)|list
numbers|select('>', 2)|list, numbers|select('gt', 2)|list, numbers|select('greaterthan', 2)|list, numbers|select('>=', 3)|list, numbers|select('ge', 3)|list, numbers|reject('==', 3)|list
numbers|select('in', [1, 2])|list, words|select('in', 'abc')|list, words|reject('upper')|list, words|select('lower')|list, numbers|select('divisibleby', 3)|list, numbers|reject('even')|list
[1, 1.5, true, none, 'a']|select('integer')|list, [1, 1.5, true]|select('float')|list, [1, true]|select('boolean')|list, [1, none]|select('none')|list, [range, 1]|select('callable')|list|length
['upper', 'nope', '==']|select('filter')|list, ['defined', 'nope', '==']|select('test')|list, 'trim' is filter, 'trim' is test, 'odd' is test, 3 is filter
none is sameas none, true is sameas(true), 1 is sameas 1.0, table is sameas table, {} is sameas {}, numbers|select('sameas', 3)|list, 1 is sameas true
'%s and %d' % ('a', 7), '%s' % 'x', '%s' % [1], '%5s|%-5s|%05d|%+d|% d' % ('a', 'b', 42, 5, 5), '%.2f|%8.3f|%-8.1f|%08.2f' % (3.14159, 2.5, 2.25, -1.5)
'%x %X %o %#x %#o' % (255, 255, 8, 255, 8), '%c%c' % ('a', 98), '%e|%.1E|%g|%G|%g|%g' % (12345.678, 0.00012, 0.00001, 1e20, 100000, 1234567), '%%' % ()
'%(a)s-%(b)03d' % {'a': 'x', 'b': 5}, '%r %r' % ('a', 1), '%.3s|%10.2s' % ('abcdef', 'xyz'), '%*d|%-*d|%.*f' % (5, 42, 5, 42, 1, 2.55), '%s' % (none,), '%s' % undefined_name
'%d%%' % 50, '%d' % 3.99, '%d' % -3.99, '%i' % true, '%5.1f%%' % 12.345, 'abc' % [], 'abc' % {}, '%s %s' % (1.0, true), '%.0f %.0f' % (0.5, 1.5), '%5d' % -3, '%05d' % -3, '%+.1f' % 2.0, '%.3d' % 5
'%s-%s'|format('a', 1), '%(a)s'|format(a=2), '%.1f'|format(2.25), 'x'|format
'{:.2f}|{:8.1f}|{:<8}|{:>8}|{:^8}|{:*^9}'.format(3.14159, 2.5, 'a', 'b', 'c', 'mid'), '{0:03d} {1:+d} {0:x} {0:#x} {0:b}'.format(7, 5), '{:,} {:,.2f} {:_}'.format(1234567, 9876543.21, 1000)
'{:%}|{:.1%}|{:e}|{:g}|{:G}'.format(0.25, 0.123, 1234.5, 0.00001, 1e20), '{!r} {!s:>4}|{:{}}|{:{w}.{p}f}'.format('a', 'b', 'c', 5, 2.0, w=6, p=1), '{:d}|{:5}|{:<5}|{:05}'.format(true, 42, 42, 42)
'{a.b}|{0[k]}|{0[l][1]}|{1[0]}'.format({'k': 'v', 'l': [1, 2]}, 'xy', a={'b': 'c'}), '{:c}'.format(97), '{0[b]}|{0.b}|{0[c]}'.format({'a': 1}), '{:.3}|{:10.3}|{}'.format('abcdef', 'abcdef', none), '{:.3}|{}|{:.1}'.format(1234.5, 1.0, 0.05), '{:08.2f}|{:+.0f}|{:09,}'.format(-3.14159, 2.5, 12345)
42.55|round, 42.55|round(1), 42.55|round(1, 'floor'), 42.51|round(1, 'ceil'), 42|round, 2.5|round, 3.5|round, 0.125|round(2), 2.675|round(2), 15|round(-1), 42.7|round|int, 1234.5|round(-2), true|round, 5|round(0, 'ceil')
numbers|batch(3)|list, numbers|batch(3, 'x')|list, numbers|slice(3)|list, numbers|slice(3, 'x')|list, []|batch(2)|list, []|slice(2)|list, range(10)|slice(3)|map('join')|list, 'abcde'|batch(2)|map('join')|list
table|attr('items') is callable, table|attr('a'), 'x'|attr('upper') is callable, table|attr('nope')
'foo bar baz qux'|truncate(9), 'foo bar baz qux'|truncate(9, true), 'foo bar baz qux'|truncate(11), 'foo bar baz qux'|truncate(11, false, '...', 0), 'foo bar baz'|truncate(5, end='~', leeway=0), 'short'|truncate, 'héllo wörld again'|truncate(9, true, leeway=0)
'one two  three_four 5,six'|wordcount, ''|wordcount, 'é ü'|wordcount, 'ab'|center(7), 'ab'|center(6), 'abc'|center(6), 'x'|center(1), ''|center|length
numbers|sum, [0.1, 0.2]|sum, [[1], [2]]|sum(start=[]), people|map(attribute='age', default=1)|sum, [1, 2.5, 0]|min, words|min(case_sensitive=true), words|max(case_sensitive=true), people|map(attribute='age', default=0)|max
'abc'|replace('b', 'x'), 'aaa'|replace('a', 'b', 2), 'xxhixx'|trim('x'), '  a '|trim(none), 'aBc dEf'|title, 'o\\'neil (a) [b] {c} <d>-e f.g'|title, 'o\\'neil mc.x 3d'.title(), 'ÀÉ îÏ'|capitalize
'ß ŉ ǆ ΑΣ ΑΣ. Σ İ ﬁ é Ж'|upper, 'ß ŉ ǆ ΑΣ ΑΣ. Σ İ ﬁ é Ж'|lower, 'ß ŉ ǆ ΑΣ ΑΣ. Σ İ ﬁ é Ж'|title, 'ß ŉ ǆ ΑΣ Σ İ ﬁ é Ж'.title(), 'ǆab ßx'.capitalize(), 'ǆ ß ΑΣ'.swapcase(), 'Straße ΑΣ ﬁ É'.casefold(), 'ÉA'.lower() == 'éa'
'Grüße' is lower, 'GRÜSSE' is upper, 'Ab' is upper, '1' is upper, '' is lower, 'é' is lower, 'ЖЖ' is upper, 5 is lower, ['É', 'é']|select('upper')|list, ['b', 'É', 'a', 'é']|sort, ['É', 'é', 'e']|unique|list
'a/b c?d=é&'|urlencode, {'a b': 'c/d', 'e': 1}|urlencode, [('x', 'y z'), ('q', none)]|urlencode, 5|urlencode, '~_.-'|urlencode
'a,b;c'.partition(','), 'a,b,c'.rpartition(','), 'abc'.partition(','), 'abc'.rpartition(','), 'a b  c'.rsplit(none, 1), 'a b  c'.rsplit(), ' a b '.rsplit(none, 1), 'a,b,c'.rsplit(',')
'abcabc'.index('c'), 'abcabc'.rindex('c'), 'abcabc'.find('c', 3), 'abcabc'.find('a', 1, 3), 'abcabc'.find('a', -3), 'abcabc'.rfind('a', 0, 3), 'aéa'.rfind('a'), 'abcabc'.count('a', 1), 'abc'.find('', 9), 'abc'.count(''), 'ab'.find('')
'abc'.startswith('b', 1), 'abc'.startswith(('x', 'b'), 1), 'abc'.endswith('b', 0, 2), 'abc'.endswith(('x', 'c')), 'abc'.startswith(''), 'abc'.startswith('', 9), 'abc'.startswith('c', -1), 'abc'.endswith(())
'42'.zfill(5), '-42'.zfill(5), '+4'.zfill(4), 'abc'.zfill(2), ''.zfill(2), 'ab'.ljust(5) ~ '|', 'ab'.rjust(5, '.'), 'ab'.center(7, '*'), 'ab'.center(6, '*'), 'abc'.center(6, '*'), 'é'.ljust(3, 'ü'), 'ab'.center(1)
'abc1'.isalnum(), 'ab c'.isalnum(), 'é一ª'.isalpha(), '²'.isdigit(), '²'.isdecimal(), '½'.isnumeric(), '½'.isdigit(), '٣'.isdecimal(), '٣'.isdigit(), ' \\t\\n'.isspace(), ''.isspace(), 'Ab Cd'.istitle(), 'AB'.istitle(), 'a_1'.isidentifier(), '1a'.isidentifier(), 'é'.isascii(), ''.isascii(), 'AB1'.isupper(), 'ab1'.islower(), '12'.isupper()
'aBcÉ'.swapcase(), 'a\\tb'.expandtabs(4), 'ab\\tc\\n\\td'.expandtabs(), 'a\\nb\\r\\nc'.splitlines(true), 'a\\n\\nb'.splitlines(), 'a\\x0bb\\u2028c'.splitlines(), 'héllo'.removeprefix('hé'), 'x'.removesuffix('')
0x1F, 0b101, 0o17, 0xff_ff, 1_000.5, '0x1f'|int(0, 16), '1f'|int(0, 16), '0b11'|int(0, 2), 'zz'|int(-1, 36), '1_000'|int, ' -5 '|int, '1e3'|int, '1e3'|float, 'inf'|float, '-inf'|float, '.5'|float, '5.'|float, '1_0.5'|float, '+3'|float, 'nan'|float, '0x10'|float(9)
'\\u200b\\xa0é\\x7f\\U0001f600', ['\\u200b', '\\xa0', 'é', '\\x7f', '\\U0001f600', '\\u2028', '\\x85']
[3, 1, 2]|sort, (3, 1)|sort, 'cab'|sort, table|sort, people|sort(attribute='name,age')|map(attribute='name')|list, [{'a': 1, 'b': 2}, {'a': 1, 'b': 1}]|sort(attribute='a,b'), [(2, 'a'), (1, 'b')]|sort, [1]|sort(attribute='x'), [{}, {}]|sort(attribute='x'), [none]|sort
(table|items) is iterable, {'b': 1, 'a': 2}|items|sort, table|items|map('first')|list, 'abc'|first, table|first, table|last, (1, 2)|last, numbers|reverse is iterable, 'abc'|reverse, {'a': 1, 'b': 2}|reverse|list
{'a': {'b': [1, 2]}}|map('upper')|list, [{'a': {'b': 1}}]|map(attribute='a.b')|list, [{'a': {}}]|map(attribute='a.b', default='d')|list, [[1, 2]]|map(attribute=1)|list, [[1, 2]]|map('first')|list, ['a']|map('indent', 2, true)|list, [1.26]|map('round', 1)|list
'a' ~ 'b' * 2, ('a', 1) == ('a', 1), [1] == (1,), {'a': 1} == {'a': 1.0}, 'é' > 'z', (1, 2) < (1, 3), [] < [1], 1 < 2.5, true + true, 5 // 2.0, -5 // 2.0, 5.5 % 2, -5.5 % 2, 2 ** 0.5, 2.0 ** 2, 1 / 3
undefined_name is callable, undefined_name is sequence, undefined_name is iterable, undefined_name|list, undefined_name|upper, undefined_name|trim ~ 'x', undefined_name|replace('a', 'b'), undefined_name == undefined_name, undefined_name == none, undefined_name|first is undefined, undefined_name in [1]
''|first is undefined, []|last is undefined, []|min is undefined, []|sum, [none, 1]|first, none|string, none|list if false else 'x', none|default('d'), [[]]|first
2.5 is odd, -0.5|round(0, 'ceil'), numbers|select('in', {1: 2})|list, 3 is even, '' is divisibleby 3 if no, (messages[1].content|e), messages[1].content|escape|e ~ '<', messages[1].content|e|forceescape, '<a>'|safe + '<b>', '<b>' + '<a>'|safe, ('<a>'|safe) ~ '<b>', ['<'|safe, '<'|e], '<'|e is escaped, '<' is escaped, 5|e, undefined_name|e, none|safe
('<i>'|safe) * 2, ('%s <%s>'|safe) % ('<', '>'|safe), '%s'|safe|format('<&>'), ('{} {}'|safe).format('<', '<'|safe), ('<a>,<b>'|safe).split(',')|last + '<', ('<a>'|safe)|upper + '<', ('<a>'|safe)|trim + '<', ('<a>'|safe)[1:] + '<', (' <'|safe)|title + '<', ('a<'|safe)|replace('a', '>') + '<'
('<a>'|safe)|indent + '<', ['<'|safe, '<']|join + '<', (', '|safe).join(['<', '<'|safe]), ('ab'|safe).replace('a', '<'), ('<a b c d'|safe)|truncate(6, true, '>', 0), {'a': '"', 'b': none, 'c': 1}|xmlattr, {'a': '<'}|xmlattr(false), '<'|safe|tojson, '<'|safe == '<', {'<'|safe: 1}['<'], ('<'|safe)|string + '<', ('<'|safe)|reverse + '<'
strftime_now('%Y-%m-%d %H:%M:%S'), strftime_now('%d %b %Y'), strftime_now('%B %d, %Y %A %a %y %I %p 100%%')
strftime_now('%e|%-d|%-m|%-H|%-I|%-M|%-S|%j|%-j|%h|%F|%T|%R|%D|%x|%X|%c|%r|%u|%w|%U|%W|%f|%Z|%z|%n|%t|%%'), strftime_now('plain'), strftime_now('')
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
                "{% for x in numbers if x > 9 %}a{% else %}none{% endfor %}"
                "{% for x in numbers %}a{% continue %}{% else %}none{% endfor %}{% for x in numbers %}{% if x == 2 %}{% break %}{% endif %}{{ x }}{% else %}none{% endfor %}",
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
    "list methods": "{{ [1, 2, 1].index(2) }}{{ [1, 2, 1].count(1) }}{{ (1, 2).index(2) }}{{ range(5).count(3) }}{{ [1, 2].copy() }}",
    "nothing is changed": "{{ numbers.reverse is defined }}{{ table.pop is defined }}{{ table['update'] is defined }}|{{ numbers.sort }}|"
                          "{% if no %}{% set _ = numbers.reverse() %}{% endif %}{{ table.copy() }}",
    "lists grow and shrink": "{% set seen = namespace(ids=[]) %}{% for x in words %}{% set _ = seen.ids.append(x) %}{% endfor %}{{ seen.ids }}"
                             "{{ seen.ids.pop(0) }}{{ seen.ids.pop() }}{{ seen.ids|length }}{% set l = [1, 2, 3] %}{% set _ = l.insert(1, 9) %}"
                             "{% set _ = l.insert(-1, 8) %}{% set _ = l.extend(l) %}{{ l }}{{ l.pop(-2) }}{{ l }}{{ l.append is defined }}"
                             "{% set grown = [1, 2] %}{% for x in grown|list if grown.append(x) is none %}{{ x }}{% endfor %}{{ grown }}",
    "whole branches": "{% if no %}{{ x|nope }}{{ x is nope }}{{ nope(1) }}{{ x.nope() }}{{ lipsum() }}{{ cycler() }}{% else %}a{% endif %}"
                      "{{ (x|nope) if no else 'b' }}{{ 'c' if yes else x is nope }}{{ 'd' if yes or x is nope }}",
    "recursive": "{% for k in [{'n': 1, 'in': [{'n': 2, 'in': [{'n': 3}]}, {'n': 4}]}, {'n': 5}] recursive %}{{ loop.depth }}{{ loop.depth0 }}:{{ k.n }}"
                 "{% if k['in'] %}[{{ loop(k['in']) }}]{% endif %}{{ ',' if not loop.last }}{% endfor %}",
    "recursive if else": "{% for x in [3, 1] if x > 1 recursive %}{{ x }}{{ loop([1]) }}{{ loop([x - 1]) if x > 2 }}{% else %}-{% endfor %}",
    "changed": "{% for x in [1, 1, 2, 2, 1] %}{{ loop.changed(x) }}{{ loop.changed(x, 1) }} {% endfor %}",
    "items around": "{% for x in 'abc' %}{{ loop.previtem|default('-') }}{{ x }}{{ loop.nextitem is defined }}{{ loop.previtem is undefined }} {% endfor %}",
    "loop itself": "{% for x in numbers %}{{ loop|length }}{{ loop is iterable }}{{ loop is callable }}{% set outer = loop %}"
                   "{% for y in 'ab' %}{{ outer.index }}{{ loop.index }}{% endfor %}{% endfor %}",
    "call": "{% macro box(title, n=2) %}<{{ title }}>{{ caller() }}{{ caller()|upper }}{{ n }}{% endmacro %}"
            "{% set a = 'x' %}{% call box('t') %}in {{ a }}{% endcall %}{% call box(n=3, title='u') %}b{% endcall %}",
    "call with arguments": "{% macro each(items) %}{% for i in items %}{{ caller(i, loop.index) }};{% endfor %}{% endmacro %}"
                           "{% call(item, at=0, more='m') each(words) %}{{ at }}={{ item }}{{ more }}{% endcall %}",
    "caller or none": "{% macro f() %}{{ caller() if caller else 'none' }}{{ caller is defined }}{% endmacro %}{{ f() }}{% call f() %}c{% endcall %}",
    "varargs": "{% macro f(a, b='B') %}{{ a }}{{ b }}{{ varargs }}{{ kwargs }}{% endmacro %}{{ f(1) }}{{ f(1, 2, 3, 4) }}{{ f(1, z=5, b=6) }}{{ f(k=1) }}",
    "spread": "{% macro f(a, b, c=3) %}{{ a }}{{ b }}{{ c }}{% endmacro %}{{ f(*[1, 2]) }}{{ f(1, **{'b': 5, 'c': 6}) }}{{ f(*(1,), b=2) }}"
              "{{ f(*[1], **{'b': 2}) }}{{ dict(**{'a': 1}) }}{{ 'a-b'.split(*['-']) }}{{ 'ab'|replace(*['a', 'b']) }}{{ namespace(**{'q': 1}).q }}",
    "with": "{% set a = 1 %}{% with a = 2, b = a %}{{ a }}{{ b }}{% set c = 5 %}{{ c }}{% endwith %}{{ a }}{{ b }}{{ c }}{% with %}{% set a = 3 %}{{ a }}{% endwith %}{{ a }}",
    "raw": "{% raw %}{{ a }}{% if %}{# #}{% endraw %}|{%- raw -%}  {{ b }}  {%- endraw -%}  c\n  {% raw %}\n  x {{ y }}\n  {% endraw %}\nd\n{%+ raw %} e {%+ endraw +%}\nf",
    "print": "{% print 1 + 1 %}{% print 'a', 'b' %}{% for x in 1, 2 %}{{ x }}{% endfor %}",
    "filter chains": "{% filter replace('a', 'b')|upper %}banana{% endfilter %}{% set x | replace('a', 'o') | length %}banana{% endset %}{{ x }}",
    "cycler": "{% set c = cycler('a', 'b', 'c') %}{{ c.next() }}{{ c.next() }}{{ c.current }}{{ c.next() }}{{ c.next() }}{{ c.reset() }}{{ c.current }}",
    "joiner": "{% set j = joiner(' | ') %}{% for x in words %}{{ j() }}{{ x }}{% endfor %}{% set k = joiner() %}{{ k() }}a{{ k() }}b{{ k() }}",
    "targets": "{% for a, (b, c) in [(1, (2, 3)), (4, [5, 6])] %}{{ a }}{{ b }}{{ c }} {% endfor %}{% set (p, q) = (1, 2) %}{{ p }}{{ q }}{% for (a, b) in {'x': 1}.items() %}{{ a }}{{ b }}{% endfor %}",
    "iterators": "{% set m = words|map('upper') %}{{ m|first }}{{ m|join(',') }}{{ m|list }}{% if numbers|select('gt', 99) %}always{% endif %}"
                 "{{ (words|map('upper')) is iterable }}{{ (words|map('upper')) is sequence }}{{ (words|map('upper'))[0] is defined }}",
    "views": "{{ table.keys() }}{{ table.values() }}{{ table.items() }}{{ table.items()|length }}{{ table.keys() is sequence }}{{ 'a' in table.keys() }}"
             "{% if {}.items() %}x{% else %}y{% endif %}{{ table.items()|list|first }}{{ table.keys()|sort|join(',') }}",
    "ranges": "{{ range(3) }}{{ range(1, 9, 2) }}{{ range(5)[1] }}{{ range(5)[-1] }}{{ range(5)|length }}{{ 3 in range(5) }}{{ range(0)|list }}{{ range(2) == range(2) }}{{ range(2) is sequence }}",
    "groups": "{% for g in [{'k': 'b', 'v': 1}, {'k': 'A', 'v': 2}, {'k': 'B', 'v': 3}]|groupby('k') %}{{ g.grouper }}{{ g.list|map(attribute='v')|list }}{{ g[0] }}{% endfor %}"
              "{% for k, items in people|groupby('age', default=0) %}{{ k }}:{{ items|length }} {% endfor %}{{ [{'k': 1}]|groupby('k') }}",
    "white space": "a  \n  {%- if yes -%}  \n b \n {%- endif -%} \n c\n  {% if yes %}\n  d\n  {% endif %}\n e {{- 'f' -}} \n g",
    "lines": "{% if yes %}\n\nx\n  {% endif %}  y\n\t{# note #}\nz\n  {# note #} w\n",
    "plus": "  {%+ if yes %}a{% endif +%}\nb\n  {%+ set q = 1 +%}\nc  {{+ 'd' }}{{+yes}}{#+ e #}\nf",
    "comments": "a{# {{ x }} {% if %} #}b {#- c -#} d\n{# e #}\nf",
    "several lines": "{{ 'a'\n  'b' }}{{ {\n 'a': 1,\n} }}{% set x = [\n1,\n2,\n] %}{{ x }}{%- if yes\n and yes -%}\n c {% endif %}",
    "carriage returns": "a\r\nb{% if yes %}\r\nc{% endif %}\rd\r\n",
    "braces": "{{ {'a': {'b': 1}} }}{{ {'a':{}}['a'] }}{ { } } {{ '{{' }}{{ '%}' }}",
    "end newline": "a\n\n",
    "no end newline": "{% if yes %}a{% endif %}\n",
    "chat": "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>\n{{ m['content'] | trim }}<|end|>\n{% endfor %}"
            "{% if add_generation_prompt is defined and add_generation_prompt %}<|assistant|>\n{% endif %}",
}

# Jinja2 refuses these, most of them when they run.
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
{{ [1].sort() }}
{{ [1].pop(3) }}
{{ [1].remove(1) }}
{{ [1].reverse() }}
{{ {}.update(a=1) }}
{{ {}.setdefault('a', 1) }}
{{ {}.clear() }}
{{ {'a': 1}.popitem() }}
{{ table['pop']('a') }}
{{ nope(1) }}
{{ 'a'.nope() }}
{% if yes %}{{ 1|nope }}{% endif %}
{% if yes %}{{ 1 is nope }}{% endif %}
{{ 1|nope if yes }}
{{ lipsum() if false else nope() }}
{{ (words|map('upper'))|length }}
{{ (words|map('upper'))|last }}
{{ (words|map('upper'))[1:] }}
{{ words|map('upper')|tojson }}
{{ range(3)|tojson }}
{{ table.items()|tojson }}
{{ table.items()[0].x }}
{{ [1] < (2,) }}
{% for x in numbers %}{{ loop([1]) }}{% endfor %}
{% for x in [[]] recursive %}{{ loop(x, x) }}{% endfor %}
{% macro f() %}{% endmacro %}{% call f() %}{% endcall %}
{% macro f() %}{{ caller() }}{% endmacro %}{{ f() }}
{% macro f() %}{{ caller(1) }}{% endmacro %}{% call f() %}{% endcall %}
{% macro f(a) %}{{ a }}{% endmacro %}{{ f(1, **{'a': 2}) }}
{% macro f(a) %}{{ a }}{% endmacro %}{{ f(a=1, **{'a': 2}) }}
{% macro f(a) %}{{ a }}{% endmacro %}{{ f(*5) }}
{% macro f(a) %}{{ a }}{% endmacro %}{{ f(**5) }}
{% macro f(a) %}{{ kwargs }}{% endmacro %}{{ f(1, 2) }}
{% for a, (b, c) in [(1, 2)] %}{% endfor %}
{{ cycler() }}
{{ cycler.x.y }}
{{ '%d' % 'a' }}
{{ '%s %s' % 'a' }}
{{ '%s' % ('a', 'b') }}
{{ '%(a)s' % 1 }}
{{ '%(a)s' % {'b': 1} }}
{{ '%q' % 1 }}
{{ '%' % 1 }}
{{ '%c' % 'ab' }}
{{ '%x' % 1.5 }}
{{ '{:d}'.format('a') }}
{{ '{:d}'.format(1.5) }}
{{ '{:s}'.format(1) }}
{{ '{:=5}'.format('a') }}
{{ '{:,}'.format('a') }}
{{ '{:.2}'.format(1) }}
{{ '{:q}'.format(1) }}
{{ '{:5}'.format(none) }}
{{ '{:5}'.format([1]) }}
{{ '{} {0}'.format(1) }}
{{ '{!x}'.format(1) }}
{{ '{0.__class__.x}'.format(1) }}
{{ '%s'|format(1, a=2) }}
{{ 'a'.index('b') }}
{{ 'a'.partition('') }}
{{ 'a'.center(5, 'ab') }}
{{ 'a'.startswith(['a']) }}
{{ 'abc'|truncate(1) }}
{{ 'a'|round }}
{{ 1.5|round(1, 'up') }}
{{ 1|groupby('a') }}
{{ [1] in {} }}
{{ {}.get([1]) }}
{{ messages|unique|list }}
{{ 1|indent }}
{{ 'a'|trim(1) }}
{{ 'a'|attr(1) }}
{{ [1] is filter }}
{{ undefined_name|int }}
{{ undefined_name|float }}
{{ [1]|slice(0)|list }}
{{ 1|nope }}
{{ 1 is nope }}
{% for x in empty %}{{ x|nope }}{% endfor %}
{% if no %}{% for x in empty %}{{ x|nope }}{% endfor %}{% endif %}
{% if no %}{% set a %}{{ 1|nope }}{% endset %}{% endif %}
{% if no %}{% with %}{{ 1|nope }}{% endwith %}{% endif %}
{% if no %}{% macro f() %}{{ 1|nope }}{% endmacro %}{% endif %}
{% if no %}{% filter nope %}{% endfilter %}{% endif %}
{% if no %}{% call range() %}{{ 1|nope }}{% endcall %}{% endif %}
{% if no %}{% generation %}{{ 1|nope }}{% endgeneration %}{% endif %}
{% if no %}{% include 'a' %}{% import 'a' as b %}{% endif %}{{ nope() }}
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
LARGE = {"a": 123456789012345678901234567890, "b": -123456789012345678901234567890, "c": 18446744073709551616, "d": [9223372036854775808]}
GROUPS += [("large integers: " + e, "{{ " + e + " }}", [("large", {**DATA, "large": LARGE})]) for e in [
    "large, large|tojson, large|tojson(indent=1), large.a, large.a ~ 'x', large.b|string, large.a|int, '[-99999999999999999999]'|from_json",
    "large.a is string, large.a is number, large.a is integer, large.a is float, large.a is mapping, large.a is iterable, large.a is none",
    "large.a == large.a, large.a == large.b, large.a == 'x', large.a == 1.5, large.a != large.c, large.a in large.d, large.d[0] in large.d",
    "large.a < large.b, large.b < large.a, large.c < large.a, large.c < 1, large.b < 1, 1 < large.c, true < large.c, large.c < 1.5, 1e40 < large.a",
    "'y' if large.b else 'n', large.a|default(1), [large.a, 1, large.b, large.c]|sort, [large.c, large.a]|max, large.c|float, large.a|tojson|length"]]
GROUPS += [(source, source, everything) for source in REFUSED]
